"""A text decoded without windows. Rollback tests compare with it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import mlx.core as mx

from mtp.layers.layer import KVFormat
from proto.params import SamplingParams
from tests.support.stages.chain import VOCAB, Chain, Script, random_tokens

GROUP = 32
"""Group size of quantized K/V: the head_dim of the test checkpoints."""


def kv_format(bits: int | None) -> KVFormat:
    """Return the K/V format with `bits`."""
    return KVFormat(bits, GROUP)


class Truth:
    """A text after a prompt, computed token by token without windows, with the state after every token."""

    def __init__(
        self,
        path: Path,
        prompt: int,
        steps: int,
        bits: int | None = None,
        params: SamplingParams | None = None,
    ) -> None:
        chain = Chain(path, kv_format=kv_format(bits))
        self.params = params or SamplingParams()
        script = Script(0, random_tokens(prompt, seed=prompt), self.params)
        self.prompt = prompt
        self.states: dict[int, list[mx.array]] = {}
        self.head_states: dict[int, list[mx.array]] = {}
        self.logits: dict[int, mx.array] = {}
        while script.scheduled < prompt + steps:
            outcome = chain.send(script.chunk(1), ops=script.due()).outcomes[0]
            self.states[script.scheduled] = chain.state(0)
            self.head_states[script.scheduled] = chain.head_state(0)
            self.logits[script.scheduled] = chain.logits[0][0]
            if script.scheduled == len(script.known):
                assert outcome.token is not None
                script.known.append(outcome.token)
        self.tokens = script.known

    def window(self, start: int, width: int, right: int) -> list[int]:
        """Return `width` tokens for position `start`, of which the first `right` are the text's."""
        end = start + width
        text = [*self.tokens[start:end], *[0] * (end - len(self.tokens))]
        return [t if i < right else (t + 1) % VOCAB for i, t in enumerate(text)]


@lru_cache(maxsize=32)
def truth(path: Path, prompt: int, steps: int, bits: int | None = None) -> Truth:
    """Return the greedy text."""
    return Truth(path, prompt, steps, bits)
