"""One output item of a response: a message, reasoning or a tool call."""

from __future__ import annotations

from coordinator.text.model_info import Json

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class OutputItem:
    """An output item while it is generated. `kind` is its type, `index` its place in the output.

    `status` is `incomplete` for an item that the limit cut off, and for a call that cannot be parsed.
    """

    def __init__(self, kind: str, index: int, answer_id: str, call_id: str, name: str) -> None:
        self.kind = kind
        self.index = index
        self.id = f"{PREFIXES[kind]}_{answer_id.partition('_')[2]}{index}"
        self.open = True
        self.status = "in_progress"
        self._call_id = call_id
        self._name = name
        self._text: list[str] = []

    @property
    def event(self) -> str:
        """The prefix of the events about the item's content."""
        return EVENTS[self.kind]

    def append(self, text: str) -> None:
        """Append to the text or the arguments."""
        self._text.append(text)

    def part(self) -> Json | None:
        """Return the content part with the text so far, or None for a tool call."""
        text = "".join(self._text)
        if self.kind == "message":
            return {"type": "output_text", "text": text, "annotations": []}
        return {"type": "reasoning_text", "text": text} if self.kind == "reasoning" else None

    def final_fields(self) -> Json:
        """Return the fields of the event that ends the content."""
        text = "".join(self._text)
        if self.kind == "function_call":
            return {"name": self._name, "arguments": text}
        return {"text": text}

    def close(self, *, complete: bool) -> None:
        """End the item."""
        self.open = False
        self.status = "completed" if complete else "incomplete"

    def as_json(self) -> Json:
        """Return the item."""
        item: Json = {"id": self.id, "type": self.kind, "status": self.status}
        started = bool(self._text)
        if self.kind == "message":
            return {**item, "role": "assistant", "content": [self.part()] if started else []}
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": [self.part()] if started else []}
        arguments = "".join(self._text)
        return {**item, "call_id": self._call_id, "name": self._name, "arguments": arguments}
