"""The checkpoint's tokenizer, loaded by mlx-lm without network: text and chats to tokens, and tokens to text."""

from __future__ import annotations

import codecs
import inspect
import json
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from coordinator.text.answer_reader import PAIR_TAGS, Marks, held_back
from coordinator.text.call_parsers import INNER_MARKS, CallSyntax, published, syntax_in
from coordinator.text.forced_forms import CHANNEL_CALL, JsonForm, json_form
from coordinator.text.harmony import CHANNEL, ENDS, MESSAGE, MESSAGE_ENDS
from coordinator.text.schemas import Json
from coordinator.text.template_form import TemplateForm, separate_template
from coordinator.text.token_bytes import byte_table
from mtp.checkpoint.families.family import CallForm, Family
from mtp.checkpoint.format.config import read_json_object
from mtp.sampling.grammar import Vocabulary
from proto.errors import CheckpointError, RequestError
from proto.params import SamplingParams


class ContextLengthError(RequestError):
    """A prompt beyond the `limit` of tokens, alone, where `max_tokens` is None, or together with the answer."""

    code = "context_length_exceeded"

    def __init__(self, message: str, prompt: int, limit: int, *, param: str, max_tokens: int | None = None) -> None:
        super().__init__(message, param=param)
        self.prompt, self.limit, self.max_tokens = prompt, limit, max_tokens


@dataclass(frozen=True)
class Piece:
    """Final text, and the tokens that begin in it, each in one piece only."""

    text: str = ""
    tokens: tuple[int, ...] = ()


class TextStream:
    """The conversion of one answer's tokens into pieces of text.

    Invalid UTF-8 becomes U+FFFD. A character cut off by the end of the answer is omitted. The text before a stop
    string is emitted; the stop string and the text after it are not. `stopped` is then True, `stop_string` is the
    string found, and no token may be added. If stop strings overlap, the one that ends first counts, so the text
    does not depend on token borders.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = (), *, trims: bool = False) -> None:
        assert all(stop), "an empty stop string is found everywhere"
        self._trims = trims  # the first blank of the text is none of the answer
        self._token_bytes = token_bytes
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._emitted = 0  # characters
        self._unreported: deque[tuple[int, int]] = deque()  # token, offset of its text
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """True after a stop string has ended the text."""
        return self.stop_string is not None

    def add_token(self, token: int) -> Piece:
        """Add one token; return the text that became final with it, which may be empty."""
        assert not self.stopped, "a token was added after a stop string"
        self._unreported.append((token, self._emitted + len(self._held)))
        text = self._decoder.decode(self._token_bytes(token))
        if self._trims and text:
            self._trims, text = False, text.removeprefix(" ")
        self._held += text
        places = ((stop, self._held.find(stop)) for stop in self._stop)
        if found := [(at + len(stop), at, stop) for stop, at in places if at >= 0]:
            # The one that ends first, the longer of two that end together.
            _, start, self.stop_string = min(found)
            piece = self._release(start)
            self._held = ""
            self._unreported.clear()
            return piece
        return self._release(len(self._held) - held_back(self._held, self._stop))

    def finish(self) -> Piece:
        """Return the text held back, after the last token. It is empty after a stop string."""
        # The last tokens may have no text: control tokens, or the first bytes of a character.
        piece = Piece(self._held, tuple(token for token, _ in self._unreported))
        self._emitted += len(self._held)
        self._held = ""
        self._unreported.clear()
        return piece

    def _release(self, length: int) -> Piece:
        text, self._held = self._held[:length], self._held[length:]
        self._emitted += length
        begun = []
        while self._unreported and self._unreported[0][1] < self._emitted:
            begun.append(self._unreported.popleft()[0])
        return Piece(text, tuple(begun))


_RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "tokenize", "continue_final_message"})
"""Template variables that `chat_template_kwargs` may not set, because request fields or the server set them."""


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat.

    `thinking` is True if the template has opened a reasoning block that the answer continues. `reasons` is False if it
    has closed one. The first `turn`
    tokens are the chat so far, with which the next turn's prompt begins too; the remaining tokens open the answer.
    `continued` is True if the next turn's prompt also contains that opening and the answer unchanged.
    """

    tokens: tuple[int, ...]
    thinking: bool
    turn: int
    continued: bool
    reasons: bool = True


PIECE_CHARACTERS = 131_072
"""Characters that are encoded at a time to find the length of a long text. Encoding them takes about 0.1 s."""

SHORT_CHARACTERS = 16_384
"""Characters. Shorter texts are encoded on the calling thread, which stops all others for up to about 10 ms."""

GUARD = secrets.token_hex(12)
"""It stands inside the spelling of a control token in a client's text, so that the token is no token of the prompt."""

CUT_TOKENS = 16
"""Tokens that a cut between two pieces may add."""

OWN_FORMS = ("xml", "json", "pairs")
"""The forms of calls that `AnswerReader` reads without a parser of mlx-lm, which misreads some of them."""

OTHER_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Marks of reasoning that mlx-lm does not look for, or only among the added tokens."""


class Tokenizer:
    """The tokenizer and chat template of a checkpoint. Safe to call from several threads."""

    def __init__(
        self,
        wrapper: TokenizerWrapper,
        eos_ids: frozenset[int] = frozenset(),
        call_forms: Mapping[str, CallForm] = Family.call_forms,
    ) -> None:
        self._wrapper = wrapper
        self.backend: tokenizers.Tokenizer = wrapper.backend_tokenizer
        self.max_tokens: int | None = None
        """Longer texts are refused before most of them is encoded."""
        self._bytes, self.trims_first_blank = byte_table(self.backend)
        added = self.backend.get_added_tokens_decoder()
        self._added_ids = {entry.content: token for token, entry in added.items()}
        self._parser = getattr(wrapper.tool_parser, "__module__", "").rpartition(".")[2]
        self._read_form = call_forms.get(self._parser)
        code = inspect.getmodule(wrapper._chat_template)  # mlx-lm has DeepSeek V3.2's template in Python
        template = inspect.getsource(code) if code else wrapper.chat_template
        self.template = TemplateForm(template, "kimi" if self._parser == "kimi_k2" else "")
        """The variables and forms that the chat template reads."""
        self._channels = {*ENDS, MESSAGE} <= self._added_ids.keys() and MESSAGE in self.template.source
        self._syntax = self._find_syntax()
        self._think = self._find_reasoning()
        ends = (self._added_ids[mark] for mark in MESSAGE_ENDS[1:]) if self._channels else ()
        self.eos_ids = eos_ids | frozenset(wrapper.eos_token_ids).union(ends)
        special = frozenset(token for token, entry in added.items() if entry.special)
        tags = [*PAIR_TAGS, *((self._syntax.start, self._syntax.end) if self._syntax else ())]
        markers = {*(wrapper.tool_call_start_tokens or ()), *(wrapper.tool_call_end_tokens or ())}
        markers |= {token for mark in self._think for token in self._ids_of(mark)}
        self.control_ids = special.difference(markers, (self._added_ids.get(tag) for tag in tags))
        """The control tokens, which add no text to an answer, except those in `shown_ids`."""
        shown = {*INNER_MARKS, *((*ENDS, MESSAGE, "<|constrain|>") if self._channels else ())}
        self.shown_ids = self.control_ids & {token for text, token in self._added_ids.items() if text in shown}
        """Control tokens that the reader of answers needs: marks inside calls, and those of channels."""
        # Without their last character, which a template may add to a name.
        controls = [json.dumps(added[token].content[:-1])[1:-1] for token in special]
        self._controls = _any_of(controls)
        self._added = _any_of(self._added_ids)
        self.template.probe(lambda messages, tools: str(self._apply_template(messages, tools, {}, answer=False)))

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        eos_ids: Iterable[int] = (),
        call_forms: Mapping[str, CallForm] = Family.call_forms,
    ) -> Tokenizer:
        """Read the tokenizer of the folder `checkpoint`, with its `eos_ids` added. Raises CheckpointError.

        `call_forms` has the form of tool calls by mlx-lm's parser of tools.
        """
        if not (checkpoint / "tokenizer.json").is_file():  # mlx-lm would load an empty tokenizer
            usual = checkpoint / "tokenizer_config.json"
            if usual.is_file() and "auto_map" in read_json_object(usual):
                raise CheckpointError(
                    f"{checkpoint}: the tokenizer is custom code (auto_map), which is not run. Use a conversion with a "
                    "tokenizer.json.",
                    public="the checkpoint's tokenizer is custom code, which is not run",
                )
            raise CheckpointError(
                f"{checkpoint}: tokenizer.json not found. Copy it from the checkpoint's source.",
                public="the checkpoint has no tokenizer.json",
            )
        try:
            options = {"local_files_only": True, "trust_remote_code": False}
            wrapper = load_tokenizer(checkpoint, options | separate_template(checkpoint))
        except Exception as error:
            raise CheckpointError(
                f"{checkpoint}: the tokenizer does not load: {error}. Copy tokenizer.json and "
                "tokenizer_config.json from the checkpoint's source.",
                public="the checkpoint's tokenizer does not load",
            ) from error
        try:
            return cls(wrapper, frozenset(eos_ids), call_forms)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint / 'tokenizer.json'}: {error}", public=error.public) from error

    # ---- text to tokens

    @property
    def vocab_size(self) -> int:
        """The highest token id with a text, plus one. The model's output may be wider, because it is padded."""
        return len(self._bytes)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of `text`, with the tokens the checkpoint adds around every text (for Qwen, none)."""
        return tuple(self._encode(text, add_special_tokens=True).ids)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encode `text`. Raises RequestError for a text that is too long or that the backend cannot read."""
        try:
            if self.max_tokens is not None and len(text) > PIECE_CHARACTERS:
                self._check_length(text, self.max_tokens)
            return self._encode_text(text, add_special_tokens=add_special_tokens)
        except RequestError:
            raise
        except BaseException as error:
            # A lone surrogate raises TypeError. A panic of the Rust library is no Exception.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise RequestError("text: not readable. Send valid Unicode.") from error
            raise

    def _encode_text(self, text: str, *, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """Encode `text`. The backend lets other threads run during a batch, but not during a single text."""
        if len(text) <= SHORT_CHARACTERS:
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _check_length(self, text: str, limit: int) -> None:
        """Raise ContextLengthError once the first pieces exceed `limit` tokens, with an estimate for all."""
        tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = self._encode_text(text[start : start + PIECE_CHARACTERS]).ids
            tokens += max(0, len(piece) - CUT_TOKENS)
            if tokens > limit:
                prompt = tokens * len(text) // min(len(text), start + PIECE_CHARACTERS)
                problem = f"the prompt: about {prompt} tokens exceed the model's context length"
                raise ContextLengthError(f"{problem} of {limit} tokens. Shorten it.", prompt, limit, param="prompt")

    def control_id(self, text: str) -> int | None:
        """Return the id of the control token spelled `text`, such as `<|im_end|>`, or None for other text."""
        token = self.backend.token_to_id(text)
        return token if token in self.control_ids else None

    def chat_prompt(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = False,
        places: Mapping[str, str] | None = None,
    ) -> ChatPrompt:
        """Render a chat up to the answer, which with `continue_final` continues the last message.

        Control tokens that the messages, tools or variables spell are ordinary text. `places` are texts that stand for
        others, which may have control tokens.
        Raises RequestError if the template rejects the messages, ignores tools, or does not use a given variable.
        """
        messages, tools, kwargs = self._guarded(
            [list(messages), list(tools), dict(template_kwargs or {})], places or {}
        )
        self._check_template(kwargs, bool(tools))
        if continue_final:
            kwargs["continue_final_message"] = True
        prompt = self._render(messages, tools, kwargs, answer=not continue_final)
        kwargs.pop("continue_final_message", None)
        before = messages[:-1] if continue_final else messages
        history = self._render(before, tools, kwargs, answer=False) if before else ""
        thinking, reasons = False, not any(kwargs.get(name) is False for name in self.template.switches)
        if self._think:
            # Only the text the template adds for the answer counts: a message may contain the markers.
            opening, (start, end) = prompt.removeprefix(history), self._think
            # DeepSeek V3.2's template opens reasoning behind a tool's result even without an answer.
            thinking = opening.rfind(start) > opening.rfind(end) or prompt.endswith(start)
            reasons = thinking or (reasons and end not in opening)
        tokens, turn = self._tokens_of(prompt, history)
        return ChatPrompt(
            tokens,
            thinking,
            turn=turn,
            continued=self._continued(tools, kwargs, thinking=thinking),
            reasons=reasons,
        )

    def _guarded(self, content: list[Any], places: Mapping[str, str]) -> list[Any]:
        """Return `content`, an array of JSON, with GUARD in each control token, and then with `places` replaced."""
        text = json.dumps(content)
        guarded = self._controls.sub(lambda found: f"{found[0][0]}{GUARD}{found[0][1:]}", text)
        for place, stands_for in places.items():
            guarded = guarded.replace(place, json.dumps(stands_for)[1:-1])
        return content if guarded == text else list(json.loads(guarded))

    def _tokens_of(self, prompt: str, history: str) -> tuple[tuple[int, ...], int]:
        """Return the tokens of a rendered prompt, and how many of them are those of `history`, its beginning.

        A token that spans the end of the history is not shared. 0: the template adds no opening.
        """
        begins = prompt.startswith(history)
        if GUARD not in prompt:
            encoded = self._encode(prompt, add_special_tokens=False)
            return tuple(encoded.ids), (encoded.char_to_token(len(history)) or 0) if begins else 0
        tokens = self._encode_guarded(prompt)
        known = self._encode_guarded(history) if begins else []
        pairs = enumerate(zip(tokens, known, strict=False))
        return tuple(tokens), next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(known)))

    def _encode_guarded(self, prompt: str) -> list[int]:
        """Encode a prompt in which GUARD makes spellings of control tokens ordinary text."""
        tokens: list[int] = []
        place = 0
        for found in (*self._added.finditer(prompt), None):
            text = prompt[place : found.start() if found else len(prompt)]
            if GUARD in text:
                tokens += self._encode_ordinary(text.replace(GUARD, ""))
            else:
                tokens += self._encode(text, add_special_tokens=False).ids
            if found:
                tokens.append(self._added_ids[found[0]])
                place = found.end()
        return tokens

    def _encode_ordinary(self, text: str) -> list[int]:
        """Encode `text` without added tokens, as the backend encodes the text between them."""
        normalizer, split = self.backend.normalizer, self.backend.pre_tokenizer
        normal = text if normalizer is None else normalizer.normalize_str(text)
        pieces = [(normal, None)] if split is None else split.pre_tokenize_str(normal)
        return [token.id for piece, _ in pieces for token in self.backend.model.tokenize(piece)]

    def _continued(self, tools: Sequence[Json], kwargs: Json, *, thinking: bool) -> bool:
        """Return whether the template renders a past answer as the prompt and the model wrote it.

        The check renders a short chat. Qwen's template omits reasoning from past turns, with the marker that opens
        each answer. It keeps them between a tool call and the answer to the tool's result.
        """
        question: Json = {"role": "user", "content": "question"}
        answer: Json = {"role": "assistant", "content": "answer"}
        reply = question
        if thinking:
            answer["reasoning_content"] = "thought"
        if tools:
            call = {"name": "name", "arguments": {}}
            answer["tool_calls"] = [{"id": "0", "type": "function", "function": call}]
            reply = {"role": "tool", "tool_call_id": "0", "content": "result"}
        try:
            before = self._render([question], tools, kwargs, answer=True)
            after = self._render([question, answer, reply], tools, kwargs, answer=False)
        except RequestError:  # the template requires something else, such as a system message
            return True
        return after.startswith(before)

    def _check_template(self, kwargs: Json, tools: bool) -> None:
        if not self._wrapper.has_chat_template:
            raise RequestError("This model has no chat template. Use /v1/completions.")
        if tools and not self.has_tools:
            reads = self.template.source and self.template.uses("tools")
            cause = "the form of this model's calls is unknown" if reads else "this model's chat template ignores them"
            raise RequestError(f"tools: {cause}. Omit the field.", param="tools")
        for name in kwargs:
            if name in _RESERVED_VARIABLES or not self.template.uses(name):
                raise RequestError(
                    f"chat_template_kwargs.{name} has no effect on this model's chat template. Omit it.",
                    param="chat_template_kwargs",
                )

    def _render(self, messages: Sequence[Json], tools: Sequence[Json], kwargs: Json, *, answer: bool) -> str:
        try:
            return str(self._apply_template(self.template.messages(messages), tools, kwargs, answer=answer))
        except jinja2.TemplateError as error:
            raise RequestError(f"messages: rejected by the model's chat template: {error}", param="messages") from error
        except Exception as error:
            raise RequestError(
                f"messages: the model's chat template cannot render them ({type(error).__name__})",
                param="messages",
            ) from error

    def _apply_template(self, messages: Sequence[Json], tools: Sequence[Json], kwargs: Json, *, answer: bool) -> Any:
        if self._think and not self._wrapper.has_thinking:
            kwargs = {"enable_thinking": True, **kwargs}  # mlx-lm switches reasoning off that it does not know
        return self._wrapper.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=answer, **kwargs
        )

    def _find_syntax(self) -> CallSyntax | None:
        """Return the marks and the parser of calls: mlx-lm's, or that of a form that mlx-lm has no parser for."""
        wrapper = self._wrapper
        if wrapper.has_tool_calling:
            return CallSyntax(wrapper.tool_call_start, wrapper.tool_call_end, published(wrapper.tool_parser))
        return syntax_in(self.template.source)

    def _find_reasoning(self) -> tuple[str, str] | tuple[()]:
        """Return the marks of reasoning: mlx-lm's, or others that the chat template or the vocabulary has."""
        if self._wrapper.has_thinking:
            return self._wrapper.think_start, self._wrapper.think_end
        for marks in OTHER_REASONING:
            if all(mark in self._added_ids or mark in self.template.source for mark in marks):
                return marks
        return ()

    def _ids_of(self, mark: str) -> tuple[int, ...]:
        """Return the tokens of a mark of reasoning."""
        own = self._added_ids.get(mark)
        return (own,) if own is not None else tuple(self.backend.encode(mark, add_special_tokens=False).ids)

    @property
    def reasoning_end_id(self) -> int | None:
        """The token that closes reasoning, or None for a model without reasoning or with a longer marker."""
        tokens = self._ids_of(self.marks.think_end) if self.marks.think_end else ()
        return tokens[0] if len(tokens) == 1 else None

    @property
    def reasoning_start(self) -> tuple[int, ...]:
        """The token that opens reasoning, and those that models write before it: blanks, or a mark of a channel."""
        if self._channels:
            return (*self.backend.encode("analysis", add_special_tokens=False).ids[:1], self._added_ids[CHANNEL])
        blanks = [self.encode(blank) for blank in ("\n", "\n\n", " ", "  ")]
        return (*self._ids_of(self.marks.think)[:1], *(tokens[0] for tokens in blanks if len(tokens) == 1))

    # ---- tokens to text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of `token`, control tokens included; empty for an id beyond the vocabulary."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def text_bytes(self, token: int) -> bytes:
        """Return the bytes `token` adds to the text. Control tokens add none; markers of reasoning and calls do."""
        hidden = token in self.control_ids and token not in self.shown_ids
        return b"" if hidden else self.token_bytes(token)

    # ---- markup in answers, with the markers that mlx-lm finds

    @property
    def marks(self) -> Marks:
        """The marks of reasoning and calls, as far as the model has them."""
        if self._channels:
            return Marks(channels=True, think_end=MESSAGE_ENDS[0])
        found = Marks(*self._think)
        if self.has_tools and self._syntax:
            parse = None if self._read_form in OWN_FORMS else self._syntax.parse
            start, end, pairs = self._syntax.start, self._syntax.end, self._read_form == "pairs"
            found = replace(found, call=start, call_end=end, pairs=pairs, parse=parse)
        return found

    @property
    def reasoning_end(self) -> str:
        """The text that closes reasoning, up to its mark; empty for a model without reasoning."""
        end = self.marks.think_end
        return f"\n{end}" if end and not self._channels and self.call_form != "pairs" else end

    @property
    def has_tools(self) -> bool:
        """True if the chat template supports tools, in a form that is known."""
        return (self._channels or self._syntax is not None) and self.template.uses("tools")

    @property
    def call_form(self) -> CallForm | JsonForm | None:
        """The format of the model's tool calls, if a grammar can force it."""
        if not self.has_tools or self._read_form:
            return self._read_form if self.has_tools else None
        form = json_form(self._parser, self.tool_markers[0], self.template.source)
        return CHANNEL_CALL if self._channels else form

    @property
    def controls(self) -> dict[str, int]:
        """The control tokens by their spelling."""
        return {text: token for text, token in self._added_ids.items() if token in self.control_ids}

    @property
    def tool_markers(self) -> tuple[str, str]:
        """The start and end marker of a tool call; the end marker may be empty."""
        return (self._syntax.start, self._syntax.end) if self._syntax else ("", "")


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of any of `spellings`, the longest first."""
    longest_first = sorted({s for s in spellings if len(s) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of generation_config.json with the same meaning in SamplingParams."""


@dataclass(frozen=True)
class ModelInfo:
    """The served model.

    `context_length` is the maximum number of tokens of prompt and answer together. Requests name the model by `id`
    or by one of `aliases`, which the user chose, or as mlx-lm's clients by `default_model`. `defaults` apply to
    sampling fields that a request omits. `fingerprint` identifies the checkpoint by its content. `family` is its
    `model_type`, and `quantization` a short text, or empty. `nbytes` is the size of its weights.
    """

    id: str
    context_length: int
    defaults: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = ""
    family: str = ""
    quantization: str = ""
    nbytes: int = 0

    def answers_to(self, name: str) -> bool:
        """Return whether `name` means this model."""
        return name in (*self.listed_names, "default_model")

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The id and the aliases, each once."""
        return tuple(dict.fromkeys((self.id, *self.aliases)))


def generation_defaults(checkpoint: Path) -> SamplingParams:
    """Return the sampling of generation_config.json, or temperature 1, as vLLM does. Raises CheckpointError."""
    path = checkpoint / "generation_config.json"
    config = read_json_object(path) if path.exists() else {}
    chosen: Json = {"temperature": 1.0}
    chosen |= {name: config[name] for name in _RECOMMENDED if config.get(name) is not None}
    if config.get("do_sample") is False:
        chosen["temperature"] = 0.0
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from error


def pack_vocabulary(tokenizer: Tokenizer) -> bytes:
    """Return the packed vocabulary for the last stage.

    It is empty without end tokens, which formats require, and for a tokenizer that is no BPE.
    """
    if not tokenizer.eos_ids or not isinstance(tokenizer.backend.model, tokenizers.models.BPE):
        return b""
    tokens = map(tokenizer.token_bytes, range(tokenizer.vocab_size))
    return Vocabulary.of_backend(tokenizer.backend, tokens, tokenizer.control_ids, tokenizer.eos_ids).pack()
