"""The types of fields that all dialects share: histories that are never refused, limits and stop strings."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Self, TypeVar, cast, get_args

import pydantic
from pydantic import AliasChoices, AliasPath

from coordinator.prompts.conversation import RoleName, newest_of_user, note_of, role_of
from coordinator.text.schemas import Json
from coordinator.web.request_body import Body

T = TypeVar("T")


class HistoryObject(Body):
    """An object of the history. Nothing of what other servers have added to it is refused."""

    @pydantic.model_validator(mode="after")
    def _check_others(self) -> Self:
        (self.__pydantic_extra__ or {}).clear()
        return self


def aliased(*names: str) -> Any:
    """Return an optional field of several names. The first that is sent counts; one with a dot is a path."""
    paths = [AliasPath(*name.split(".")) if "." in name else name for name in names]
    return pydantic.Field(None, validation_alias=AliasChoices(*paths))


Many = Annotated[list[T], pydantic.Field(fail_fast=True)]
"""A list whose validation ends at the first error. A client could otherwise cause an error object for each byte."""


def _read_or_describe(content: Any, read: pydantic.ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(content)
    except pydantic.ValidationError:
        return note_of({"type": "result", "content": content})


AS_WORDS = pydantic.WrapValidator(_read_or_describe)
"""A validator of a tool's output, which an agent cannot change: an invalid one becomes its words."""


def _role(turn: Any) -> str:
    """Return the role of a message that may be invalid. An unknown name counts as the user's."""
    name = turn.get("role") if isinstance(turn, dict) else "user"
    if name in get_args(RoleName):
        return role_of(cast(RoleName, name))
    return "user" if isinstance(name, str) else "tool"


def _as_text(turn: Any) -> Json:
    content = turn if isinstance(turn, dict) else {"content": turn}
    role = content["role"] if content.get("role") in get_args(RoleName) else "user"
    return {"role": role, "content": note_of({**content, "type": str(content.get("type") or "message")})}


def _read_history(turns: Any, read: pydantic.ValidatorFunctionWrapHandler) -> Any:
    """Validate a history. An invalid message becomes its words, except the newest of the user: others stay invalid."""
    try:
        return read(turns)
    except pydantic.ValidationError:
        if not isinstance(turns, list):
            raise
    newest, found = newest_of_user([*map(_role, turns)]), [*turns]
    for index, turn in enumerate(turns):
        with suppress(pydantic.ValidationError):
            read([turn])
            continue
        if index != newest:
            found[index] = _as_text(turn)
    return read(found)


History = Annotated[list[T], pydantic.Field(fail_fast=True), pydantic.WrapValidator(_read_history)]
"""The messages of a conversation. A client cannot change an earlier one, so it is never refused."""

StopString = Annotated[str, pydantic.Field(max_length=256)]
StopStrings = Annotated[list[StopString], pydantic.Field(max_length=64)]
"""Stop strings. The end of the text is compared with each of them at every token. Empty ones have no effect."""


def _check_limit(limit: int) -> int | None:
    if limit == 0:
        raise ValueError("send 1 or more, or -1 for no limit")
    return limit if limit > 0 else None


def _check_budget(limit: int) -> int | None:
    return limit if limit >= 0 else None


Budget = Annotated[int, pydantic.Field(ge=-2), pydantic.AfterValidator(_check_budget)]
"""A number of reasoning tokens. 0 switches the reasoning off, a negative one is no limit."""

TokenLimit = Annotated[int, pydantic.Field(ge=-2), pydantic.AfterValidator(_check_limit)]
"""A number of tokens, None for a negative one: llama.cpp's and LM Studio's clients send it for no limit."""

Seed = Annotated[int, pydantic.Field(ge=-(2**63), lt=2**64)]
