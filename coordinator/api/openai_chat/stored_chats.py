"""Stored chat completions under `/v1/chat/completions/{id}`, and streams that continue by `Last-Event-ID`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.request.query import number_in_query
from coordinator.api.stored.stored_answers import stored_of
from proto.errors import RequestError

DIALECT = "chat"

LAST_EVENT_ID = "Last-Event-ID"

router = APIRouter()


@router.get("/v1/chat/completions/{answer_id}")
async def retrieve_chat(request: Request, answer_id: str) -> Response:
    """Return a stored chat completion, or its events from a number on and those to come."""
    if LAST_EVENT_ID in request.headers:
        return await continue_stream(request, answer_id)
    if request.query_params.get("stream") == "true":
        after = number_in_query(request, "starting_after", -1)
        return await stored_of(request).stream(request, answer_id, DIALECT, after)
    return JSONResponse(await stored_of(request).result(request, answer_id, DIALECT))


@router.delete("/v1/chat/completions/{answer_id}")
async def delete_chat(request: Request, answer_id: str) -> Response:
    """Delete a stored chat completion."""
    await stored_of(request).delete(request, answer_id, DIALECT)
    return JSONResponse({"object": "chat.completion.deleted", "id": answer_id, "deleted": True})


async def continue_stream(request: Request, answer_id: str | None = None) -> Response:
    """Return the rest of a stored stream after the event that the header `Last-Event-ID` names."""
    sent = request.headers[LAST_EVENT_ID]
    found, _, number = sent.rpartition(":")
    if not (number.isascii() and number.isdigit()) or answer_id not in (None, found):
        raise RequestError(
            f"{LAST_EVENT_ID}: {sent!r:.80} is not an event of this stream. Send the id of the last event received.",
            param=LAST_EVENT_ID,
        )
    return await stored_of(request).stream(request, found, DIALECT, int(number[:15]))
