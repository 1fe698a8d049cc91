"""Many concurrent clients on two real workers: equal answers, bounded queues, no state of disconnected clients."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import grpc
import httpx
import pytest

from coordinator.schedule.request import GenerationRequest
from coordinator.text.tokenizer import Tokenizer
from mtp.builtin import checkpoint_dir
from proto import cluster_pb2 as pb
from proto import cluster_pb2_grpc as pb_grpc
from proto.params import SamplingParams
from tests.cluster.conftest import Pool
from tests.support.processes.processes import Coordinator, running_cluster, serving
from tests.support.processes.waits import wait_until
from tests.support.stages.local_run import run
from tests.support.text.prompts import PROMPTS

Body = dict[str, Any]

SEQUENCES = 6
"""Sequences that the coordinator of most tests runs at once: fewer than its sixteen requests."""

GONE_SECONDS = 60.0
"""Seconds. Maximum time a request may outlive its client on a worker; a prefill chunk takes a fraction of it."""

LONG = " ".join(PROMPTS) + " ".join(reversed(PROMPTS))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint_dir())


@pytest.fixture(scope="module")
def workers(pool: Pool) -> list[str]:
    return pool(2)


@pytest.fixture(scope="module")
def url(workers: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve with three drafts per window, whether that pays or not."""
    folder = tmp_path_factory.mktemp("many")
    flags = ("--mtp", "3", "--dtype", "float32", "--max-sequences", str(SEQUENCES))
    with serving(folder, "builtin", workers, *flags) as coordinator:
        yield coordinator.url


def bodies(tokenizer: Tokenizer) -> list[Body]:
    """Return sixteen requests: prompts of 1 to 200 tokens, answers of 1 to 20, and all sampling settings."""
    long = tokenizer.encode(LONG)
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS[:13]]
    prompts += [[long[5]], list(long[100:300]), list(long[250:400])]
    settings: list[Body] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "seed": 2**63 + 1, "top_p": 0.9},
        {"temperature": 1.3, "seed": 4, "top_k": 20, "min_p": 0.02},
        {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        {"temperature": 0.9, "seed": 6, "repetition_penalty": 1.2, "logit_bias": {"17": 3.0}},
    ]
    return [
        {"prompt": p, "max_tokens": 1 + 13 * i % 20, "ignore_eos": True, **settings[i % 6]}
        for i, p in enumerate(prompts)
    ]


def as_request(body: Body) -> GenerationRequest:
    """Return the same request in the engine's format."""
    given = {**body}
    prompt, most = tuple(given.pop("prompt")), given.pop("max_tokens")
    given.pop("ignore_eos")
    if bias := given.get("logit_bias"):
        given["logit_bias"] = {int(token): value for token, value in bias.items()}
    return GenerationRequest(prompt, most, SamplingParams(logprobs=0, **given))


Words = list[tuple[str, float]]
"""Every token of an answer with its log-probability. In float32, equal computations give equal bits."""


def alone(requests: Sequence[GenerationRequest], tokenizer: Tokenizer, kv_bits: int | None = None) -> list[Words]:
    """Return each answer as one process computes it, without other requests, drafts or a prefix cache."""
    answers = run(
        checkpoint_dir(),
        requests,
        one_by_one=True,
        prefix_cache=False,
        dtype="float32",
        kv_bits=kv_bits,
    )
    return [
        [
            (tokenizer.token_bytes(token).decode(), entry.logprob)
            for token, entry in zip(answer.tokens, answer.logprobs, strict=True)
        ]
        for answer in answers
    ]


async def ask(client: httpx.AsyncClient, body: Body) -> dict[str, Any]:
    reply = await client.post("/v1/completions", json={**body, "logprobs": 0})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def said(reply: dict[str, Any]) -> Words:
    logprobs = reply["choices"][0]["logprobs"]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


async def ask_all(url: str, asked: Sequence[Body]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=90) as client:
        return list(await asyncio.gather(*(ask(client, body) for body in asked)))


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def drafted(url: str) -> list[int]:
    """Return the drafts so far, by position."""
    found: list[int] = status_of(url)["drafted_by_position"]
    return found or [0, 0, 0]


def status_of(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/status", timeout=60).json()
    return found


def report_state(address: str) -> pb.StateReport:
    """Return the state report of a worker."""
    with grpc.insecure_channel(address) as channel:
        reply: pb.StateReport = pb_grpc.WorkerStub(channel).ReportState(pb.StateReportRequest(), timeout=10)
        return reply


def assert_nothing_is_held(addresses: Sequence[str]) -> None:
    """Assert that within GONE_SECONDS no worker holds a sequence. Prefixes may stay, equal on all workers."""
    wait_until(
        lambda: not any(report_state(address).sequences for address in addresses),
        "no sequence on a worker",
        GONE_SECONDS,
    )
    prefixes = [[(p.entry, p.length) for p in report_state(a).prefixes] for a in addresses]
    assert all(held == prefixes[0] for held in prefixes), prefixes


# ---- the same tokens


@pytest.mark.slow
def test_sixteen_at_once_as_each_alone(url: str, workers: list[str], tokenizer: Tokenizer) -> None:
    """Batches, queues and drafts change no answer: each request gets the one it gets alone."""
    asked = bodies(tokenizer)
    expected = alone([as_request(body) for body in asked], tokenizer)
    before = drafted(url)
    replies = asyncio.run(ask_all(url, asked))
    grown = [after - count for after, count in zip(drafted(url), before, strict=True)]
    assert len(grown) == 3
    assert all(count > 0 for count in grown)
    for body, reply, words in zip(asked, replies, expected, strict=True):
        assert said(reply) == words, body
    assert_nothing_is_held(workers)


@pytest.mark.slow
def test_a_prefix_hit_changes_no_token(url: str, tokenizer: Tokenizer) -> None:
    """A prompt whose beginning is cached reports the cached tokens and gets the same answer."""
    text = tokenizer.encode(LONG)
    first = list(text[:190])
    inside = [*text[:150], *text[400:440]]  # differs from `first` inside a chunk
    turn = {"max_tokens": 24, "temperature": 0.8, "seed": 21, "ignore_eos": True}
    asked: list[Body] = [{"prompt": prompt, **turn} for prompt in (first, inside, inside)]
    replies = [asyncio.run(ask_all(url, [body]))[0] for body in (*asked, asked[0])]
    expected = alone([as_request(body) for body in asked], tokenizer)
    assert [said(reply) for reply in replies] == [*expected, expected[0]]
    hits = [cached(reply) for reply in replies]
    assert hits[0] == 0
    assert hits[2] >= 128  # the shared tokens in whole blocks, cached after the second request
    assert hits[3] >= 160
    answer = tokenizer.encode("".join(word for word, _ in expected[0]))
    following = {"prompt": [*first, *answer, *text[600:620]], **turn}
    (reply,) = asyncio.run(ask_all(url, [following]))
    assert cached(reply) >= 190
    assert said(reply) == alone([as_request(following)], tokenizer)[0]


# ---- clients that disconnect


async def disconnect_after(
    client: httpx.AsyncClient, body: Body, beginning: str, lines: int
) -> tuple[str, dict[str, Any]]:
    """Open a stream, read `lines` of its lines that start with `beginning`, and disconnect.

    Return the last of these lines, and the status while the stream was open.
    """
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        matching = (line async for line in reply.aiter_lines() if line.startswith(beginning))
        for _ in range(lines):
            last = await anext(matching)
        return last, (await client.get("/status")).json()


async def disconnect_unanswered(client: httpx.AsyncClient, body: Body, seconds: float) -> None:
    """Send a request that is not streamed, and disconnect before its answer."""
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=seconds))


@pytest.mark.slow
def test_clients_that_disconnect_leave_no_state(url: str, workers: list[str], tokenizer: Tokenizer) -> None:
    """Disconnecting in prefill, decode or queue leaves no state on a worker and changes no other answer.

    The status shows the prompts in prefill and the queue.
    """
    text = list(tokenizer.encode(LONG))
    stays = {"prompt": text[40:90], "max_tokens": 40, "temperature": 0.6, "seed": 9}
    stays["ignore_eos"] = True
    endless = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0.5}
    prefill: Body = {
        **endless,
        "prompt": 4 * text[::-1],
    }  # several seconds, so that a slow test sees it
    decode = {**endless, "prompt": text[7:19]}

    async def scene() -> tuple[list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]:
        async with httpx.AsyncClient(base_url=url, timeout=90) as client:
            staying = [asyncio.create_task(ask(client, stays)) for _ in range(2)]
            leaving = [disconnect_after(client, prefill, ": prefill", 1) for _ in range(2)]
            leaving += [disconnect_after(client, decode, "data: {", 6) for _ in range(4)]
            unanswered = [disconnect_unanswered(client, decode, 0.7) for _ in range(4)]
            left, _ = await asyncio.gather(asyncio.gather(*leaving), asyncio.gather(*unanswered))
            return list(await asyncio.gather(*staying)), left

    replies, left = asyncio.run(scene())
    length = len(prefill["prompt"])
    for line, status in left[:2]:
        done, _, total = line.removeprefix(": prefill ").partition("/")
        assert int(done) < int(total) == length
        assert any(p["done"] < p["total"] == length for p in status["prefilling"]), status
    assert all('"finish_reason":null' in line for line, _ in left[2:])
    assert max(status["waiting"] for _, status in left) > 0
    (expected,) = alone([as_request(stays)], tokenizer)
    assert [said(reply) for reply in replies] == [expected, expected]
    assert_nothing_is_held(workers)
    wait_until(
        lambda: not any(map(status_of(url).get, ("running", "waiting", "kv_tokens"))),
        "no open request",
        GONE_SECONDS,
    )


# ---- clients


FIRST_SECONDS = 4.0
"""Seconds. Maximum time to the first token of a client beside one that floods the server."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has one loopback address")
def test_one_address_does_not_hold_up_another(url: str, workers: list[str], tokenizer: Tokenizer) -> None:
    """Beside 24 long answers of one address, another one has its first token soon, and all answers are right."""
    text = list(tokenizer.encode(LONG))
    long: list[Body] = [
        {"prompt": text[i : i + 20], "max_tokens": 150, "temperature": i % 2, "seed": i, "ignore_eos": True}
        for i in range(24)
    ]
    short: Body = {"prompt": text[60:90], "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    async def scene() -> tuple[list[dict[str, Any]], list[float]]:
        other = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with (
            httpx.AsyncClient(base_url=url, timeout=600) as one,
            httpx.AsyncClient(base_url=url, timeout=600, transport=other) as two,
        ):
            flood = [asyncio.create_task(ask(one, body)) for body in long]
            firsts = []
            for _ in range(3):
                await asyncio.sleep(2.0)
                started = time.monotonic()
                async with two.stream("POST", "/v1/completions", json={**short, "stream": True}) as reply:
                    lines = (line async for line in reply.aiter_lines() if line.startswith("data: {"))
                    await anext(lines)
                    firsts.append(time.monotonic() - started)
                    assert not all(task.done() for task in flood)
            return list(await asyncio.gather(*flood)), firsts

    replies, firsts = asyncio.run(scene())
    assert median(firsts) < FIRST_SECONDS, firsts  # a busy machine may delay one
    expected = alone([as_request(body) for body in long[:4]], tokenizer)
    assert [said(reply) for reply in replies[:4]] == expected
    assert_nothing_is_held(workers)


# ---- limits


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Serve with one worker that has memory for the weights and a few thousand tokens."""
    folder = tmp_path_factory.mktemp("tight")
    with running_cluster(folder, "builtin", 1, "--mtp", "off", worker_flags=("--memory-limit", "45MB")) as cluster:
        yield cluster.coordinator


def test_a_request_that_can_never_fit_is_refused_at_once(tight: Coordinator) -> None:
    """A request beyond the K/V limit in the status is a 400; without max_tokens the answer gets what fits."""
    limit = status_of(tight.url)["kv_limit"]
    assert 256 <= limit < 8192
    url = f"{tight.url}/v1/completions"
    body = {"prompt": list(range(40, 80)), "temperature": 0}
    refused = httpx.post(url, json={**body, "max_tokens": limit - 39})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "max_tokens"
    assert f"{limit:,}" in error["message"] or str(limit) in error["message"]
    assert httpx.post(url, json={**body, "max_tokens": 8}, timeout=90).status_code == 200
    assert httpx.post(url, json={**body, "stop": "\n"}, timeout=90).status_code == 200
