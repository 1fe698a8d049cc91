"""The checkpoint's tokenizer: text and chats to tokens, tokens to bytes. Loaded by mlx-lm, without network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.meta
import jinja2.sandbox
import tokenizers
from mlx_lm import tokenizer_utils
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from transformers.convert_slow_tokenizer import bytes_to_unicode

from coordinator.text.model_info import Json, eos_ids
from proto.errors import CheckpointError, RequestError

_OURS = frozenset(
    {"messages", "tools", "add_generation_prompt", "tokenize", "continue_final_message"}
)
"""What chat_template_kwargs may not set: the request has fields for it, or the server decides."""


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat. `thinking`: the template has opened a reasoning block for the answer to begin in.

    `turn` tokens are the chat so far, with which its next turn begins too: the rest opens the answer, as a history
    need not. `continued`: a history may hold opening and answer as they are, so that the next turn goes on from there.
    """

    tokens: tuple[int, ...]
    thinking: bool
    turn: int
    continued: bool


class Tokenizer:
    """Byte-level BPE with a chat template, as every Qwen3.5 checkpoint has it. Safe to call from several threads."""

    def __init__(
        self, wrapper: tokenizer_utils.TokenizerWrapper, eos_ids: frozenset[int] = frozenset()
    ) -> None:
        self._wrapper = wrapper
        self._backend: tokenizers.Tokenizer = wrapper.backend_tokenizer
        self.eos_ids = eos_ids | frozenset(wrapper.eos_token_ids)
        self._bytes = _byte_table(self._backend)
        self._control = _control_ids(self._backend) - _marker_ids(wrapper)
        self._template_names = _template_names(wrapper.chat_template)

    @classmethod
    def load(cls, checkpoint: Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint's folder.

        Raises CheckpointError when it is missing, unreadable or not byte-level BPE.
        """
        if not (checkpoint / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{checkpoint}: no tokenizer.json; copy it from the checkpoint's source",
                public="the checkpoint has no tokenizer.json",
            )
        try:
            wrapper = tokenizer_utils.load(
                checkpoint, {"local_files_only": True, "trust_remote_code": False}
            )
        except Exception as error:
            raise CheckpointError(
                f"{checkpoint}: the tokenizer does not load: {error}",
                public="the checkpoint's tokenizer does not load",
            ) from error
        if not isinstance(wrapper.backend_tokenizer.decoder, tokenizers.decoders.ByteLevel):
            raise CheckpointError(
                f"{checkpoint / 'tokenizer.json'}: its decoder is not ByteLevel, Qwen3.5's is",
                public="the checkpoint's tokenizer is not byte-level BPE",
            )
        return cls(wrapper, eos_ids(checkpoint))

    # ---- to tokens

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a text. A model's output may be wider: padding."""
        return len(self._bytes)

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of plain text, with what the checkpoint puts around every text (for Qwen, nothing)."""
        return tuple(self._backend.encode(text).ids)

    def control_id(self, text: str) -> int | None:
        """The token that is `text` and is never shown, such as `<|im_end|>`; None for other text."""
        token = self._backend.token_to_id(text)
        return token if token in self._control else None

    def chat_prompt(
        self,
        messages: Sequence[Json],
        tools: Sequence[Json] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Render a chat with the checkpoint's template, up to where the answer begins.

        Raises RequestError when the template refuses it, has no place for tools, or does not know a variable.
        """
        kwargs = dict(template_kwargs or {})
        self._check_template(kwargs, bool(tools))
        prompt = self._render(messages, tools, kwargs, answer=True)
        history = self._render(messages, tools, kwargs, answer=False)
        thinking = False
        if self._wrapper.has_thinking:
            # Only what the template adds for the answer counts: a message may speak of the markers.
            opening = prompt.removeprefix(history)
            thinking = opening.rfind(self._wrapper.think_start) > opening.rfind(
                self._wrapper.think_end
            )
        encoded = self._backend.encode(prompt, add_special_tokens=False)
        return ChatPrompt(
            tuple(encoded.ids),
            thinking,
            # A token of both is not shared. None: nothing opens the answer.
            turn=(encoded.char_to_token(len(history)) or 0) if prompt.startswith(history) else 0,
            continued=self._continued(tools, kwargs, thinking=thinking),
        )

    def _continued(self, tools: Sequence[Json], kwargs: Json, *, thinking: bool) -> bool:
        """Whether this template, asked on behalf of a short chat, shows a past answer as the model was led to write it.

        Qwen's leaves reasoning out of past turns, and with it the marker each answer begins with; not between a call
        of a tool and what is said to its result.
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
        except RequestError:  # a template that asks for something else, such as a system message
            return True
        return after.startswith(before)

    def _check_template(self, kwargs: Json, tools: bool) -> None:
        if not self._wrapper.has_chat_template:
            raise RequestError("this model has no chat template: use /v1/completions")
        if tools and not self._wrapper.has_tool_calling:
            raise RequestError("this model's chat template has no tools", param="tools")
        for name in kwargs:
            if name in _OURS or (self._template_names and name not in self._template_names):
                raise RequestError(
                    f"chat_template_kwargs.{name} has no effect on this model's chat template",
                    param="chat_template_kwargs",
                )

    def _render(
        self, messages: Sequence[Json], tools: Sequence[Json], kwargs: Json, *, answer: bool
    ) -> str:
        try:
            text = self._wrapper.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=answer,
                **kwargs,
            )
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error
        except Exception as error:
            raise RequestError(
                f"the model's chat template cannot render the messages ({type(error).__name__})",
                param="messages",
            ) from error
        return str(text)

    # ---- to text

    def token_bytes(self, token: int) -> bytes:
        """The token's own bytes, also of control tokens; none for an id beyond the vocabulary."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def text_bytes(self, token: int) -> bytes:
        """What the token adds to the text: control tokens add nothing, markers of reasoning and tools do."""
        return b"" if token in self._control else self.token_bytes(token)

    # ---- markup in answers, as mlx-lm knows it

    def markup(self, *, tools: bool) -> TextStateMachine:
        """What splits an answer into states: normal, reasoning and, with `tools`, tool."""
        wrapper = self._wrapper
        if tools and wrapper.has_tool_calling:
            machine: TextStateMachine = make_text_state_machine(wrapper)
            return machine
        if not wrapper.has_thinking:
            return TextStateMachine()
        return TextStateMachine(
            {
                "normal": [(wrapper.think_start, "reasoning")],
                "reasoning": [(wrapper.think_end, "normal")],
            }
        )

    @property
    def tool_markers(self) -> tuple[str, str]:
        """What stands around a tool call; the second may be empty."""
        return self._wrapper.tool_call_start or "", self._wrapper.tool_call_end or ""

    def parse_tool_call(self, text: str, tools: Sequence[Json]) -> Any:
        """What mlx-lm's parser for this checkpoint makes of a call's text. May raise anything."""
        return self._wrapper.tool_parser(text, list(tools))


def _byte_table(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Bytes of every id. Ordinary tokens are spelled in GPT-2's byte alphabet, added ones as they are."""
    of_character = {character: byte for byte, character in bytes_to_unicode().items()}
    added = backend.get_added_tokens_decoder()
    table = []
    for token in range(max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1):
        spelling = backend.id_to_token(token) or ""
        if token in added:
            table.append(added[token].content.encode())
        else:
            table.append(bytes(of_character[c] for c in spelling if c in of_character))
    return table


def _control_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    return frozenset(token for token, entry in added.items() if entry.special)


def _marker_ids(wrapper: tokenizer_utils.TokenizerWrapper) -> frozenset[int]:
    parts = (
        wrapper.think_start_tokens,
        wrapper.think_end_tokens,
        wrapper.tool_call_start_tokens,
        wrapper.tool_call_end_tokens,
    )
    return frozenset(token for tokens in parts for token in tokens or ())


def _template_names(template: object) -> frozenset[str]:
    """Variables a chat template looks at; none when they cannot be told."""
    if not isinstance(template, str):
        return frozenset()
    environment = jinja2.sandbox.SandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateSyntaxError:  # tags that only transformers knows
        return frozenset()
