"""The Provide call: the messages of its stream on the event loop, files and hashes on a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial

from proto import cluster_pb2 as pb
from proto.errors import ClusterError, DeadlineError, ProtocolError
from proto.rpc.listener import first_message
from proto.rpc.status_codes import to_status
from proto.terminal.progress import format_size
from worker.engine.engine_thread import run_into
from worker.fetch.fill import fill

log = logging.getLogger(__name__)

SILENCE_SECONDS = 60.0
"""Seconds. Maximum wait for the coordinator's next message: it reads or hashes a tensor."""

DRAIN_SECONDS = 10.0
"""Seconds for which a coordinator may still send messages after a refusal."""


async def provide(
    requests: AsyncIterator[pb.Weights], renew_lease: Callable[[pb.Coordinator, int], object]
) -> AsyncGenerator[pb.WeightsReply, None]:
    """Yield the replies of one call. `renew_lease` leases this worker to the coordinator, or raises BusyError.

    Every other error is the last reply.
    """
    offer = (await first_message(requests)).offer
    renew_lease(offer.coordinator, offer.lease_ms)
    loop = asyncio.get_running_loop()
    replies: asyncio.Queue[pb.WeightsReply | None] = asyncio.Queue()
    filled: asyncio.Future[int] = loop.create_future()
    filled.add_done_callback(lambda _: replies.put_nowait(None))
    stop = threading.Event()

    def pull() -> pb.Weights:
        """Return the next message, from the thread that fills the copy."""
        coming = asyncio.run_coroutine_threadsafe(_next(requests), loop)
        try:
            return coming.result(SILENCE_SECONDS)
        except CancelledError:
            raise ProtocolError("the coordinator ended the call") from None
        except TimeoutError:
            coming.cancel()
            raise DeadlineError(
                f"the coordinator sent no weights for {SILENCE_SECONDS:g} s"
            ) from None

    def send_reply(reply: pb.WeightsReply) -> None:
        """Queue a reply, from the thread that fills the copy."""
        loop.call_soon_threadsafe(replies.put_nowait, reply)

    work = partial(run_into, filled, partial(fill, offer, pull, send_reply, stop))
    # A daemon thread, so that a worker that ends does not wait for a hub.
    threading.Thread(target=work, name="weights", daemon=True).start()
    try:
        while (reply := await replies.get()) is not None:
            yield reply
        received = await filled
        log.info("weights received", extra={"received": format_size(received)})
        yield pb.WeightsReply(kept=pb.WeightsKept(received=received))
    except ClusterError as error:
        log.warning("weights refused", extra={"error": str(error)})
        yield _refusal(error)
        # Wait until the coordinator has read the reply. A call that ends during its writes loses the reply.
        with suppress(TimeoutError, ClusterError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while True:
                    await _next(requests)
    finally:
        stop.set()


def _refusal(error: ClusterError) -> pb.WeightsReply:
    status = to_status(error)
    refused = pb.WeightsRefused(code=status.code, details=status.details)
    for key, value in status.metadata:
        refused.metadata[key] = value.encode() if isinstance(value, str) else value
    return pb.WeightsReply(refused=refused)


async def _next(requests: AsyncIterator[pb.Weights]) -> pb.Weights:
    try:
        return await anext(requests)
    except StopAsyncIteration:
        raise ProtocolError("the coordinator ended the call early") from None
