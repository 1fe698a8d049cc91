"""Workers that share every layer give the answers of one process, while processes and machines come and go."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.chaos.faults import members_of as started_by
from tests.support.api.streams import events_of, tokens_of_stream
from tests.support.processes.network_namespaces import Machine, two_machines
from tests.support.processes.own_address import network_address
from tests.support.processes.processes import (
    Cluster,
    Process,
    as_coordinator,
    ending,
    launch,
    launch_coordinator,
    launch_worker,
    running_cluster,
    running_workers,
    serving,
)
from tests.support.processes.reserved_port import reserved_port
from worker.node.process import LOCAL_TOKEN

ROOT = Path(__file__).resolve().parents[2]

TOKENS = 24
LONG = 160
"""Tokens of an answer that a fault interrupts."""

LONGEST_SILENCE = 15.0
"""Seconds. Goal for an answer whose group lost a process or a machine."""

SECONDS = 120.0

MODEL = ("builtin", "--dtype", "float32")


@dataclass(frozen=True)
class Answer:
    """The text of an answer, and the longest time between two pieces of it in seconds."""

    text: str
    silence: float


def ask(url: str, count: int, **fields: object) -> Answer:
    """Return a streamed completion. Raises AssertionError for an answer that ends with an error."""
    body = {"prompt": "def fibonacci(n):", "max_tokens": count, "ignore_eos": True, **fields}
    text, silence, last = "", 0.0, time.monotonic()
    for event in events_of(f"{url}/v1/completions", body):
        text += event["choices"][0]["text"] if event["choices"] else ""
        silence, last = max(silence, time.monotonic() - last), time.monotonic()
    return Answer(text, silence)


ASK = """
import json, sys, time, urllib.request
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/v1/completions", sys.argv[2].encode(), headers)
text, silence, last = "", 0.0, time.monotonic()
for line in urllib.request.urlopen(request, timeout=100):
    if not line.startswith(b"data: {"):
        continue
    chunk = json.loads(line[6:])
    assert "error" not in chunk, chunk
    text += chunk["choices"][0]["text"] if chunk["choices"] else ""
    silence, last = max(silence, time.monotonic() - last), time.monotonic()
print(json.dumps([text, silence]))
"""


def ask_on(machine: Machine, url: str, count: int, **fields: object) -> Answer:
    """Do the same as `ask` for a client on another machine."""
    body = {"prompt": "def fibonacci(n):", "max_tokens": count, "ignore_eos": True, **fields}
    words = (sys.executable, "-c", ASK, url, json.dumps(body | {"stream": True}))
    done = subprocess.run([*machine.prefix, *words], stdout=subprocess.PIPE, timeout=SECONDS, check=True)
    return Answer(*json.loads(done.stdout))


SETTINGS = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 7, "top_p": 0.95})


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the answers of one process, the first of them long enough for a fault."""
    with serving(tmp_path_factory.mktemp("alone"), MODEL[0], [], *MODEL[1:]) as coordinator:
        asked = zip((LONG, TOKENS), SETTINGS, strict=True)
        return [ask(coordinator.url, count, **setting).text for count, setting in asked]


@contextmanager
def group(folder: Path, count: int, parallel: str, *flags: str) -> Iterator[Cluster]:
    """Run `count` workers that share the built-in model."""
    with running_cluster(folder, MODEL[0], count, *MODEL[1:], "--parallel", parallel, *flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with group(tmp_path_factory.mktemp("group"), 2, "tensor") as cluster:
        yield cluster


def members_of(cluster: Cluster) -> list[psutil.Process]:
    """Return the processes that the workers have started for their group."""
    return [member for worker in cluster.workers for member in started_by(worker.pid)]


def wait_for_members(cluster: Cluster) -> list[psutil.Process]:
    """Return the processes of a group that serves, once there are two."""
    due = time.monotonic() + SECONDS
    while time.monotonic() < due:
        found = members_of(cluster)
        if len(found) == 2 and httpx.get(f"{cluster.url}/ready").status_code == 200:
            return found
        time.sleep(0.1)
    raise AssertionError(f"no group serves: {cluster.coordinator.text()[-2000:]}")


@pytest.mark.smoke
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_a_group_gives_the_answers_of_one_process(pair: Cluster, expected: list[str], setting: int) -> None:
    """Greedy and sampled, with drafts."""
    assert len(members_of(pair)) == 2
    found = ask(pair.url, TOKENS, **SETTINGS[setting])
    assert expected[setting].startswith(found.text) and found.text


def test_the_status_shows_the_shares(pair: Cluster) -> None:
    """Each worker of a group has its share of all layers, the time of a sum, and its memory."""
    ask(pair.url, TOKENS, **SETTINGS[0])
    nodes = httpx.get(f"{pair.url}/status").json()["nodes"]
    assert [node["span"] for node in nodes] == ["0-7", "0-7"]
    assert sorted(node["layers"].partition("share ")[2][:6] for node in nodes) == [
        "1 of 2",
        "2 of 2",
    ]
    assert all(re.search(r"\d us a sum$", node["layers"]) for node in nodes)
    assert all(node["memory_used"] for node in nodes)


def check_recovery(url: str, expected: list[str], fault: Callable[[], None], asks: Callable[..., Answer] = ask) -> None:
    """Check that an answer goes on in time, token for token, after a fault."""
    answers: list[Answer] = []
    client = threading.Thread(target=lambda: answers.append(asks(url, LONG, **SETTINGS[0])))
    client.start()
    time.sleep(1)
    fault()
    client.join(SECONDS)
    assert answers[0].text == expected[0]
    assert answers[0].silence < LONGEST_SILENCE


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("member", "fault"),
    [
        pytest.param(1, psutil.Process.suspend, marks=pytest.mark.slow),
        pytest.param(0, psutil.Process.kill, marks=pytest.mark.slow),
        pytest.param(1, psutil.Process.kill, marks=pytest.mark.slow),
        pytest.param(0, psutil.Process.suspend, marks=pytest.mark.slow),
    ],
)
def test_a_lost_process_changes_no_answer(
    pair: Cluster, expected: list[str], member: int, fault: Callable[[psutil.Process], None]
) -> None:
    """An answer continues token for token in new processes, and the stopped ones are ended."""
    before = wait_for_members(pair)
    check_recovery(pair.url, expected, lambda: fault(before[member]))
    psutil.wait_procs(before, timeout=20)
    assert not [process for process in before if process.is_running()]


RUN_AHEAD = """
import os
from dataclasses import replace
from mtp import device
from worker.engine.engine_thread import EngineThread
from worker.engine.frame_times import Lead
Lead.record_interval = lambda *_: None
device.DEVICES["cpu"] = replace(device.DEVICES["cpu"], ahead_kv_bytes=2**30)
defer = EngineThread.defer
def counted(self, *arguments):
    with open(os.environ["AHEAD"], "ab") as file:
        file.write(b".")
    defer(self, *arguments)
EngineThread.defer = counted
"""
"""Makes each program run ahead on CPUs, as on GPUs, and count in the file AHEAD how often."""


@pytest.mark.chaos
@pytest.mark.slow
def test_faults_while_a_group_runs_ahead(tmp_path: Path, expected: list[str]) -> None:
    """A member stops for a while or dies while the next frame has begun, and a client leaves: the text stays."""
    (tmp_path / "sitecustomize.py").write_text(RUN_AHEAD)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    count = tmp_path / "count"
    env = {"PYTHONPATH": path, "AHEAD": str(count)}
    with running_workers(tmp_path, MODEL[0], 2, env=env) as workers:
        named = [worker.address for worker in workers]
        flags = (*MODEL[1:], "--parallel", "tensor", "--mtp", "off", "--ngram", "off")
        with serving(tmp_path, MODEL[0], named, *flags) as coordinator:
            cluster = Cluster(workers, coordinator)
            assert ask(cluster.url, LONG, **SETTINGS[0]).text == expected[0]
            assert count.stat().st_size > LONG, "both members ran ahead"
            stopped = wait_for_members(cluster)[1]

            def stop_for_a_while() -> None:
                stopped.suspend()
                time.sleep(2)
                stopped.resume()

            check_recovery(cluster.url, expected, stop_for_a_while)
            body = {"prompt": "def fibonacci(n):", "max_tokens": 400, "stream": True}
            with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body) as left:
                next(left.iter_lines())
            check_recovery(cluster.url, expected, wait_for_members(cluster)[0].kill)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_lost_worker_leaves_the_others_serving(tmp_path: Path) -> None:
    """The rest of a group serves alone, from its backup, and no process of the group is left at the end.

    A process is lost before, since answers are backed up at once only after a failure.
    """
    body = {"prompt": "def fibonacci(n):", "max_tokens": 300, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    with group(tmp_path, 2, "tensor") as cluster:
        wait_for_members(cluster)[1].kill()
        cluster.coordinator.wait_for("group", SECONDS, count=2)
        members = wait_for_members(cluster)
        url = f"{cluster.url}/v1/completions"
        found = tokens_of_stream(url, body, 150, cluster.workers[1].kill)
        assert tokens_of_stream(url, body, 300, lambda: None) == found
        spare = psutil.Process(cluster.workers[0].pid).children()
        restored = cluster.coordinator.records("backup restored")
        assert sum(record["tokens"] for record in restored) > 0, "the shares were put together"
        cluster.coordinator.stop()
        assert not psutil.wait_procs([*members, *spare], timeout=20)[1]


@pytest.mark.slow
def test_two_groups_of_two_are_a_pipeline(tmp_path: Path, expected: list[str]) -> None:
    """Hidden states pass from the first member of a group to the first one of the next, and tokens back."""
    with group(tmp_path, 4, "2x2") as cluster:
        assert len(members_of(cluster)) == 4
        for setting, text in zip(SETTINGS, expected, strict=True):
            assert text.startswith(ask(cluster.url, TOKENS, **setting).text)
        os.kill(members_of(cluster)[-1].pid, signal.SIGKILL)
        assert ask(cluster.url, LONG, **SETTINGS[0]).text == expected[0]


@pytest.mark.slow
def test_a_pulled_cable_changes_no_answer(tmp_path: Path, expected: list[str]) -> None:
    """The machine that is left answers alone, token for token, and the next answer has the group again."""
    with two_machines() as machines, ExitStack() as stack:

        def start(machine: Machine, name: str, module: str, *words: str) -> Process:
            state = ("--state-dir", str(tmp_path / machine.name), "--insecure", "--no-mdns")
            process = launch(tmp_path, name, module, (*words, *state), prefix=machine.prefix)
            return stack.enter_context(ending(process))

        named: list[str] = []
        for machine in machines:
            listen = ("--listen", f"{machine.address}:50505", "--direct", machine.address)
            start(machine, machine.name, "worker.cli", "--model", MODEL[0], *listen)
            named += ["--worker", f"{machine.address}:50505"]
        flags = (*MODEL, "--parallel", "tensor", "--nodes", "2", "--port", "0", *named)
        coordinator = start(machines[0], "coordinator", "coordinator.cli", "serve", *flags)
        url = as_coordinator(coordinator).url
        asks = partial(ask_on, machines[0])
        check_recovery(url, expected, machines[1].pull_cable, asks)
        machines[1].plug_cable_in()
        coordinator.wait_for("group", SECONDS, count=2)
        assert asks(url, LONG, **SETTINGS[0]).text == expected[0]


@pytest.mark.slow
def test_a_third_worker_joins_while_a_group_serves(tmp_path: Path, expected: list[str]) -> None:
    """The answers go on, and so does the group: three machines cannot share its heads."""
    with reserved_port("127.0.0.1") as port:
        third = f"127.0.0.1:{port}"
        with group(tmp_path, 2, "tensor", "--nodes", "2", "--worker", third) as cluster:
            coordinator = cluster.coordinator
            worker = launch_worker(tmp_path, "third", "--model", MODEL[0], "--listen", third)
            with ending(worker):
                while len(coordinator.records("worker joined")) < 3:
                    assert ask(cluster.url, LONG, **SETTINGS[0]).text == expected[0]
                coordinator.wait_for("the plan stays as it is", SECONDS)
            assert {one["members"] for one in coordinator.records("group")} == {2}


def test_a_group_needs_a_declared_link(tmp_path: Path) -> None:
    """Partial results are not encrypted, so the plan names the flag that declares a direct link."""
    with running_workers(tmp_path, MODEL[0], 2, "--direct", "") as workers:
        named = [flag for worker in workers for flag in ("--worker", worker.address)]
        flags = [*named, "--parallel", "tensor", "--nodes", "2", "--wait", "4"]
        with ending(launch_coordinator(tmp_path, *MODEL, *flags)) as coordinator:
            assert coordinator.wait() == 1
            assert "has no direct link" in coordinator.text()
            assert "--direct HOST" in coordinator.text()


def test_a_group_of_a_secured_cluster(tmp_path: Path, expected: list[str]) -> None:
    """The processes of a group have the certificates of their workers, one of which joined by a token."""
    host = network_address()
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port(host)) for _ in range(2)]
        named = [word for port in ports for word in ("--worker", f"{host}:{port}")]
        state = tmp_path / "a"
        flags = ["--listen", f"{host}:0", "--state-dir", str(state), "--nodes", "2", *named]
        process = launch_coordinator(tmp_path, *MODEL, "--parallel", "tensor", *flags)
        stack.enter_context(ending(process))
        process.wait_for("machines join here")
        token = (state / LOCAL_TOKEN).read_text()
        own = ([str(state)], [str(tmp_path / "b"), "--join", token])
        for number, (port, words) in enumerate(zip(ports, own, strict=True)):
            listen = ["--listen", f"{host}:{port}", "--direct", host, "--state-dir", *words]
            worker = launch_worker(tmp_path, f"mac-{number}", *listen)
            stack.enter_context(ending(worker))
        found = ask(as_coordinator(process).url, TOKENS, **SETTINGS[0])
        assert found.text and expected[0].startswith(found.text)
        assert len(process.records("group")) == 1


@pytest.mark.slow
def test_exact_groups_give_the_log_probabilities_of_one_process(tmp_path: Path) -> None:
    """In 16 bits the tokens and log-probabilities of two workers, and of the one that is left, are those of slices."""
    for name in ("alone", "whole", "group"):
        (tmp_path / name).mkdir()
    model = (MODEL[0], "--dtype", "bfloat16", "--exact")
    body = {"prompt": "def fibonacci(n):", "max_tokens": 64, "logprobs": 1, "ignore_eos": True}

    def logprobs(url: str) -> dict[str, list[float]]:
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).json()
        found: dict[str, list[float]] = reply["choices"][0]["logprobs"]
        return found

    with serving(tmp_path / "alone", model[0], [], *model[1:], "--slices", "2") as coordinator:
        alone = logprobs(coordinator.url)
    with serving(tmp_path / "whole", model[0], [], *model[1:]) as coordinator:
        assert logprobs(coordinator.url) != alone
    flags = ("--parallel", "tensor", "--slices", "2")
    with running_cluster(tmp_path / "group", model[0], 2, *model[1:], *flags) as cluster:
        assert len(members_of(cluster)) == 2
        assert logprobs(cluster.url) == alone
        cluster.workers[1].kill()
        assert logprobs(cluster.url) == alone
