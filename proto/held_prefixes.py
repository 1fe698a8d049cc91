"""The prefixes of a prompt on the disk of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from proto import cluster_pb2 as pb
from proto.span import Span


@dataclass(frozen=True)
class HeldPrefixes:
    """The layers on the disk of a stage after each prefix of a prompt, by the length of the prefix.

    `layers` are those of the stage itself. The number after the last layer stands for the MTP head. Disks with another
    `namespace` have other bits.
    """

    layers: Span
    namespace: str
    held: Mapping[int, Set[int]]

    def missing(self, length: int) -> set[int]:
        """Return the layers of the stage that the disk lacks after `length` tokens."""
        return set(self.layers) - self.held.get(length, set())

    def to_reply(self) -> pb.PrefixReply:
        """Return this as a message."""
        reply = pb.PrefixReply(layers=_message(self.layers), namespace=self.namespace)
        for length, layers in self.held.items():
            reply.held.add(length=length, layers=map(_message, spans_of(layers)))
        return reply

    @classmethod
    def from_reply(cls, reply: pb.PrefixReply) -> HeldPrefixes:
        """Return what `reply` says. Raises SpanError."""
        held = {
            one.length: {layer for span in one.layers for layer in Span(span.start, span.end)}
            for one in reply.held
        }
        return cls(Span(reply.layers.start, reply.layers.end), reply.namespace, held)


def spans_of(layers: Iterable[int]) -> Iterator[Span]:
    """Yield the spans that `layers` form together, in their order."""
    start = end = -1
    for layer in sorted(layers):
        if layer != end:
            if end > start:
                yield Span(start, end)
            start = layer
        end = layer + 1
    if end > start:
        yield Span(start, end)


def _message(span: Span) -> pb.Span:
    return pb.Span(start=span.start, end=span.end)
