"""The options of a model arrive on the worker as the coordinator has them, or are refused."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from proto import cluster_pb2 as pb
from proto.errors import UsageError
from proto.stage_options import StageOptions

GIVEN = StageOptions("float16", 8, with_head=False, exact=True, slices=4, draft_vocab=b"\x05")


@pytest.mark.parametrize("name", ["", *(field.name for field in fields(StageOptions))])
def test_every_option_arrives(name: str) -> None:
    """Each option passes the wire beside the defaults of the others, and beside other values of them."""
    changed = {name: getattr(GIVEN, name)} if name else {}
    for options in (StageOptions(**changed), replace(GIVEN, **({name: getattr(StageOptions(), name)} if name else {}))):
        request = pb.LoadRequest(last=True)
        options.write_to(request)
        assert StageOptions.from_request(pb.LoadRequest.FromString(request.SerializeToString())) == options


def test_only_the_last_stage_gets_the_vocabulary_of_drafts() -> None:
    """Its bitmap has a bit for every token, and other stages have no head."""
    request = pb.LoadRequest(last=False)
    GIVEN.write_to(request)
    assert StageOptions.from_request(request) == replace(GIVEN, draft_vocab=b"")


@pytest.mark.parametrize("wrong", [{"kv_bits": 3}, {"dtype": "int9"}])
def test_options_that_no_stage_has_are_refused(wrong: dict[str, str | int]) -> None:
    """The error names the flags and their values."""
    with pytest.raises(UsageError, match="choose 4 or 8"):
        StageOptions.from_request(pb.LoadRequest(**wrong))  # type: ignore[arg-type]
