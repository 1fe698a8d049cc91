"""One stored answer as the journal keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """A stored answer: enough to continue it after a restart, and its result once it has ended.

    `owner` identifies the API key that made it. `body` is the client's request as JSON, in the dialect `dialect`.
    `model` is the fingerprint of the checkpoint. `requests` are the engine's requests as msgpack encodes them, with
    prompts, parameters and seeds. `history` is the conversation in the format of the dialect. `result` is the object
    that clients retrieve. `events` are the numbered events of the stream. `tokens` are those used so far. A record
    without `requests` was stored at its end and cannot be continued.
    """

    id: str
    owner: str
    dialect: str
    model: str
    created: int
    body: str
    requests: tuple[Json, ...] = ()
    history: Json = field(default_factory=dict)
    background: bool = False
    ended: bool = False
    result: Json = field(default_factory=dict)
    events: Sequence[bytes] = ()
    tokens: tuple[int, ...] = ()
