"""The Provide call: messages of its stream on the event loop, files and hashes on a thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import CancelledError
from contextlib import suppress

from proto import cluster_pb2 as pb
from proto.errors import ClusterError, DeadlineError, ProtocolError
from proto.rpc.status_codes import to_status
from proto.terminal.size import format_size
from worker.fetch.fill import fill

log = logging.getLogger(__name__)

SILENCE_SECONDS = 60.0
"""Longest wait for the coordinator's next message: it reads a tensor from its disk, or hashes one."""

DRAIN_SECONDS = 10.0
"""How long a coordinator may go on sending what is not wanted any more."""


async def provide(
    requests: AsyncIterator[pb.Weights], hold: Callable[[pb.Coordinator, int], object]
) -> AsyncGenerator[pb.WeightsReply, None]:
    """Answer one call. `hold` claims this worker for the coordinator that offers, or raises what the call ends with.

    Whatever else goes wrong is the last reply.
    """
    offer = (await _next(requests)).offer
    hold(offer.coordinator, offer.lease_ms)
    loop = asyncio.get_running_loop()
    replies: asyncio.Queue[pb.WeightsReply | None] = asyncio.Queue()
    filled: asyncio.Future[int] = loop.create_future()
    filled.add_done_callback(lambda _: replies.put_nowait(None))
    stop = threading.Event()

    def pull() -> pb.Weights:
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

    def tell(reply: pb.WeightsReply) -> None:
        loop.call_soon_threadsafe(replies.put_nowait, reply)

    def work() -> None:
        try:
            received = fill(offer, pull, tell, stop)
        except BaseException as error:
            _post(loop, _fail, filled, error)
        else:
            _post(loop, _resolve, filled, received)

    # A daemon: a worker that must go does not wait for a hub.
    threading.Thread(target=work, name="weights", daemon=True).start()
    try:
        while (reply := await replies.get()) is not None:
            yield reply
        received = await filled
        log.info("weights are here", extra={"received": format_size(received)})
        yield pb.WeightsReply(kept=pb.WeightsKept(received=received))
    except ClusterError as error:
        log.warning("weights refused", extra={"error": str(error)})
        yield _refusal(error)
        # Until the coordinator has read it: a call that ends while it writes loses its status.
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


def _post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)


def _resolve(future: asyncio.Future[int], received: int) -> None:
    if not future.done():
        future.set_result(received)


def _fail(future: asyncio.Future[int], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen: when the call is gone, nobody asks for it
