"""The calls that open data connections: their gRPC methods, and the metadata that binds them to a plan.

The server checks the caller, then sends a ticket in its initial metadata. The caller opens a data connection with it
(`proto.rpc.data_socket`), and frames travel there, as `proto.frame.encode` wrote them. The calls themselves carry no
messages. They stay open as long as their connection, and their status says why it ended.

`FRAMES`: the sender of a hop calls it and sends every frame of the epoch in order.

`RESULTS`: the coordinator calls it at the last stage and receives the frames that passed all stages. They have outcomes
and no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proto.errors import ProtocolError
from proto.frame import MAX_MESSAGE_BYTES

SERVICE = "mtpcluster.v1.Pipeline"
FRAMES = f"/{SERVICE}/Frames"
RESULTS = f"/{SERVICE}/Results"

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
"""The options of every channel and server. gRPC's default limit of 4 MB is below the frame of a prompt chunk."""

TOKEN_BYTES = 16
"""Bytes of a plan token: enough that nothing can guess it during an epoch."""

TICKET_BYTES = 32
"""Bytes of a ticket: enough that nothing can guess it while its call is open."""

_TICKET = "mtp-ticket-bin"
_EPOCH, _STAGE, _SENDER, _TOKEN = "mtp-epoch", "mtp-stage", "mtp-sender", "mtp-token-bin"


@dataclass(frozen=True)
class StreamBinding:
    """The values that bind one stream to a plan.

    `stage` is the number of the stage that serves the stream. `sender` is the worker id or coordinator id
    of the process that opens it. `token` is the plan token that Connect gave to every stage.
    """

    epoch: int
    stage: int
    sender: str
    token: bytes

    def to_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """Return the gRPC metadata that opens the stream."""
        return (
            (_EPOCH, str(self.epoch)),
            (_STAGE, str(self.stage)),
            (_SENDER, self.sender),
            (_TOKEN, self.token),
        )

    @classmethod
    def from_metadata(cls, metadata: Sequence[tuple[str, str | bytes]]) -> StreamBinding:
        """Invert `to_metadata`, and ignore all other entries.

        Raises ProtocolError when an entry is missing or malformed.
        """
        found = dict(metadata)
        sender, token = found.get(_SENDER), found.get(_TOKEN)
        if not isinstance(sender, str) or not 0 < len(sender) <= 64:
            raise ProtocolError(f"stream metadata {_SENDER} is missing or malformed")
        if not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
            raise ProtocolError(f"stream metadata {_TOKEN} is missing or malformed")
        return cls(_decimal(found, _EPOCH), _decimal(found, _STAGE), sender, token)


def ticket_metadata(ticket: bytes) -> tuple[tuple[str, bytes], ...]:
    """Return the initial metadata that gives a caller its ticket."""
    return ((_TICKET, ticket),)


def ticket_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    """Invert `ticket_metadata`. Raises ProtocolError when the ticket is missing or malformed."""
    ticket = dict(metadata or ()).get(_TICKET)
    if not isinstance(ticket, bytes) or len(ticket) != TICKET_BYTES:
        raise ProtocolError("the worker sent no ticket for a data connection")
    return ticket


def _decimal(found: dict[str, str | bytes], name: str) -> int:
    text = found.get(name)
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()) or len(text) > 19:
        raise ProtocolError(f"stream metadata {name} is missing or not a number")
    return int(text)
