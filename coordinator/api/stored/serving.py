"""The delivery of answers that may be stored."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.answer.delivery import Delivery, Prepare, read_answer
from coordinator.api.answer.generated_answer import GeneratedAnswer
from coordinator.api.request.context import api_of
from coordinator.api.stored.pinned_request import pin_request
from coordinator.api.stored.stored_answers import owner_of, stored_of
from coordinator.journal.record import Record
from coordinator.text.model_info import Json


async def serve_storable(request: Request, endpoint: str, prepare: Prepare) -> Response:
    """Answer one request. A stored stream, and an answer in the background, go on without the client."""
    api, stored = api_of(request), stored_of(request)
    prepared, meter = await read_answer(request, endpoint, prepare)
    record = prepared.record
    if record is not None and (prepared.stream or record.background):
        answer = await stored.start(prepared, meter)
        if prepared.stream:
            return answer.stream()
        return JSONResponse(answer.result(), headers={"X-Request-Id": record.id})
    delivery = Delivery(api, prepared, meter)
    if prepared.stream:
        return await delivery.stream()
    response = await delivery.send_whole(request)
    if record is not None and response.status_code == 200:
        stored.keep(prepared)
    return response


def new_record(
    request: Request,
    dialect: str,
    answer: GeneratedAnswer,
    body: BaseModel,
    *,
    history: Json | None = None,
    background: bool = False,
) -> Record:
    """Return the record of an answer before its first token."""
    return Record(
        id=answer.id,
        owner=owner_of(request),
        dialect=dialect,
        model=api_of(request).model.fingerprint,
        created=answer.created,
        body=body.model_dump_json(exclude_none=True, by_alias=True),
        requests=tuple(pin_request(choice.request) for choice in answer.choices),
        history=history or {},
        background=background,
    )
