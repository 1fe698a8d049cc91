"""The sampling parameters of one request. They reach the last stage once, in the Admit of the sequence."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from proto.errors import ProtocolError, RequestError
from proto.wire import check_type

MAX_LOGPROBS = 20
"""Maximum alternatives reported for each token: the limit that OpenAI's API documents."""

MAX_GRAMMAR_BYTES = 256 * 1024
"""Bytes. Maximum size of a request's grammar, which travels to the last stage; schemas of agents take a few KB."""

MAX_STOPS = 1024
"""Maximum tokens in `reasoning_stops`. The last stage reads the logits of all of them."""

MAX_MARK = 64
"""Maximum tokens in `reasoning_start` and in `reasoning_end`; the marks of models have fewer than 10."""

OPENING_TOKENS = 8
"""Tokens of an answer among which the reasoning may begin, if the prompt has not opened it."""

MAX_LOGIT_BIAS = 1024
"""Maximum entries in the logit_bias of a request. The last stage applies every entry to every token."""


Acceptance = Literal["match", "ratio"]
"""The value of `--acceptance`: drafts that equal the model's own choice, or by the ratio of both probabilities."""


@dataclass(frozen=True)
class SamplingParams:
    """The values that, with the logits, decide the token at a position (DESIGN §6).

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `xtc_probability` 0 each disable a filter. XTC never
    removes the tokens in `xtc_exempt`. The repetition penalty covers prompt and output. The presence and frequency
    penalties cover the output only, as in vLLM's reading of OpenAI's API.
    `logprobs` is the number of alternatives reported with each token: 0 reports only the chosen token, None reports
    nothing.

    A `grammar` begins after the token `grammar_start`, or with the answer. Until then, a token of `reasoning_stops` is
    chosen as `grammar_start`. Reasoning of `reasoning_budget` tokens is closed with `reasoning_end`, whose last token
    is its end mark. It begins with the answer, or after the first token of `reasoning_start`, which only the others may
    precede.

    Raises RequestError that names the field for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_exempt: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None
    grammar: bytes = b""
    grammar_start: int | None = None
    acceptance: Acceptance = "match"
    reasoning_budget: int | None = None
    reasoning_start: tuple[int, ...] = ()
    reasoning_end: tuple[int, ...] = ()
    reasoning_stops: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, 2**31 - 1, whole=True)
        _within("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _within("xtc_threshold", self.xtc_threshold, 0.0, 0.5)
        for token in self.xtc_exempt:
            _within("xtc_exempt token", token, 0, 2**32 - 1, whole=True, param="xtc_exempt")
        if self.acceptance not in get_args(Acceptance):
            raise RequestError(f"acceptance is match or ratio, got {self.acceptance!r:.40}", param="acceptance")
        _within("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("seed", self.seed, 0, 2**64 - 1, whole=True)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS, whole=True)
        if len(self.grammar) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"grammar: {len(self.grammar)} bytes exceed the limit of {MAX_GRAMMAR_BYTES}. Send a smaller schema.",
                param="grammar",
            )
        if self.grammar_start is not None:
            _within("grammar_start", self.grammar_start, 0, 2**32 - 1, whole=True)
        if self.reasoning_budget is not None:
            _within("reasoning_budget", self.reasoning_budget, 0, 2**31 - 1, whole=True)
            if not self.reasoning_end:
                raise RequestError("reasoning_budget requires reasoning_end", param="reasoning_budget")
        _check_tokens("reasoning_start", self.reasoning_start, MAX_MARK)
        _check_tokens("reasoning_end", self.reasoning_end, MAX_MARK)
        _check_tokens("stop_token_ids", self.reasoning_stops, MAX_STOPS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries, which exceeds the limit of {MAX_LOGIT_BIAS}",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _within("logit_bias token", token, 0, 2**32 - 1, whole=True, param="logit_bias")
            _within(f"logit_bias[{token}]", bias, -100.0, 100.0, param="logit_bias")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def ratio(self) -> bool:
        """True if drafts are accepted by the ratio rule. Greedy choice knows no probabilities."""
        return self.acceptance == "ratio" and not self.greedy

    @property
    def penalized(self) -> bool:
        """True if the history of the sequence changes its logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def needs_host(self, first: int, end: int) -> bool:
        """Return whether the choice of the answer's tokens `first` to `end` depends on tokens before them.

        Only the host knows them. A history and a grammar need them always, the end of the reasoning near its budget.
        """
        if self.penalized or self.grammar or self.reasoning_budget is None:
            return self.penalized or bool(self.grammar)
        latest = self.reasoning_budget + (OPENING_TOKENS if self.reasoning_start else 0)
        return self.reasoning_budget < end and first < latest + len(self.reasoning_end)

    def to_wire(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as msgpack encodes them."""
        default = SamplingParams()
        return {name: value for name, value in asdict(self).items() if value != getattr(default, name)}

    @classmethod
    def from_wire(cls, wire: Any) -> SamplingParams:
        """Invert `to_wire`. Raises ProtocolError for unknown fields or wrong types."""
        check_type(wire, dict, "sampling parameters")
        try:
            fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in wire.items()}
            return cls(**fields)
        except (RequestError, TypeError, AttributeError) as error:
            raise ProtocolError(f"sampling parameters: {error}") from error


def _within(
    name: str,
    value: object,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    whole: bool = False,
    param: str | None = None,
) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name} is {kind}, got {value!r:.60}", param=param or name)
    if not low <= value <= high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise RequestError(
            f"{name} {_shown(value)} is outside {bracket}{_shown(low)}, {_shown(high)}]",
            param=param or name,
        )


def _check_tokens(name: str, tokens: tuple[int, ...], most: int) -> None:
    if len(tokens) > most:
        raise RequestError(f"{name} has {len(tokens)} tokens, which exceeds the limit of {most}", param=name)
    for token in tokens:
        _within(f"{name} token", token, 0, 2**32 - 1, whole=True, param=name)


def _shown(number: int | float) -> str:
    """Return the number as text, cut after 60 characters."""
    return f"{number:g}" if isinstance(number, float) else f"{number!r:.60}"
