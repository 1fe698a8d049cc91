"""The bounds on calls from other programs: sizes, silence and number.

A worker on loopback, or with --insecure, answers programs that prove nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from google.protobuf.message import Message

from proto.errors import DeadlineError, ProtocolError

MAX_CONTROL_BYTES = 256 * 1024
"""Bytes of a control message. The largest names a path and the layers of a model, in a few kilobytes."""

FIRST_MESSAGE_SECONDS = 10.0
"""Seconds. Maximum wait for the first message of a stream, which its caller sends at once."""

MAX_TRANSFERS = 4
"""Bounds the transfers of weights to one worker at a time. A coordinator needs one, and one more after a cut."""

M = TypeVar("M")


def check_size(request: Message) -> None:
    """Raise ProtocolError for a control message above MAX_CONTROL_BYTES."""
    if (size := request.ByteSize()) > MAX_CONTROL_BYTES:
        raise ProtocolError(
            f"the call has {size} bytes. The limit of a control message is {MAX_CONTROL_BYTES}"
        )


async def first_message(requests: AsyncIterator[M]) -> M:
    """Return the first message of a stream. Raises DeadlineError without one, and ProtocolError at the end."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
            return await anext(requests)
    except TimeoutError:
        raise DeadlineError(
            f"the stream sent no message within {FIRST_MESSAGE_SECONDS:g} s"
        ) from None
    except StopAsyncIteration:
        raise ProtocolError("the stream ended before its first message") from None
