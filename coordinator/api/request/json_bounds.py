"""The bounds on the values of a JSON body, which are counted while it arrives, before it is parsed."""

from __future__ import annotations

from proto.errors import RequestError

MAX_FIELDS = 2**16
"""Objects, lists and fields of objects in a body. The slowest to read are messages, about 0.3 s for all."""

MAX_ITEMS = 2**18
"""Values of a body after a comma, besides one for each token of the context. Reading as many takes about 0.2 s."""


class JsonBounds:
    """A counter of the values in a JSON text that arrives in parts, without the text of strings.

    The parser lets no other thread of the process run, so it must not receive millions of values.
    """

    def __init__(self, context: int) -> None:
        self.fields = 0
        self.items = 0
        self._max_items = MAX_ITEMS + context
        self._in_string = False
        self._escaped = False

    def add_part(self, part: bytes) -> None:
        """Count the values in the next part. Raises RequestError above a bound."""
        if not part:
            return
        text = part[self._escaped :].replace(b"\\\\", b"")
        self._escaped = text.endswith(b"\\")
        pieces = text.replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[self._in_string :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        self.fields += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
        self.items += outside.count(b",")
        for count, limit, unit in (
            (self.fields, MAX_FIELDS, "objects, lists and fields"),
            (self.items, self._max_items, "values"),
        ):
            if count > limit:
                raise RequestError(f"request body: more than {limit} {unit}. Send fewer.")
