"""The flags of both programs: each sets its field, each field is read, and wrong combinations are refused."""

from __future__ import annotations

import ast
import asyncio
import inspect
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import worker.cli
from coordinator.cli import import_command
from coordinator.cli.bench_command import BenchOptions
from coordinator.cli.convert_commands import AddOptions, ConvertOptions
from coordinator.cli.doctor_command import DoctorOptions
from coordinator.cli.generate_command import GenerateOptions
from coordinator.cli.model_commands import InspectOptions
from coordinator.cli.plan_command import PlanOptions
from coordinator.drafts.controller import MtpMode
from coordinator.planning.groups import Parallel
from coordinator.serve.options import ServeOptions
from mtp.head.draft_vocabulary import DraftVocabulary
from proto.errors import UsageError
from proto.span import Span
from worker.node.options import WorkerOptions

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (ROOT / "coordinator", ROOT / "worker")
CLASSES = (
    AddOptions, BenchOptions, ConvertOptions, DoctorOptions, GenerateOptions, InspectOptions, PlanOptions,
    ServeOptions, WorkerOptions,
)  # fmt: skip

Decide = Callable[..., dict[str, Any]]
"""A function that parses the words of a command and returns the options it would run with, by name."""

Rows = dict[str, tuple[Sequence[str], dict[str, Any]]]
"""Words after a flag, and the options that they change."""

WORKER: Rows = {
    "--layers": (["2-5"], {"layers": Span(2, 6)}),
    "--memory-limit": (["3GB"], {"memory_limit": 3 * 10**9}),
    "--prefix-disk": (["3GB"], {"prefix_disk": 3 * 10**9}),
    "--no-mdns": ([], {"no_mdns": True}),
    "--state-dir": (["state"], {"state_dir": Path("state")}),
    "--join": (["mtp1.token"], {"join": "mtp1.token"}),
}

SERVE: Rows = {
    "--model": (["org/name"], {"model": "org/name"}),
    "--worker": (["a:1", "--worker", "b:2"], {"worker": ("a:1", "b:2")}),
    "--mtp": (["3"], {"mtp": MtpMode.parse("3")}),
    "--kv-bits": (["8"], {"kv_bits": 8}),
    "--acceptance": (["ratio"], {"acceptance": "ratio"}),
    "--draft-vocab": (["4000"], {"draft_vocab": DraftVocabulary(4000)}),
    "--prefix-disk": (["3GB"], {"prefix_disk": 3 * 10**9}),
    "--listen": (["10.0.0.1"], {"listen": ("10.0.0.1", 50504)}),
    "--parallel": (["2x2"], {"parallel": Parallel(groups=2, size=2)}),
    "--served-model-name": (
        ["gpt-4o", "--served-model-name", "other"],
        {"served_model_name": ("gpt-4o", "other")},
    ),
    "org/name": ([], {"model": "org/name"}),
}


def deciding(monkeypatch: pytest.MonkeyPatch, module: str, edge: str, command: TyperCommand | TyperGroup) -> Decide:
    """Return the Decide of `command` of `module`, which runs the coroutine named `edge`."""
    monkeypatch.delenv("MTP_API_KEY", raising=False)

    def decide(*words: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def run(options: Any) -> None:
            await asyncio.sleep(0)
            properties = inspect.getmembers(type(options), lambda it: isinstance(it, property))
            found.update({name: getattr(options, name) for name, _ in properties})
            found.update(vars(options))

        monkeypatch.setattr(f"{module}.configure", lambda level, form, file: None)
        monkeypatch.setattr(edge, run)
        command.main(list(words), prog_name="test", standalone_mode=False)
        assert found, "it did not come as far as running"
        return found

    return decide


@pytest.fixture
def decide_worker(monkeypatch: pytest.MonkeyPatch) -> Decide:
    command = get_command(worker.cli.app)
    assert isinstance(command, TyperCommand)
    return deciding(monkeypatch, "worker.cli", "worker.node.process.run", command)


@pytest.fixture
def decide_serve(monkeypatch: pytest.MonkeyPatch) -> Decide:
    edge = "coordinator.cli.serve_command.run_server"
    return deciding(monkeypatch, "coordinator.cli.serve_command", edge, import_command("serve"))


@pytest.mark.parametrize("flag", WORKER)
def test_a_workers_flag_sets_its_option(flag: str, decide_worker: Decide) -> None:
    """The flag changes its own option and no other."""
    words, change = WORKER[flag]
    plain, found = decide_worker(), decide_worker(flag, *words)
    names = {field.name for field in fields(WorkerOptions)}
    assert {name: found[name] for name in names if found[name] != plain[name]} == change


@pytest.mark.parametrize("flag", SERVE)
def test_a_flag_of_serve_sets_its_option(flag: str, decide_serve: Decide) -> None:
    """The flag changes its own option and no other."""
    words, change = SERVE[flag]
    plain, found = decide_serve(), decide_serve(flag, *words)
    names = {field.name for field in fields(ServeOptions)}
    assert {name: found[name] for name in names if found[name] != plain[name]} == change


def read_options(options: type[Any]) -> Iterator[str]:
    """Yield the attributes of `options.…` in the files that name the class, and those of `self.…` in the class."""
    for file in (file for program in PROGRAMS for file in program.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if options.__name__ not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            own = isinstance(node, ast.ClassDef) and node.name == options.__name__
            for found in ast.walk(node) if own else [node]:
                if isinstance(found, ast.Attribute):
                    owner = ast.unparse(found.value).rpartition(".")[2]
                    if owner == ("self" if own else "options"):
                        yield found.attr


@pytest.mark.parametrize("options", CLASSES, ids=lambda options: options.__name__)
def test_every_option_is_read(options: type[Any]) -> None:
    """No flag sets an option that the program never reads. --version acts by itself."""
    names = {field.name for field in fields(options)} - {"version"}
    assert names <= set(read_options(options))


def test_the_name_of_a_worker(decide_worker: Decide) -> None:
    """It is that of the machine. A second worker of a machine has its port in its name."""
    host = socket.gethostname().partition(".")[0]
    assert decide_worker()["own_name"] == host
    assert decide_worker("--listen", "127.0.0.2:7")["own_name"] == f"{host}-7"
    assert decide_worker("--name", "mac-9")["own_name"] == "mac-9"


def test_keys_from_the_environment(
    decide_serve: Decide, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MTP_API_KEY sets the keys without showing them in a process list or in the help."""
    monkeypatch.setenv("MTP_API_KEY", "secret-1 secret-2")
    assert decide_serve()["api_key"] == ("secret-1", "secret-2")
    assert decide_serve("--api-key", "other")["api_key"] == ("other",)
    with pytest.raises(AssertionError, match="did not come"):
        decide_serve("--help")
    assert "secret" not in capsys.readouterr().out


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(decide_serve: Decide, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """An empty key or variable is refused, since it would accept every client."""
    with pytest.raises(UsageError, match="--api-key"):
        decide_serve("--api-key", key)
    monkeypatch.setenv("MTP_API_KEY", key)
    with pytest.raises(UsageError, match="MTP_API_KEY"):
        decide_serve()


def test_a_listener_off_loopback_needs_a_key(decide_serve: Decide) -> None:
    """With a certificate of the user and no key, HTTP does not listen on a network.

    With a certificate of the cluster, clients get their keys by `mtp-coord connect`.
    """
    with pytest.raises(UsageError, match="mtp-coord key"):
        decide_serve("--host", "0.0.0.0", "--tls-cert", "a.pem", "--tls-key", "a.key")
    for words in ((), ("--api-key", "secret")):
        assert decide_serve("--host", "0.0.0.0", *words)["insecure"] is False


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--exact", "--slices", "3"), "Use a multiple of 2"),
        (("--slices", "2"), "Add --exact"),
        (("--nodes", "3"), "needs 4 machines, and --nodes is 3"),
        (("--single-node",), "Leave out --single-node"),
    ],
)
def test_groups_refuse_what_they_cannot_do(decide_serve: Decide, flags: tuple[str, ...], words: str) -> None:
    """The error names both flags."""
    with pytest.raises(UsageError, match=words):
        decide_serve("--parallel", "2x2", *flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--acceptance", "ratio", "--exact"), "tokens depend on the drafts"),
        (("--draft-vocab", "auto", "--mtp", "off"), "--mtp off has none"),
        (("--draft-vocab", "nowhere/ids.txt"), "nowhere/ids.txt.*not found"),
    ],
)
def test_options_of_drafts_that_contradict_are_refused(
    decide_serve: Decide, flags: tuple[str, ...], words: str
) -> None:
    """`serve` and `generate` refuse them before a model is read."""
    with pytest.raises(UsageError, match=words):
        decide_serve(*flags)
    with pytest.raises(UsageError, match=words):
        import_command("generate").main(["a prompt", *flags], prog_name="test", standalone_mode=False)


@pytest.mark.parametrize(
    ("flags", "slices"),
    [
        (("--parallel", "2x2"), 2),
        (("--parallel", "2x2", "--slices", "4"), 4),
        (("--parallel", "tensor", "--nodes", "3"), 3),
        (("--parallel", "tensor", "--nodes", "3", "--slices", "4"), 4),
        (("--parallel", "auto", "--slices", "4"), 4),
    ],
)
def test_exact_groups_have_slices(decide_serve: Decide, flags: tuple[str, ...], slices: int) -> None:
    """The default is the size of the group that the flags name."""
    assert decide_serve("--exact", *flags)["layer_slices"] == slices


@pytest.mark.parametrize("parallel", ["tensor", "auto"])
def test_exact_groups_of_any_size_need_slices(decide_serve: Decide, parallel: str) -> None:
    """The number of machines may change while the cluster serves, and the answers may not."""
    with pytest.raises(UsageError, match="needs --slices N"):
        decide_serve("--exact", "--parallel", parallel)
