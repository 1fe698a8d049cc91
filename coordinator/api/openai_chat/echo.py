"""Log-probabilities of a prompt, for `echo` with `logprobs`: the model generates the prompt again, forced by a grammar.

Each answer starts from the prompt's first token. The grammar allows exactly the other tokens of the prompt and then
any text. The log-probabilities are the model's own, before the grammar. Drafts are forced as well and thus accepted.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from coordinator.api.answer.choice import Choice
from coordinator.api.request.context import Api
from coordinator.text.output_format import OutputFormat
from proto.errors import RequestError


async def with_scored_prompt(api: Api, choice: Choice, *, generate: bool) -> Choice:
    """Return the choice that first generates the rest of its prompt, and then its answer if `generate` is True.

    Raises RequestError for a prompt of one token, or one with an end token.
    """
    prompt = choice.request.prompt
    if len(prompt) < 2 or api.tokenizer.eos_ids & set(prompt):
        raise RequestError(
            "prompt: echo with logprobs requires at least two tokens and no end token.",
            param="prompt",
        )
    forced = len(prompt) - 1
    request = replace(
        choice.request,
        prompt=prompt[:1],
        max_tokens=forced + (choice.request.max_tokens if generate else 0),
        params=replace(choice.request.params, grammar=await _grammar(api, prompt[1:])),
    )
    return Choice(choice.index, request, api.tokenizer, (), echoed_tokens=forced)


async def _grammar(api: Api, tokens: tuple[int, ...]) -> bytes:
    forced = " ".join(f"<[{token}]>" for token in tokens)
    output = OutputFormat(
        "lark", f"start: {forced} <[0-{api.tokenizer.vocab_size - 1}]>*", "prompt"
    )
    return await asyncio.to_thread(api.compiler.compile, output)
