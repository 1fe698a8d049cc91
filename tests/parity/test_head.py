"""The MTP head computes its formula, and its cache holds exactly the pairs of the verified text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from mtp.head.drafter import MOST_WAITING
from mtp.sampling.sampler import History, choose
from proto.errors import ProtocolError
from proto.frame import Outcome, Segment
from proto.params import SamplingParams
from tests.conftest import Checkpoints
from tests.support.checkpoints.own_families import OWN_FAMILIES
from tests.support.stages.chain import VOCAB, Chain, Script, Stock, modules, random_tokens, same

Array = NDArray[np.float64]


class HeadReference:
    """`draft` gives the logits of a chain; `hidden` is whatever the caller holds the backbone's to be."""

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        self.text = config.get("text_config", config)
        loaded = mx.load(str(path / "model.safetensors"))
        assert isinstance(loaded, dict)
        self.weights: dict[str, Array] = {
            name: np.array(w.astype(mx.float32)).astype(np.float64) for name, w in loaded.items()
        }
        (embedding,) = [name for name in self.weights if name.endswith("embed_tokens.weight")]
        self.embedding = self.weights[embedding]
        self.lm_head = self.weights.get("lm_head.weight", self.embedding)

    def draft(self, hidden: Array, following: list[int], tokens: list[int]) -> Array:
        """Return the logits `[len(tokens) + 1, vocab]` after the pairs, and then after each of the drafted `tokens`.

        The pairs are `hidden [n, H]` and the n tokens of `following`.
        """
        pairs, following = hidden, list(following)
        logits = []
        for token in (*tokens, None):
            out = self._advance(pairs, following)
            logits.append(out[-1] @ self.lm_head.T)
            if token is not None:
                pairs = np.concatenate([pairs, out[-1:]])
                following.append(token)
        return np.stack(logits)

    def _advance(self, hidden: Array, following: list[int]) -> Array:
        e = self._norm(self.embedding[following], "pre_fc_norm_embedding")
        h = self._norm(hidden, "pre_fc_norm_hidden")
        x = np.concatenate([e, h], axis=-1) @ self._weight("fc").T
        x = x + self._attention(self._norm(x, "layers.0.input_layernorm"))
        x = x + self._mlp(self._norm(x, "layers.0.post_attention_layernorm"))
        return self._norm(x, "norm")

    def _weight(self, name: str) -> Array:
        return self.weights[f"mtp.{name}.weight"]

    def _norm(self, x: Array, name: str) -> Array:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        scaled: Array = x / np.sqrt(mean + self.text["rms_norm_eps"]) * (1 + self._weight(name))
        return scaled

    def _attention(self, x: Array) -> Array:
        prefix = "layers.0.self_attn"
        n, heads, size = len(x), self.text["num_attention_heads"], self.text["head_dim"]
        q, gate = np.split((x @ self._weight(f"{prefix}.q_proj").T).reshape(n, heads, 2 * size), 2, axis=-1)
        kv_heads = self.text["num_key_value_heads"]
        k, v = ((x @ self._weight(f"{prefix}.{p}_proj").T).reshape(n, kv_heads, size) for p in "kv")
        q = self._rope(self._norm(q, f"{prefix}.q_norm"))
        k = self._rope(self._norm(k, f"{prefix}.k_norm"))
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size)
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        out = np.einsum("hqk,khd->qhd", _softmax(scores), v) / (1 + np.exp(-gate))
        projected: Array = out.reshape(n, -1) @ self._weight(f"{prefix}.o_proj").T
        return projected

    def _rope(self, x: Array) -> Array:
        """Rotate the first quarter of each head, its first half against its second."""
        rope = self.text.get("rope_parameters", self.text)
        rotated = int(self.text["head_dim"] * rope["partial_rotary_factor"])
        frequency = rope["rope_theta"] ** (-np.arange(0, rotated, 2) / rotated)
        angle = np.arange(len(x))[:, None, None] * frequency
        a, b, rest = np.split(x, [rotated // 2, rotated], axis=-1)
        sin, cos = np.sin(angle), np.cos(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def _mlp(self, x: Array) -> Array:
        prefix = "layers.0.mlp"
        if "num_experts" not in self.text:
            return self._glu(x, *(self._weight(f"{prefix}.{p}_proj") for p in ("gate", "up", "down")))
        shared = (self._weight(f"{prefix}.shared_expert.{p}_proj") for p in ("gate", "up", "down"))
        gate = 1 / (1 + np.exp(-x @ self._weight(f"{prefix}.shared_expert_gate").T))
        out = gate * self._glu(x, *shared)
        chances = _softmax(x @ self._weight(f"{prefix}.gate").T)
        for row, chance in enumerate(chances):
            best = np.argsort(-chance)[: self.text["num_experts_per_tok"]]
            for expert in best:
                share = chance[expert] / chance[best].sum()
                out[row] += share * self._glu(x[row], *self._expert(f"{prefix}.experts", expert))
        return out

    def _expert(self, prefix: str, expert: int) -> tuple[Array, Array, Array]:
        if f"mtp.{prefix}.gate_up_proj" not in self.weights:
            gate, up, down = (self._weight(f"{prefix}.{expert}.{p}_proj") for p in ("gate", "up", "down"))
            return gate, up, down
        gate, up = np.split(self.weights[f"mtp.{prefix}.gate_up_proj"][expert], 2)
        return gate, up, self.weights[f"mtp.{prefix}.down_proj"][expert]

    @staticmethod
    def _glu(x: Array, gate: Array, up: Array, down: Array) -> Array:
        g = x @ gate.T
        out: Array = (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T
        return out


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Array = e / e.sum(axis=-1, keepdims=True)
    return out


PROMPT = 13

BEYOND_BUDGET = 90
"""Tokens. A prompt that queries with a budget of 64 tokens read in part."""
DEPTH = 4
TOLERANCE = 1e-4
"""Largest allowed difference over the largest value, fp32 against float64."""

FORMS: list[dict[str, Any]] = [
    {},
    {"tie": False},
    {"moe": True},
    {"moe": True, "fused_mtp_experts": True, "tie": False},
    {"moe": True, "qwen3_next": True},
]

FEW = {7: 60.0, 90: 60.0, 201: 60.0}
"""Logit bias that leaves three tokens. The random head then sometimes agrees with its backbone."""


def _error(ours: mx.array, theirs: Array) -> float:
    return float(np.abs(np.array(ours) - theirs).max() / np.abs(theirs).max())


def _hidden(path: Path, tokens: list[int], *, normed: bool = True) -> Array:
    """Return mlx-lm's hidden states of `tokens` `[n, H]`, after the final norm or before it."""
    model, _ = load_model(path)
    if not normed:
        model.model.norm = nn.Identity()
    hidden: Array = np.array(model.model(mx.array([tokens]))[0], np.float64)
    return hidden


def _draft(path: Path, tokens: list[int], chunk: int) -> tuple[Outcome, mx.array]:
    """Prefill `tokens` in chunks of `chunk` and draft. Return the outcome and the logits of the drafts."""
    chain = Chain(path, (4,))
    script = Script(0, tokens)
    while script.scheduled < len(tokens):
        last = script.scheduled + chunk >= len(tokens)
        segment = script.chunk(chunk, sample=last, drafts=DEPTH if last else 0)
        outcome = chain.send(segment, ops=script.due()).outcomes[0]
    return outcome, mx.concatenate(chain.draft_logits)


# ---- the formula


@pytest.mark.parametrize("options", FORMS, ids=lambda options: ", ".join(options) or "dense")
def test_drafts_follow_the_formula(checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    """Draft logits equal an independent implementation's to 1e-4 at every position, for any prompt chunks.

    Hidden states from before the final norm, or an empty cache after the prompt, would differ by much more.
    """
    path = checkpoints(**options)
    tokens = random_tokens(PROMPT)
    reference = HeadReference(path)
    outcome, logits = _draft(path, tokens, chunk=PROMPT)
    assert outcome.token is not None and len(outcome.drafts) == DEPTH
    following = [*tokens[1:], outcome.token]
    chained = list(outcome.drafts[:-1])
    expected = reference.draft(_hidden(path, tokens), following, chained)
    assert _error(logits, expected) <= TOLERANCE
    assert outcome.drafts == tuple(int(row.argmax()) for row in expected)
    for chunk in (1, 3, 5):
        assert mx.array_equal(_draft(path, tokens, chunk)[1], logits)
    before = reference.draft(_hidden(path, tokens, normed=False), following, chained)
    cold = reference.draft(_hidden(path, tokens)[-1:], following[-1:], chained)
    assert min(_error(logits, before), _error(logits, cold)) > 100 * TOLERANCE


# ---- its cache


def _fresh_head(path: Path, tokens: list[int]) -> list[mx.array]:
    """Return the head's K/V after a prefill of `tokens` whose next token was chosen."""
    chain = Chain(path)
    script = Script(0, tokens)
    script.run(chain, script.chunk(len(tokens)))
    return chain.head_state(0)


def _guess(script: Script, known: Sequence[int], chance: random.Random) -> list[int]:
    """Return the next token of the `known` text and up to four drafts, of which a prefix is correct."""
    width = chance.randint(1, 5)
    right = chance.randint(1, width)
    text = known[script.scheduled : script.scheduled + width]
    return [t if i < right else (t + 1) % VOCAB for i, t in enumerate(text)]


@pytest.mark.parametrize(
    "options",
    [{}, {"moe": True}, {"moe": True, "qwen3_next": True}],
    ids=["dense", "experts", "Qwen3-Next"],
)
def test_the_cache_never_drifts_from_the_text(checkpoints: Checkpoints, options: dict[str, Any]) -> None:
    """The head's cache holds one pair for each verified token, whatever was drafted, accepted or rejected.

    Its K/V is bit for bit that of a prefill over these tokens.
    """
    path = checkpoints(layers=4, **options)
    chance = random.Random(3)
    stock = Stock(path, random_tokens(PROMPT), 60)
    chain = Chain(path, (2,))
    script, known = Script(0, list(stock.prompt)), stock.tokens
    script.run(chain, script.chunk(PROMPT, drafts=2))
    head = chain.verifier.states[0].head
    assert head is not None
    for turn in range(16):
        outcome = script.run(chain, script.window(_guess(script, known, chance), drafts=chance.randint(0, 4)))
        assert outcome.accepted_length and head.length == script.scheduled == len(script.known) - 1
        if turn % 4 == 3:
            assert same(chain.head_state(0), _fresh_head(path, script.known[:-1]))
    assert script.known == stock.tokens[: len(script.known)]


@pytest.mark.parametrize("family", ["", pytest.param("flash-next", marks=pytest.mark.slow), "glm"])
def test_drafts_on_the_device_are_those_of_the_host(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Drafts after windows whose accepted length only the device knows equal those after the host has read it.

    Windows of 1 to 5 tokens and 0 to 4 drafts run, greedy and sampled, with every number of rejected rows. Heads with
    an indexer read more tokens than their budget.
    """
    if family:
        pytest.importorskip("torch", reason="transformers writes these models")
    path = OWN_FAMILIES[family].write(tmp_path / family) if family else checkpoints(layers=4)
    prompt, windows = random_tokens(BEYOND_BUDGET if family else PROMPT), 7 if family else 12
    for params in (SamplingParams(), SamplingParams(temperature=0.9, seed=3, logit_bias={})):
        modules.cache_clear()  # some layers take over their modules
        plain, one_by_one = Script(0, prompt, params), Chain(path)
        plain.run(one_by_one, plain.chunk(len(prompt)))
        for _ in range(5 * windows):
            plain.run(one_by_one, plain.next_window())
        found, known = [], plain.known
        for early in (True, False):
            if not early:
                monkeypatch.setattr("worker.model.verifier._drafts_on_device", lambda _: False)
            modules.cache_clear()
            chance, chain = random.Random(5), Chain(path, (2,))
            script = Script(0, prompt, params)
            outcomes = [script.run(chain, script.chunk(len(prompt), drafts=3))]
            for _ in range(windows):
                window = script.window(_guess(script, known, chance), drafts=chance.randint(0, 4))
                outcomes.append(script.run(chain, window))
            found.append((outcomes, chain.head_state(0)))
            monkeypatch.undo()
        (early_outcomes, early_state), (late_outcomes, late_state) = found
        assert early_outcomes == late_outcomes
        assert same(early_state, late_state)
        assert len({outcome.accepted_length for outcome in early_outcomes[1:]}) >= 2


def test_drafting_after_a_pause_goes_on_as_if_there_were_none(checkpoints: Checkpoints) -> None:
    """Drafts after steps without drafting equal those of a head that was fed every step.

    The head stores a bounded number of pairs while no drafts are requested.
    """
    path = checkpoints(layers=4)
    logits = []
    for depth in (2, 0):
        chain = Chain(path)
        script = Script(0, random_tokens(PROMPT))
        script.run(chain, script.chunk(PROMPT, drafts=depth))
        head = chain.verifier.states[0].head
        assert head is not None
        for _ in range(MOST_WAITING + 9):
            script.drafts = ()
            script.run(chain, script.next_window(drafts=depth))
            assert len(head.waiting_tokens) < MOST_WAITING
            assert head.length == script.scheduled
        script.drafts = ()
        chain.draft_logits.clear()
        outcome = script.run(chain, script.next_window(drafts=3))
        assert len(outcome.drafts) == 3
        logits.append(mx.concatenate(chain.draft_logits))
    assert mx.array_equal(logits[0], logits[1])


def test_each_row_of_a_frame_drafts_as_deep_as_it_asks(checkpoints: Checkpoints) -> None:
    """Sequences of one frame that request 0 to 4 drafts each get the drafts they would get alone."""
    path = checkpoints(layers=4)

    def drafts(depths: list[int]) -> list[tuple[int, ...]]:
        chain = Chain(path)
        scripts = [Script(i, random_tokens(PROMPT - i, seed=i)) for i in range(5)]
        segments: list[Segment] = []
        for script, depth in zip(scripts, depths, strict=True):
            segments.append(script.chunk(PROMPT, drafts=depth))
        frame = chain.send(*segments, ops=[op for script in scripts for op in script.due()])
        return [outcome.drafts for outcome in frame.outcomes]

    full = drafts([4] * 5)
    for depths in ([0, 1, 2, 3, 4], [4, 0, 3, 1, 2], [0, 0, 2, 0, 0]):
        assert drafts(depths) == [f[:depth] for f, depth in zip(full, depths, strict=True)]


def test_a_checkpoint_without_a_head_refuses_drafts(checkpoints: Checkpoints) -> None:
    """A stage without the head's tensors refuses a request for drafts and says that it has no head."""
    chain = Chain(checkpoints(layers=4, mtp=False))
    script = Script(0, random_tokens(PROMPT))
    with pytest.raises(ProtocolError, match="no MTP head"):
        chain.send(script.chunk(PROMPT, drafts=1), ops=script.due())


# ---- what drafts are drawn from, and what they may change


PENALIZED: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.7,
    "logit_bias": FEW,
    "logprobs": 3,
}


@pytest.mark.parametrize("settings", [{}, PENALIZED], ids=["drafts of the device", "drafts of the host"])
def test_drafts_are_drawn_with_the_noise_and_the_past_of_their_positions(
    checkpoints: Checkpoints, settings: dict[str, Any]
) -> None:
    """Each draft is the target rule's choice from the head's logits at that position.

    It uses the noise of the position, its draw of XTC, and penalties over all text before it, earlier drafts included.
    """
    params = SamplingParams(temperature=0.9, seed=5, xtc_probability=0.5, xtc_threshold=0.001, **settings)
    chain = Chain(checkpoints(layers=4))
    script = Script(0, random_tokens(PROMPT), params)
    segment = script.chunk(PROMPT, drafts=DEPTH)
    for _ in range(12):
        chain.draft_logits.clear()
        outcome = script.run(chain, segment)
        for i, logits in enumerate(chain.draft_logits):
            history = History(VOCAB, PROMPT)
            history.extend([*script.known, *outcome.drafts[:i]])
            at = len(script.known) + i
            assert choose(logits, params, at, history).item() == outcome.drafts[i]
        segment = script.next_window(drafts=DEPTH)


@pytest.mark.parametrize("bias", [{}, FEW], ids=["drafts of the device", "drafts of the host"])
def test_the_ratio_rule_decides_about_a_draft_that_was_not_sent(
    checkpoints: Checkpoints, bias: dict[int, float]
) -> None:
    """A window that was cut, as before a stop token, gets the token that it has with all drafts of its chain.

    Otherwise the answers would be biased: whether a draft counts would depend on the draft. Drafts of the text, which
    have no source, are judged by the model's probabilities alone.
    """
    path, seeds = checkpoints(layers=4), range(10)
    changed = 0
    for seed in seeds:
        params = SamplingParams(temperature=3.0, top_k=4, seed=seed, logit_bias=bias, acceptance="ratio")
        tokens = []
        for width, source in ((4, 1), (1, 1), (2, 1), (1, 0)):
            chain, script = Chain(path), Script(0, random_tokens(PROMPT), params)
            drafts = script.run(chain, script.chunk(PROMPT, drafts=3)).drafts
            assert len(drafts) == 3
            window = replace(script.window([script.known[-1], *drafts[: width - 1]]), source=source)
            tokens.append(script.run(chain, window))
        first = [drafts[0] if outcome.accepted_length > 1 else outcome.token for outcome in tokens]
        assert first[0] == first[1] == first[2]
        changed += first[3] != first[0]
        full, _, pair, _ = tokens
        if pair.accepted_length == 2:
            assert pair.token == (drafts[1] if full.accepted_length > 2 else full.token)
    assert changed, "the cases do not tell the rules apart"
