"""The raw byte streams that carry frames: their gRPC methods and the metadata that opens them.

Generic handlers with identity serializers serve both: one message is one frame, as
`proto.frame.encode` wrote it.

`FRAMES`, stream to stream: the sender of a hop opens it and sends every frame of the epoch in order.
The receiver checks the sender, then sends its initial metadata. It sends no message, and its status
says why the hop ended.

`RESULTS`, one empty message to a stream: the coordinator opens it at the last stage and receives the
frames that passed all stages. They have outcomes and no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def _decimal(found: dict[str, str | bytes], name: str) -> int:
    text = found.get(name)
    if not isinstance(text, str) or not (text.isascii() and text.isdigit()) or len(text) > 19:
        raise ProtocolError(f"stream metadata {name} is missing or not a number")
    return int(text)
