"""The raw byte streams that carry frames: their gRPC methods and the metadata that opens them.

Served with generic handlers and identity serializers: one message is one frame, as
`proto.frame.encode` wrote it.

`FRAMES`, stream to stream: the sender of a hop opens it and sends every frame of the epoch in order.
The receiver sends its initial metadata once it has checked who opens the stream, and no message;
its status says why it ends the hop.

`RESULTS`, one empty message to a stream: the coordinator opens it at the last stage and receives the
frames that have been through all stages, their outcomes filled, without tensors.
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
"""For every channel and server: gRPC's own limit of 4 MB is less than the frame of a prompt chunk."""

TOKEN_BYTES = 16
"""Of a plan token: enough that it cannot be guessed while an epoch lasts."""

_EPOCH, _STAGE, _SENDER, _TOKEN = "mtp-epoch", "mtp-stage", "mtp-sender", "mtp-token-bin"


@dataclass(frozen=True)
class StreamBinding:
    """What binds one stream to a plan.

    `stage` is the one that serves the stream, `sender` the worker or coordinator id of the one that
    opens it, `token` the plan token that Connect gave to every stage.
    """

    epoch: int
    stage: int
    sender: str
    token: bytes

    def to_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return (
            (_EPOCH, str(self.epoch)),
            (_STAGE, str(self.stage)),
            (_SENDER, self.sender),
            (_TOKEN, self.token),
        )

    @classmethod
    def from_metadata(cls, metadata: Sequence[tuple[str, str | bytes]]) -> StreamBinding:
        """Inverse of `to_metadata`, whatever other entries there are.

        Raises ProtocolError when one of ours is missing or malformed.
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
