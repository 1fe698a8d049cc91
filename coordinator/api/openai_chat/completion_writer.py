"""The format of text completions."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.api.answer.events import AnswerEvent, TextDelta
from coordinator.api.answer.generated_answer import GeneratedAnswer
from coordinator.api.openai_chat.chunk_writer import ChunkWriter
from coordinator.api.openai_chat.logprobs import completion_logprobs, with_first_token
from coordinator.api.openai_chat.schemas import StreamOptions
from coordinator.text.model_info import Json
from coordinator.text.tokenizer import Tokenizer
from proto.frame import TokenLogprob


class CompletionWriter(ChunkWriter):
    """The writer of `POST /v1/completions`. With `echoes`, each choice's text begins with its prompt."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        answer: GeneratedAnswer,
        tokenizer: Tokenizer,
        stream_options: StreamOptions | None = None,
        echoes: Sequence[str] = (),
    ) -> None:
        super().__init__(answer, stream_options)
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._scored: set[int] = set()  # choices whose stream has the first token's entry

    def opening(self) -> bytes:
        """See AnswerWriter."""
        return b"".join(
            self.chunk(self._entry(index, text)) for index, text in enumerate(self._echoes)
        )

    def choice_result(self, index: int) -> Json:
        """See ChunkWriter."""
        choice = self._answer.choices[index]
        text = (self._echoes[index] if self._echoes else "") + "".join(choice.content)
        entry = self._entry(index, text, choice.logprobs, choice.offsets, choice.finish_reason)
        return self._with_first_token(entry)

    def choice_entry(self, event: AnswerEvent) -> Json:
        """See ChunkWriter."""
        if isinstance(event, TextDelta):
            entry = self._entry(event.choice, event.text, event.logprobs, event.offsets)
            return self._with_first_token(entry)
        reason = self._answer.choices[event.choice].finish_reason
        return self._entry(event.choice, "", finish_reason=reason)

    def _with_first_token(self, entry: Json) -> Json:
        """Add the prompt's first token to the first log-probabilities of a choice that scores its prompt."""
        choice = self._answer.choices[entry["index"]]
        if not choice.echoed_tokens or entry["logprobs"] is None or choice.index in self._scored:
            return entry
        self._scored.add(choice.index)
        first = choice.request.prompt[0]
        return {**entry, "logprobs": with_first_token(self._tokenizer, entry["logprobs"], first)}

    def _entry(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob] = (),
        offsets: Sequence[int] = (),
        finish_reason: str | None = None,
    ) -> Json:
        shift = len(self._echoes[index]) if self._echoes else 0
        shifted = [shift + offset for offset in offsets]
        found = completion_logprobs(self._tokenizer, logprobs, shifted) if logprobs else None
        return {
            "index": index,
            "text": text,
            "logprobs": found,
            "finish_reason": finish_reason,
        }
