"""The internal event stream of an answer. Writers of the dialects translate it to bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proto.frame import TokenLogprob

DRAFTED, SAMPLED = "d", "s"
"""Origins of a token: an accepted draft of the MTP head, or the model's own choice after the drafts."""

EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class TextDelta:
    """The next text of a choice. `offsets` are the tokens' character offsets in the choice's whole text.

    `logprobs` covers the tokens since the last event with logprobs; it is empty unless the client requested it.
    `origins` has one letter for each token since the last event.
    """

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()
    origins: str = ""


@dataclass(frozen=True)
class ReasoningDelta:
    """The next reasoning of a choice. `logprobs` and `origins` are as in TextDelta."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    origins: str = ""


@dataclass(frozen=True)
class CallDelta:
    """A part of a tool call. The first part of the call with index `call` has `id` and `name`.

    `arguments` is the next part of the arguments' JSON text, which a CallEnd completes. `logprobs` and `origins`
    are as in TextDelta.
    """

    choice: int
    call: int
    id: str | None
    name: str | None
    arguments: str
    logprobs: tuple[TokenLogprob, ...] = ()
    origins: str = ""


@dataclass(frozen=True)
class CallEnd:
    """The end of the call with index `call`. `complete` is False if the limit or an error cut the call off."""

    choice: int
    call: int
    complete: bool


@dataclass(frozen=True)
class ChoiceEnd:
    """The last event of a choice. `stop_string` is the stop string that ended it, if one did."""

    choice: int
    reason: EndReason
    stop_string: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


AnswerEvent = TextDelta | ReasoningDelta | CallDelta | CallEnd | ChoiceEnd
