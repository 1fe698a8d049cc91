"""`mtp-coord plan` for machines described by flags, without loading and without the network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.cli.plan_command import parse_node
from coordinator.planning.chips import card_spec
from coordinator.planning.plan import NodeSpec
from proto.errors import CheckpointError, MemoryLimitError, SpanError, UsageError
from proto.span import Span
from tests.support.checkpoints.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("plan") / "m", tie=False)


def run(*arguments: str) -> str:
    """Return the standard output of `mtp-coord plan …`. Raises the errors of the command."""
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def facts_of(*arguments: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return facts


def test_json_has_the_promised_keys(model: Path) -> None:
    """The JSON object has the keys that scripts read. Layers cover the model, and bytes fit the limits."""
    facts = facts_of(str(model), "--nodes", "3", "--memory", "1GB")
    assert set(facts) == {
        "candidates", "drafts", "machines", "slowest_seconds", "pass_seconds", "capacity", "unused",
        "rows_on_disk", "vision_bytes", "stages", "reason", "sequences", "fastest", "head", "no_group", "accepted",
        "first_token_seconds",
    }  # fmt: skip
    assert [stage["node"] for stage in facts["stages"]] == ["node-1", "node-2", "node-3"]
    layers = [i for stage in facts["stages"] for i in Span.parse(stage["layers"])]
    assert layers == list(range(8))
    assert [stage["ends"] for stage in facts["stages"]] == [["embedding"], [], ["lm_head"]]
    for stage in facts["stages"]:
        assert 0 < stage["weight_bytes"] + stage["cache_bytes"] <= stage["memory_limit"] == 10**9
    assert facts["slowest_seconds"] == max(s["predicted_seconds"] for s in facts["stages"])
    assert facts["capacity"]["sequences"] >= 1


def test_flags_change_the_plan(model: Path) -> None:
    """Speed, drafts and the type of the weights move the cut."""
    equal = facts_of(str(model), "--node", "a=1GB", "--node", "b=1GB", "--mtp", "0")
    fast = facts_of(str(model), "--node", "a=1GB", "--node", "b=1GB,speed=3", "--mtp", "0")
    assert fast["pass_seconds"] < equal["pass_seconds"]
    shallow, deep = (facts_of(str(model), "--node", "a=1GB", "--mtp", d) for d in ("0", "3"))
    assert deep["pass_seconds"] > shallow["pass_seconds"]
    assert deep["stages"][0]["weight_bytes"] > shallow["stages"][0]["weight_bytes"]
    wide = facts_of(str(model), "--node", "a=1GB", "--dtype", "bfloat16")
    assert wide["stages"][0]["weight_bytes"] < deep["stages"][0]["weight_bytes"]


def test_no_plan_is_an_error_that_says_why(model: Path) -> None:
    """Too little memory, a gap and no machine are errors that name the cause."""
    with pytest.raises(MemoryLimitError, match=r"a \(limit 1 MB\) lacks"):
        run(str(model), "--node", "a=1MB")
    with pytest.raises(SpanError, match="no worker holds layers 4-7"):
        run(str(model), "--node", "a=1GB,layers=0-3")
    with pytest.raises(UsageError, match="--nodes 2 --memory"):
        run(str(model))


def test_a_node_is_read_as_written() -> None:
    """A node has a name, a size, and settings in any order."""
    assert parse_node("a=64GB") == NodeSpec("a", 64 * 10**9)
    assert parse_node("a=1GiB,layers=0-3,speed=2.5") == NodeSpec("a", 2**30, 2.5, Span(0, 4))
    assert parse_node("a=1GiB,tflops=8") == NodeSpec("a", 2**30, operations=8e12)
    assert parse_node("box=rtx 4090,layers=0-3") == replace(card_spec("box", "RTX 4090"), pinned=Span(0, 4))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a=",
        "=1GB",
        "a=x",
        "a=1GB,speed=fast",
        "a=1GB,speed=0",
        "a=1GB,tflops=-1",
        "a=1GB,cores=8",
        "a=1GB,",
        "a=RTX 9999",
    ],
)
def test_what_is_no_node_is_refused(text: str) -> None:
    """A malformed node is a UsageError that shows the form or names the setting."""
    with pytest.raises(UsageError):
        parse_node(text)


def test_the_first_token_is_predicted_where_prompts_are_known() -> None:
    """A machine with faster prompts computes more layers than one with equal tokens, and the reason says why."""
    mac = ("--mac", "M4 Pro 64GB")
    facts, unknown = (
        facts_of("qwen3.5:27b", "--bits", "4", *mac, "--node", f"box=96GB,speed=2.6{tflops}")
        for tflops in (",tflops=90", "")
    )
    assert facts["reason"].startswith("cut for requests of 2,000 tokens") and unknown["reason"] == ""
    assert facts["first_token_seconds"] < 8 and unknown["first_token_seconds"] is None
    layers = [{one["node"]: len(Span.parse(one["layers"])) for one in found["stages"]} for found in (facts, unknown)]
    assert layers[0]["box"] > layers[1]["box"]
    assert "First token of a prompt of 2,000 tokens: " in run("qwen3.5:27b", "--bits", "4", *mac)


PAIR = ("--mac", "M4 Max 128GB", "--mac", "M4 Max 128GB")


def test_a_model_of_mlx_lm_is_planned_without_a_download() -> None:
    """GLM-4.7 in 4 bits exceeds what two Macs of 128 GB give to a program by default, and --memory raises it."""
    with pytest.raises(MemoryLimitError, match="weights of 199 GB"):
        run("glm-4.7", "--bits", "4", *PAIR)
    facts = facts_of("glm-4.7", "--bits", "4", *PAIR, "--memory", "112GB")
    assert [stage["memory_limit"] for stage in facts["stages"]] == [112 * 10**9] * 2
    assert facts["head"] is False and facts["drafts"] == 0
    assert facts["candidates"][0]["drafted_seconds"] is None


@pytest.mark.parametrize("name", ["qwen3.5:27b", "mlx-community/Qwen3.5-27B-4bit"])
def test_a_known_model_is_planned_without_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """The shape of a known repo comes with the program. A repo that only has its form is asked of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    facts = facts_of(name, "--mac", "M4 Pro 64GB")
    assert facts["stages"][0]["weight_bytes"] // 10**9 == 15
    assert facts["head"] is True
    with pytest.raises(CheckpointError, match="not in the local cache"):
        run("someone/Qwen3.5-27B-4bit", "--mac", "M4 Pro 64GB")


def test_the_plan_says_where_one_machine_is_faster() -> None:
    """A pipeline adds its hop to a token: where the model fits one of two equal Macs, this one is faster alone."""
    text = run("llama3.3:70b", "--bits", "4", *PAIR)
    assert "One answer is fastest on one machine." in text
    assert "drafts from repeated text alone" in text
    assert "drafting" not in text
    facts = facts_of("qwen3:235b-a22b", "--bits", "4", *PAIR)
    assert facts["fastest"] == "a pipeline of 2"
    text = " ".join(run("qwen3:235b-a22b", "--bits", "4", *PAIR).split())
    assert "fastest on one machine" not in text
    assert "Not one machine: none has room for the model." in text
    assert "No group: the layers of qwen3_moe cannot be shared." in text
    assert "│ a pipeline of 2 │" in text


def test_memory_belongs_to_some_machines(model: Path) -> None:
    with pytest.raises(UsageError, match="--nodes and --memory go together"):
        run(str(model), "--memory", "1GB", "--node", "a=1GB")
