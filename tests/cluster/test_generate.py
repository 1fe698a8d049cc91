"""Output, summary and exit status of `mtp-coord generate`.

Most calls run in this process, to save the imports. Tests of signals and terminals start processes.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from coordinator.cli import PROGRAM, app
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from mtp.head.draft_vocabulary import drafted_tokens
from proto.errors import UsageError
from proto.params import SamplingParams
from proto.stage_options import StageOptions
from proto.terminal import console
from tests.support.checkpoints.checkpoints import write_checkpoint
from tests.support.checkpoints.tiny_tokenizer import write_tokenizer

PROMPT = "Hello world, how are you?"
PROCESS = [sys.executable, "-c", "from coordinator.cli import main; main()", "generate"]
SUMMARY = ["prompt", "generation", "drafts", "memory"]
"""First words of the lines on stderr."""

DEADLINE = 60.0
"""Seconds. Deadline of a process that needs about 3 s for imports and loading on an idle machine."""


@dataclass(frozen=True)
class Done:
    """Result of one call."""

    code: int
    out: str
    err: str


Call = Callable[..., Done]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random checkpoint with head and tokenizer."""
    return write_tokenizer(write_checkpoint(tmp_path_factory.mktemp("model"), vocab=512))


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Return `call(model, *flags)`, which runs the program as main() does, in this process."""

    def run(model: Path, *flags: str) -> Done:
        capfd.readouterr()
        words = ["generate", "--model", str(model), *flags]
        try:
            console.run(PROGRAM, lambda: app(words, prog_name=PROGRAM))
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
        assert isinstance(code, int)
        return Done(code, *capfd.readouterr())

    return run


def result_of(done: Done) -> dict[str, Any]:
    """Return the object that a call with --json printed."""
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


# ---- what comes out


@pytest.mark.smoke
def test_json_has_tokens_text_reason_and_figures(call: Call) -> None:
    """--json prints one consistent object on stdout and nothing on stderr."""
    model = checkpoint_dir()  # its drafts are often right
    flags = ("--raw", "--prompt", PROMPT, "--max-tokens", "24", "--temp", "1", "--seed", "1")
    done = call(model, *flags, "--mtp", "2", "--json")
    found = result_of(done)
    assert done.err == ""
    assert list(found) == ["tokens", "text", "finish_reason", "stats"]
    assert found["finish_reason"] == "length"
    tokenizer = Tokenizer.load(model)
    text = b"".join(map(tokenizer.text_bytes, found["tokens"])).decode(errors="ignore")
    assert found["text"].replace("\ufffd", "") == text.replace("\ufffd", "")
    stats = found["stats"]
    assert (stats["completion_tokens"], len(found["tokens"])) == (24, 24)
    assert 2 * stats["windows"] >= stats["drafted"] > stats["accepted"] > 0
    assert len(stats["acceptance_by_position"]) == 2
    # The prompt gives the first token; a window gives the drafts it keeps and one of its own.
    assert stats["windows"] + stats["accepted"] == 23
    assert stats["tokens_per_window"] == pytest.approx(23 / stats["windows"], abs=1e-4)
    assert min(stats["prompt_tps"], stats["generation_tps"], stats["peak_memory_bytes"]) > 0


def test_text_is_the_same_with_a_summary(call: Call, model: Path) -> None:
    """Without --json, stdout has only the text, which ends with a line break. The figures are on stderr."""
    flags = (PROMPT, "--raw", "--max-tokens", "24", "--temp", "1", "--seed", "7")
    text = result_of(call(model, *flags, "--json"))["text"]
    done = call(model, *flags)
    assert done.code == 0
    assert done.out.rstrip("\n") == text.rstrip("\n")
    assert done.out.endswith("\n")
    assert [line.split()[0] for line in done.err.splitlines()] == SUMMARY


def test_a_prompt_may_be_text_or_stdin(call: Call, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt by position, from a flag or stdin gives the same answer. Only --raw omits the chat template."""
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    few = ("--max-tokens", "8", "--json")
    raw = result_of(call(model, "--raw", "--prompt", PROMPT, *few))
    for source in (PROMPT, "-"):
        assert result_of(call(model, "--raw", source, *few))["tokens"] == raw["tokens"]
    chat = result_of(call(model, "--prompt", PROMPT, *few))
    assert chat["stats"]["prompt_tokens"] > raw["stats"]["prompt_tokens"]


def test_options_reach_the_stage_and_the_request(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The stage gets the part of the vocabulary for drafts and the types, and the request its sampling."""
    run: list[Any] = []

    async def record(*given: Any) -> NoReturn:
        run.extend(given)
        raise UsageError("recorded")

    monkeypatch.setattr("coordinator.cli.generate_command._run", record)
    (tmp_path / "ids").write_text("7")
    flags = ("--acceptance", "ratio", "--draft-vocab", str(tmp_path / "ids"), "--kv-bits", "8", "--dtype", "float16")
    call(model, PROMPT, *flags, "--temp", "0.5", "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1", "--seed", "3")
    _, stage, _, request, _ = run
    assert stage == StageOptions("float16", 8, draft_vocab=stage.draft_vocab)
    assert 7 in drafted_tokens(stage.draft_vocab, 512)
    assert request.params == SamplingParams(0.5, 4, 0.9, 0.1, seed=3, acceptance="ratio")


# ---- what is wrong


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "name a prompt"),
        (("y", "--prompt", "x"), "name one prompt, not both"),
        (("x", "--temp", "-1"), "temperature -1 is outside [0, 100]"),
        (("x", "--temp", "nan"), "temperature nan is"),
        (("x", "--top-p", "0"), "top_p 0 is outside (0, 1]"),
        (("x", "--seed", str(2**64)), "seed 18446744073709551616 is outside"),
        (("x", "--max-tokens", "0"), "max-tokens"),
        (("--raw", "x", "--max-tokens", "4096"), "exceed the context of 4096 tokens"),
        (("--raw", "x " * 4096), "exceed the context of 4096 tokens"),
        (("--raw", ""), "empty"),
        (("x", "--mtp", "many"), "--mtp"),
        (("x", "--dtype", "int8"), "--dtype"),
        (("x", "--stop", "y"), "--stop"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(call: Call, model: Path, flags: tuple[str, ...], told: str) -> None:
    """A wrong flag ends with status 2 and one message that names it."""
    done = call(model, *flags)
    assert (done.code, done.out) == (2, "")
    assert told in done.err
    assert "Traceback" not in done.err


# ---- processes


def test_ctrl_c_ends_without_a_traceback(model: Path) -> None:
    """Ctrl-C ends with status 130 and the text so far."""
    flags = ["--model", str(model), "--raw", "x", "--max-tokens", "4000", "--temp", "1"]
    with subprocess.Popen([*PROCESS, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        guard = threading.Timer(DEADLINE, process.kill)
        guard.start()
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE)
        guard.cancel()
    assert process.returncode == 130
    assert b"Traceback" not in err
