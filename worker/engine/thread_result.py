"""The result of a function that runs on another thread, as a future of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_into(future: asyncio.Future[T], function: Callable[[], T]) -> None:
    """Call `function` on this thread and set its result or its error on `future`, on the future's event loop."""
    try:
        result = function()
    except BaseException as error:
        post(future.get_loop(), _set_error, future, error)
    else:
        post(future.get_loop(), _set_result, future, result)


def post(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Call `function` on `loop` from another thread. A closed loop is ignored."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *args)


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # marks it as retrieved, so that asyncio does not report it when no caller awaits it
