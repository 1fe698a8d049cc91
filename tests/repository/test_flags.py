"""The flags of `mtp-worker` and `mtp-coord serve`: each has a row here and sets its own option."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperCommand
from typer.main import get_command

import worker.cli
from coordinator.cli import import_command
from coordinator.drafts.controller import MtpMode
from coordinator.drafts.prompt_lookup import NgramMode
from coordinator.images.encoder import VisionMode
from coordinator.planning.groups import Parallel, Prefer
from mtp.checkpoint.hub.resolve import find_model
from proto.control import Kernels
from proto.errors import UsageError
from proto.span import Span
from proto.terminal.logs import LogFormat, LogLevel

Decided = dict[str, Any]
"""The options by name, with the level and format of the log."""

Decide = Callable[..., Decided]
Rows = dict[str, tuple[Sequence[str], Decided]]

HOST = socket.gethostname().partition(".")[0]
"""The name of a worker at the usual port. Another one of this machine has its port in its name."""

WORKER: Rows = {
    "--layers": (["2-5"], {"layers": Span(2, 6)}),
    "--model": (["builtin"], {"model": find_model("builtin")}),
    "--listen": (["127.0.0.2:7"], {"host": "127.0.0.2", "port": 7, "name": f"{HOST}-7"}),
    "--data-port": (["50506"], {"data_port": 50506}),
    "--name": (["mac-9"], {"name": "mac-9"}),
    "--memory-limit": (["3GB"], {"memory_limit": 3 * 10**9}),
    "--prefix-disk": (["3GB"], {"prefix_disk": 3 * 10**9}),
    "--no-mdns": ([], {"mdns": False}),
    "--state-dir": (["state"], {"state_dir": Path("state")}),
    "--no-wired-memory": ([], {"wired": False}),
    "--kernels": (["mlx"], {"kernels": Kernels.mlx}),
    "--allow-sleep": ([], {"awake": False}),
    "--insecure": (
        ["--listen", "0.0.0.0:7"],
        {"host": "0.0.0.0", "port": 7, "name": f"{HOST}-7", "insecure": True},
    ),
    "--join": (["mtp1.token"], {"join": "mtp1.token"}),
    "--direct": (["10.0.0.1"], {"direct": "10.0.0.1"}),
    "--rdma": (["rdma_en5"], {"rdma": "rdma_en5"}),
    "--member": ([], {"member": True}),
    "--log-level": (
        ["debug"],
        {"log_level": LogLevel.debug, "logs": (LogLevel.debug, LogFormat.text)},
    ),
    "--log-format": (
        ["json"],
        {"log_format": LogFormat.json, "logs": (LogLevel.info, LogFormat.json)},
    ),
}

SERVE: Rows = {
    "--model": (["org/name"], {"model": "org/name"}),
    "--host": (["127.0.0.2"], {"host": "127.0.0.2"}),
    "--port": (["0"], {"port": 0}),
    "--worker": (["a:1", "--worker", "b:2"], {"workers": ("a:1", "b:2")}),
    "--nodes": (["3"], {"nodes": 3}),
    "--wait": (["0.5"], {"wait": 0.5}),
    "--alone-ok": (["--nodes", "3"], {"alone_ok": True, "nodes": 3}),
    "--no-auto-replan": ([], {"auto_replan": False}),
    "--single-node": ([], {"single_node": True}),
    "--no-mdns": ([], {"mdns": False}),
    "--dtype": (["float16"], {"dtype": "float16"}),
    "--mtp": (["3"], {"mtp": MtpMode.parse("3")}),
    "--ngram": (["off"], {"ngram": NgramMode.off}),
    "--kv-bits": (["8"], {"kv_bits": 8}),
    "--exact": ([], {"exact": True, "slices": 1}),
    "--slices": (["4", "--exact"], {"exact": True, "slices": 4}),
    "--max-sequences": (["5"], {"max_sequences": 5}),
    "--prefill-chunk": (["64"], {"prefill_chunk": 64}),
    "--no-prefix-cache": ([], {"prefix_cache": False}),
    "--prefix-disk": (["3GB"], {"prefix_disk": 3 * 10**9}),
    "--vision": (["always"], {"vision": VisionMode.always}),
    "--max-images": (["3"], {"max_images": 3}),
    "--share-weights": ([], {"share_weights": True}),
    "--failure-timeout": (["9"], {"failure_timeout": 9.0}),
    "--api-key": (["one", "--api-key", " two "], {"api_keys": ("one", "two")}),
    "--allowed-origins": (["*"], {"allowed_origins": ("*",)}),
    "--served-model-name": (
        ["gpt-4o", "--served-model-name", "other"],
        {"served_names": ("gpt-4o", "other")},
    ),
    "--clamp-max-tokens": ([], {"clamp_max_tokens": True}),
    "--insecure": (["--host", "0.0.0.0"], {"host": "0.0.0.0", "insecure": True}),
    "--listen": (["10.0.0.1"], {"join_address": ("10.0.0.1", 50504)}),
    "--tls-cert": (
        ["a.pem", "--tls-key", "b.pem"],
        {"tls_cert": Path("a.pem"), "tls_key": Path("b.pem")},
    ),
    "--tls-key": (
        ["b.pem", "--tls-cert", "a.pem"],
        {"tls_cert": Path("a.pem"), "tls_key": Path("b.pem")},
    ),
    "--allowed-host": (["chat.example"], {"allowed_hosts": ("chat.example",)}),
    "--state-dir": (["state"], {"state": Path("state")}),
    "--no-journal": ([], {"journal": False}),
    "--parallel": (["2x2"], {"parallel": Parallel(groups=2, size=2)}),
    "--prefer": (["throughput"], {"prefer": Prefer.throughput}),
    "--no-wired-memory": ([], {"wired": False}),
    "--kernels": (["own"], {"kernels": Kernels.own}),
    "--allow-sleep": ([], {"awake": False}),
    "--log-level": (["debug"], {"log_level": LogLevel.debug}),
    "--log-format": (["json"], {"log_format": LogFormat.json}),
}


def deciding(
    monkeypatch: pytest.MonkeyPatch, module: str, edge: str, command: TyperCommand
) -> Decide:
    """Return a function that parses the words of the command and returns the options it would run with."""
    monkeypatch.delenv("MTP_API_KEY", raising=False)

    def decide(*words: str) -> Decided:
        found: Decided = {}

        def configure(level: LogLevel, form: LogFormat) -> None:
            found.update(log_level=level, log_format=form)

        async def run(options: Any) -> None:
            await asyncio.sleep(0)
            found.update(vars(options))

        monkeypatch.setattr(f"{module}.configure", configure)
        monkeypatch.setattr(edge, run)
        command.main(list(words), prog_name="test", standalone_mode=False)
        assert len(found) > 2, "it did not come as far as running"
        return found

    return decide


@pytest.fixture
def decide_worker(monkeypatch: pytest.MonkeyPatch) -> Decide:
    return deciding(monkeypatch, "worker.cli", "worker.node.process.run", worker_command())


@pytest.fixture
def decide_serve(monkeypatch: pytest.MonkeyPatch) -> Decide:
    edge = "coordinator.cli.serve_command.run_server"
    return deciding(monkeypatch, "coordinator.cli.serve_command", edge, import_command("serve"))


def worker_command() -> TyperCommand:
    command = get_command(worker.cli.app)
    assert isinstance(command, TyperCommand)
    return command


@pytest.mark.parametrize("flag", WORKER)
def test_a_workers_flag_does_what_it_says(flag: str, decide_worker: Decide) -> None:
    """The flag changes its own options and no others."""
    words, change = WORKER[flag]
    plain = decide_worker()
    assert decide_worker(flag, *words) == {**plain, **change} != plain


@pytest.mark.parametrize("flag", SERVE)
def test_a_flag_of_serve_does_what_it_says(flag: str, decide_serve: Decide) -> None:
    """The flag changes its own options and no others."""
    words, change = SERVE[flag]
    plain = decide_serve()
    assert decide_serve(flag, *words) == {**plain, **change} != plain


def test_no_flag_is_left_out() -> None:
    """Every flag of both programs has a row."""
    for command, rows in ((worker_command(), WORKER), (import_command("serve"), SERVE)):
        flags = {p.opts[0] for p in command.params if p.opts[0].startswith("-")}
        flags -= {"--version", "--help", "--install-completion", "--show-completion"}
        assert flags == set(rows)


def test_no_option_is_left_out(decide_worker: Decide, decide_serve: Decide) -> None:
    """A flag sets every option, except the name of the coordinator's machine."""
    for decided, rows in ((decide_worker(), WORKER), (decide_serve(), SERVE)):
        changed = {name for _, change in rows.values() for name in change}
        assert set(decided) - changed <= ({"name"} if rows is SERVE else set())


def test_keys_from_the_environment(
    decide_serve: Decide, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MTP_API_KEY sets the keys without showing them in a process list or in the help."""
    monkeypatch.setenv("MTP_API_KEY", "secret-1 secret-2")
    assert decide_serve()["api_keys"] == ("secret-1", "secret-2")
    assert decide_serve("--api-key", "other")["api_keys"] == ("other",)
    with pytest.raises(AssertionError, match="did not come"):
        decide_serve("--help")
    assert "secret" not in capsys.readouterr().out


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(decide_serve: Decide, key: str) -> None:
    """An empty key is refused, since it would accept every client."""
    with pytest.raises(UsageError, match="--api-key"):
        decide_serve("--api-key", key)


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_variable_is_refused(
    decide_serve: Decide, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """An empty variable is refused, since it would accept every client."""
    monkeypatch.setenv("MTP_API_KEY", key)
    with pytest.raises(UsageError, match="MTP_API_KEY"):
        decide_serve()


def test_a_listener_off_loopback_needs_a_key(decide_serve: Decide) -> None:
    """Without a key and without --insecure, HTTP does not listen on a network. With a key it does, by TLS."""
    with pytest.raises(UsageError, match="mtp-coord key"):
        decide_serve("--host", "0.0.0.0")
    assert decide_serve("--host", "0.0.0.0", "--api-key", "secret")["insecure"] is False


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--exact", "--slices", "3"), "Use a multiple of 2"),
        (("--slices", "2"), "Add --exact"),
        (("--nodes", "3"), "needs 4 machines, and --nodes is 3"),
        (("--single-node",), "Leave out --single-node"),
    ],
)
def test_groups_refuse_what_they_cannot_do(
    decide_serve: Decide, flags: tuple[str, ...], words: str
) -> None:
    """The error names both flags."""
    with pytest.raises(UsageError, match=words):
        decide_serve("--parallel", "2x2", *flags)


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
def test_exact_groups_have_slices(
    decide_serve: Decide, flags: tuple[str, ...], slices: int
) -> None:
    """The default is the size of the group that the flags name."""
    assert decide_serve("--exact", *flags)["slices"] == slices


@pytest.mark.parametrize("parallel", ["tensor", "auto"])
def test_exact_groups_of_any_size_need_slices(decide_serve: Decide, parallel: str) -> None:
    """The number of machines may change while the cluster serves, and the answers may not."""
    with pytest.raises(UsageError, match="needs --slices N"):
        decide_serve("--exact", "--parallel", parallel)
