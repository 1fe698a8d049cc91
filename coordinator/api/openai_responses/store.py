"""The responses that clients may continue or read again, in the memory of this process."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.api.openai_responses.items import Item
from coordinator.text.model_info import Json
from proto.errors import RequestError

MAX_RESPONSES = 1000
"""Maximum number of stored responses. The oldest is dropped first."""

MAX_BYTES = 64 * 2**20
"""Bytes. Maximum size of the stored responses as JSON, about 1,000 long conversations."""


class UnknownResponseError(RequestError):
    """The request names a response that is not stored."""

    http_status = 404


@dataclass(frozen=True)
class StoredResponse:
    """A complete response: its object, the items of its own input, and those of the whole conversation before it."""

    response: Json
    input_items: Sequence[Json]
    history: Sequence[Item]

    @property
    def nbytes(self) -> int:
        """The size as JSON."""
        return len(json.dumps(self.response)) + sum(len(json.dumps(i)) for i in self.input_items)


class ResponseStore:
    """The stored responses of one app, bounded by number and size."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._nbytes = 0

    def add_response(self, stored: StoredResponse) -> None:
        """Store a response, and drop the oldest ones that exceed the limits."""
        size = stored.nbytes
        self._stored[stored.response["id"]] = stored, size
        self._nbytes += size
        while len(self._stored) > MAX_RESPONSES or self._nbytes > MAX_BYTES:
            _, (_, dropped) = self._stored.popitem(last=False)
            self._nbytes -= dropped

    def find_response(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises UnknownResponseError, which names the client's field `param`."""
        if response_id not in self._stored:
            raise UnknownResponseError(
                f"response {response_id!r:.80}: not found. It was not stored, or is too old.",
                param=param,
            )
        return self._stored[response_id][0]

    def delete_response(self, response_id: str) -> None:
        """Delete a stored response. Raises UnknownResponseError."""
        self.find_response(response_id)
        _, size = self._stored.pop(response_id)
        self._nbytes -= size
