"""The endpoints of the page's view of models: the catalog, the hub, jobs, and invitations for machines.

All of them need the scope `admin`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from coordinator.api.request.body import Body, keys_are_set, read_body
from coordinator.api.request.context import api_of
from coordinator.models.admin import ModelAdmin
from coordinator.status.job_status import JobKind
from coordinator.web.qr_code import draw_qr_code
from proto.errors import AccessError, NotReadyError, RequestError

router = APIRouter(prefix="/v1/cluster")

MAX_NAME = 200
"""Characters of a model's name."""


class JobBody(Body):
    """A job to start. `target` names the converted model that it makes or changes."""

    kind: JobKind
    model: str = Field(min_length=1, max_length=MAX_NAME)
    target: str = Field("", max_length=MAX_NAME)
    bits: Literal[4, 8] | None = None


def admin_of(request: Request) -> ModelAdmin:
    """Return the models of the server. Raises NotReadyError before the server has any."""
    admin = api_of(request).model_admin
    if admin is None:
        raise NotReadyError("this server has no models to manage")
    return admin


def require_json(request: Request) -> None:
    """Raise RequestError for another content type, which a web page could send across sites without permission."""
    if request.headers.get("content-type") != "application/json":
        raise RequestError(f"{request.url.path}: send the header Content-Type: application/json")


@router.get("/models")
async def models(request: Request) -> Response:
    """List the models on this machine."""
    admin = admin_of(request)
    found = await admin.list_models()
    return JSONResponse({"served": admin.served, "models": [asdict(one) for one in found]})


@router.get("/hub")
async def hub(request: Request) -> Response:
    """Search the hub for the text in `search`. Without a text, list the supported families."""
    found = await admin_of(request).search(request.query_params.get("search", ""))
    return JSONResponse({"models": [asdict(one) for one in found]})


@router.get("/fit")
async def fit(request: Request) -> Response:
    """Return the facts of the model named by `model`, and whether and how it fits this cluster."""
    name = request.query_params.get("model", "")
    if not 0 < len(name) <= MAX_NAME:
        raise RequestError(f"model: give a name of 1 to {MAX_NAME} characters", param="model")
    facts, found = await admin_of(request).fit(name)
    return JSONResponse({"model": asdict(facts), "fit": asdict(found)})


@router.post("/jobs")
async def start_job(request: Request) -> Response:
    """Start a job. Its progress is in the status, under `jobs`."""
    require_json(request)
    body = await read_body(request, JobBody)
    job = admin_of(request).start_job(body.kind, body.model, body.target, body.bits)
    return JSONResponse(asdict(job), status_code=202)


@router.delete("/jobs/{number}")
async def cancel_job(request: Request, number: int) -> Response:
    """Cancel the running job `number`."""
    admin_of(request).jobs.cancel_job(number)
    return JSONResponse({"status": "cancelled"})


@router.post("/invitations")
async def invite(request: Request) -> Response:
    """Return the command with which one new machine joins, and its QR code.

    The command holds a secret, so a server without API keys refuses: any user of its machine could read it.
    """
    require_json(request)
    api = api_of(request)
    if not keys_are_set(api.options):
        raise AccessError(
            "invitations need an API key with the scope admin. Create one with mtp-coord key create, or run "
            "mtp-coord token create on the coordinator's machine"
        )
    if api.invite is None:
        raise NotReadyError("machines cannot join: start mtp-coord serve with --listen")
    invitation = api.invite()
    return JSONResponse({**asdict(invitation), "qr": asdict(draw_qr_code(invitation.command))})
