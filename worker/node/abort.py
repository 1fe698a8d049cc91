"""The end of a call with an error of this project."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio

from proto.errors import ClusterError
from proto.rpc.status_codes import to_status

log = logging.getLogger(__name__)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ClusterError) -> None:
    """Log `error` and end the call with its status. Raises gRPC's own error of an ended call."""
    log.info("call refused", extra={"error": str(error)})
    status = to_status(error)
    await context.abort(grpc.StatusCode[status.code], status.details, status.metadata)
