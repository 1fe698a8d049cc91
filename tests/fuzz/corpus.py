"""The corpus: valid inputs made from the code, and the files in `corpus/`, one folder per target."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path

from proto import cluster_pb2 as pb
from proto.control import Rollback
from proto.frame import Admit, Commit, Frame, Outcome, Segment, encode
from proto.trust.certificates import new_key, signing_request
from proto.trust.joining import new_token

FOLDER = Path(__file__).parent / "corpus"


@cache
def corpus(target: str) -> list[bytes]:
    """Return the inputs of a target: the made ones, then the files. Keep crashing inputs there as files."""
    files = sorted((FOLDER / target).glob("*")) if (FOLDER / target).is_dir() else []
    return [*_made(target), *(file.read_bytes() for file in files)]


def _made(target: str) -> list[bytes]:
    segment = Segment(7, 42, 1200, (1001, 1002), open=True, sample=True, drafts=1)
    frame = Frame(3, 9, (Admit(7, 64, 2), Commit(7, 41, 2)), (segment,), (), (5200,))
    tensor = frame.with_tensor("bfloat16", (2, 8), bytes(32))
    result = Frame(3, 10, (), (segment,), (Outcome(7, 42, 2, 5, (6, 7)),))
    request = signing_request(new_key())
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2, 4], "data_offsets": [0, 16]}}).encode()
    me = pb.Coordinator(id="id", name="name")
    signals = (
        pb.Signal(hello=pb.Hello(coordinator=me, protocol_version=1, status_interval_ms=500)),
        Rollback(7, 42, 1).to_signal(1),
        pb.Signal(epoch=1, cancel=pb.Cancel(seq_id=7)),
        pb.Signal(heartbeat=pb.Heartbeat()),
    )
    made: dict[str, list[bytes]] = {
        "frame": [encode(frame), encode(tensor), encode(result)],
        "signal": [signal.SerializeToString() for signal in signals],
        "announcement": [
            b"v=2\0id=0123456789abcdef\0name=mac-2\0layers=0-31\0cluster=0123456789abcdef\0node=0123456789abcdef"
        ],
        "join_token": [str(new_token("0123456789abcdef", bytes(32), "10.0.0.1:50504")).encode()],
        "join_message": [json.dumps({"token_id": "00", "request": request, "proof": "00"}).encode() + b"\n"],
        "certificate": [request.encode()],
        "status": [b"CapacityError 2.5", b"RequestError x"],
        "host": [b"localhost:8080", b"[::1]:8080", b"10.0.0.1", b"evil.example"],
        "safetensors": [struct.pack("<Q", len(header)) + header + bytes(16)],
    }
    return made.get(target, [])
