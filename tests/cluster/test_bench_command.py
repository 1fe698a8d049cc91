"""`mtp-coord bench` against a server of ours, and against a small one that has OpenAI's API and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from coordinator.cli import app as commands
from coordinator.cli.bench_command import Answer, Row
from proto.errors import AccessError, NotReadyError, UsageError, WorkerLostError
from tests.support.processes.processes import serving

SHORT = ("--tokens", "16", "--rounds", "1")


def run(url: str, *arguments: str, key: str = "") -> Result:
    """Run the command on a terminal of 160 characters, with a key in its environment."""
    found = CliRunner(env={"COLUMNS": "160", "MTP_API_KEY": key}).invoke(commands, ["bench", "--url", url, *arguments])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def report_of(result: Result) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(result.stdout)
    return report


# ---- figures without a server


def chunk(text: str = "", ids: int | None = None) -> bytes:
    entry: dict[str, Any] = {"index": 0, "delta": {"content": text}}
    if ids is not None:
        entry["token_ids"] = [7] * ids
    return b"data: " + json.dumps({"choices": [entry]}).encode()


def answer_of(reads: dict[float, list[bytes]], tokens: int, accepted: int = 0) -> Answer:
    """Return the answer whose lines arrive at the times of `reads`."""
    answer = Answer()
    for at, lines in reads.items():
        for line in lines:
            answer.add_line(line, at)
    usage = {"prompt_tokens": 5, "completion_tokens": tokens}
    details = {"completion_tokens_details": {"accepted_prediction_tokens": accepted}}
    answer.add_line(b"data: " + json.dumps({"choices": [], "usage": usage | details}).encode(), max(reads))
    answer.add_line(b"data: [DONE]", max(reads))
    return answer


def test_a_read_of_several_tokens_shares_its_time() -> None:
    """A window of three tokens, in one chunk or in three of one read, has three equal times between tokens."""
    first, three = chunk("a", 1), [chunk("b", 1), chunk("c", 1), chunk("d", 1)]
    for window in (three, [chunk("bcd", 3)]):
        answer = answer_of({1.0: [chunk(), b": prefill 1/5", first], 1.3: window}, tokens=4)
        assert answer.intervals() == pytest.approx([100, 100, 100])


def test_chunks_without_ids_share_the_tokens_of_the_usage() -> None:
    """Tokens are counted from the usage: four chunks of eight tokens have two each."""
    answer = answer_of({1.0: [chunk("ab")], 1.4: [chunk("cd")], 2.4: [chunk("ef"), chunk("gh")]}, tokens=8)
    assert answer.intervals() == pytest.approx([200, 200, 250, 250, 250, 250])


def test_the_figures_of_a_row_by_hand() -> None:
    """Percentiles, speed, the cost of a step and the acceptance follow from the reads and the usage."""
    plain = Row(1, None, "off", 0, seconds=2.0)
    plain.answers = [answer_of({0.5 + i / 100: [chunk("a", 1)] for i in range(101)}, tokens=101)]
    drafted = Row(1, None, "1", 1, seconds=1.0)
    drafted.answers = [answer_of({0.5: [chunk("a", 1)], 0.515: [chunk("bc", 2)], 0.53: [chunk("d", 1)]}, 4, accepted=1)]
    drafted.counts.update({("drafted", 0): 2, ("accepted", 0): 1})
    before = plain.figures()
    found = drafted.figures(before)
    assert (before["first"], before["tokens/s"], before["step seconds"]) == pytest.approx((0.5, 50.5, 0.01))
    assert (before["p50"], before["p99"]) == pytest.approx((10, 10))
    assert (found["p50"], found["p95"], found["p99"]) == pytest.approx((7.5, 15, 15))
    assert (found["tokens/s"], found["over off"], found["step"]) == pytest.approx((4, 4 / 50.5, 1.5))
    assert found["accepted"] == [50]


# ---- our server


def test_a_server_of_ours(tmp_path: Path) -> None:
    """The report has cold prompts, streams, drafts by position, the cost of a step, and `off` against the mode."""
    with serving(tmp_path, "builtin", [], "--mtp", "2") as server:
        lengths = ("--prompt", "64", "--prompt", "999999", "--streams", "1", "--streams", "2")
        report = report_of(run(server.url, *lengths, *SHORT, "--json"))
    assert report["server"]["model"] == "builtin" and report["server"]["mtp"] == "2" and report["problem"] == ""
    assert "mlx" in report["server"]["machines"]
    assert [note.partition(":")[0] for note in report["notes"]] == ["prompt of 999999 tokens"]
    cold, *rows = report["rows"]
    assert abs(cold["prompt"] - 64) < 20 and cold["first"] > 0
    modes = ("off", "1", "2")
    assert [(row["streams"], row["drafts"]) for row in rows] == [(n, mode) for n in (1, 2) for mode in modes]
    for row in rows:
        assert 0 < row["p50"] <= row["p95"] <= row["p99"] and row["tokens/s"] > 0
        assert len(row.get("accepted", ())) == {"off": 0, "1": 1, "2": 2}[row["drafts"]]
        assert ("step" in row) == ("over off" in row) == (row["drafts"] != "off")


def test_a_server_of_ours_without_drafts_says_why_they_are_left_out(tmp_path: Path) -> None:
    """With `--mtp off` there is one row, and a note in place of the figures of drafts."""
    with serving(tmp_path, "builtin", [], "--mtp", "off") as server:
        report = report_of(run(server.url, "--prompt", "16", "--streams", "1", *SHORT, "--json"))
    assert [row["drafts"] for row in report["rows"]] == ["off", "off"]
    assert "step" not in report["rows"][1]
    assert "because the server has MTP off" in report["notes"][0]


# ---- another server


@dataclass
class Plain:
    """A server of chat completions without any field of ours. A word is a token. It counts the answers that end."""

    models: list[str] = field(default_factory=lambda: ["only"])
    key: str = ""
    longest: int = 1000
    """Words of a prompt, above which it answers 400."""
    token_seconds: float = 0.0
    dies_after: int = 10**9
    """Answers, after which it closes connections in the middle of an answer."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    ended: int = 0
    usage: bool = True


@contextmanager
def plain_server(plain: Plain) -> Iterator[str]:
    """Run `plain` on loopback and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Log nothing."""

        def reply(self, status: int, content: object) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self) -> None:
            if plain.key and self.headers["Authorization"] != f"Bearer {plain.key}":
                return self.reply(401, {"error": "no"})
            if self.path != "/v1/models":
                return self.reply(404, {"detail": "not found"})
            return self.reply(200, {"object": "list", "data": [{"id": name} for name in plain.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            plain.bodies.append(body)
            words = len(body["messages"][0]["content"].split())
            if body["model"] not in plain.models:
                return self.reply(404, {"error": f"no model {body['model']}"})
            if words > plain.longest:
                return self.reply(400, {"error": {"message": f"{words} tokens are too many"}})
            self.send_response(200)
            self.end_headers()
            for number in range(body["max_tokens"]):
                time.sleep(plain.token_seconds)
                if number == 2 and plain.ended >= plain.dies_after:
                    self.connection.close()
                    return None
                event = {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            usage = {"prompt_tokens": words + 9, "completion_tokens": body["max_tokens"]}
            last: dict[str, Any] = {"choices": [], "usage": usage if plain.usage else None}
            self.wfile.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
            plain.ended += 1
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def test_another_server_with_openais_api() -> None:
    """It gets standard fields only. Prompts that it refuses and figures that it lacks are left out with the reason."""
    plain = Plain(token_seconds=0.002)
    with plain_server(plain) as url:
        lengths = ("--prompt", "128", "--prompt", "2048", "--streams", "1", "--streams", "4")
        report = report_of(run(f"{url}/v1", *lengths, *SHORT, "--json"))
        table = run(url, "--prompt", "128", "--streams", "2", *SHORT).stdout
    standard = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options"}
    assert all(body.keys() == standard for body in plain.bodies)
    cold, one, four = report["rows"]
    assert (cold["prompt"], one["streams"], four["streams"]) == (128, 1, 4)
    assert one["p50"] >= 2 and four["tokens/s"] > one["tokens/s"]
    assert "accepted" not in one and "step" not in one
    drafts, long = report["notes"]
    assert "because the server neither reports drafts nor switches them" in drafts
    assert "prompt of 2048 tokens: left out, because the server refused the request" in long and "too many" in long
    for part in ("only", "128", "first", "p99", "neither reports drafts"):
        assert part in table
    starts = {body["messages"][0]["content"].split()[0] for body in plain.bodies if body["max_tokens"] == 16}
    assert len(starts) >= len(plain.bodies) / 3, "cold prompts share their beginning"


def test_the_server_needs_a_key_and_a_model() -> None:
    """Each refusal says which flag is missing."""
    with plain_server(Plain(models=["first", "second"], key="secret")) as url:
        with pytest.raises(AccessError, match="--api-key"):
            run(url)
        with pytest.raises(UsageError, match=r"lists 2 models: first, second. Name one with --model"):
            run(url, key="secret")
        with pytest.raises(UsageError, match="no model third"):
            run(url, "--model", "third", "--api-key", "secret")
        done = run(url, "--model", "second", "--prompt", "20", "--streams", "1", *SHORT, key="secret")
    assert "second" in done.stdout


def test_a_server_that_is_not_there_or_counts_no_tokens() -> None:
    """Nothing is shown but an error that says what to do."""
    with plain_server(Plain()) as url:
        pass
    with pytest.raises(NotReadyError, match="give its --url"):
        run(url)
    with plain_server(Plain(usage=False)) as url, pytest.raises(WorkerLostError, match="without usage"):
        run(url, *SHORT)
    with plain_server(Plain(token_seconds=0.5)) as url, pytest.raises(WorkerLostError, match="--timeout"):
        run(url, "--timeout", "1", *SHORT)


def test_a_server_that_dies_leaves_what_was_measured() -> None:
    """The rows measured before are printed, then the error, and the status is not zero."""
    with plain_server(Plain(dies_after=6)) as url:
        found = CliRunner().invoke(commands, ["bench", "--url", url, "--prompt", "50", *SHORT, "--json"])
    assert isinstance(found.exception, WorkerLostError)
    report = report_of(found)
    assert report["rows"][0]["prompt"] == 50 and "See its log" in report["problem"]


def test_ctrl_c_prints_what_was_measured() -> None:
    """After an interrupt the table has the rows measured before, and the status is 130."""
    plain = Plain(token_seconds=0.01)
    with plain_server(plain) as url:
        words = ["bench", "--url", url, "--prompt", "40", "--streams", "1", "--streams", "4", "--rounds", "1"]
        program = "from coordinator.cli import main; main()"
        popen = subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, env=os.environ)
        try:
            deadline = time.monotonic() + 60
            while plain.ended < 6 and time.monotonic() < deadline:
                time.sleep(0.02)
            popen.send_signal(signal.SIGINT)
            output, _ = popen.communicate(timeout=30)
        finally:
            popen.kill()
            popen.wait(10)
    assert popen.returncode == 130
    assert b"40" in output and b"neither reports drafts" in output
