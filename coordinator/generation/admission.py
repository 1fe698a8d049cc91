"""The admission of requests: the check for those that can never be served, and the room for the next one."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.generation.request import GenerationRequest
from coordinator.generation.sequence import Sequence
from coordinator.planning.capacity import Capacity
from proto.errors import CapacityError, RequestError

WAITING_PER_PLACE = 8
"""Requests of one client that may wait for each free place in the queue. One client can take 8 of 9 places.

The other places let a client with few requests be served while another one floods the queue.
"""


def check_request(request: GenerationRequest, context: int, vocab: int, kv_tokens: int) -> None:
    """Raise RequestError, with the field in `param`, for a request that can never be served.

    `context` and `vocab` are the model's limits in tokens, `kv_tokens` is the K/V memory of the cluster in tokens.
    """
    if not request.prompt:
        raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
    if request.max_tokens < 1:
        raise RequestError("max_tokens is at least 1", param="max_tokens")
    if not all(0 <= token < vocab for token in request.prompt):
        raise RequestError(f"a token is outside the vocabulary of {vocab}", param="prompt")
    if any(token >= vocab for token in request.params.logit_bias):
        raise RequestError(
            f"a token of logit_bias is outside the vocabulary of {vocab}", param="logit_bias"
        )
    assert len(request.emitted) < request.max_tokens, "the answer is complete"
    total = len(request.prompt) + request.max_tokens
    field = "prompt" if len(request.prompt) >= min(context, kv_tokens) else "max_tokens"
    if total > context:
        raise RequestError(
            f"prompt of {len(request.prompt)} tokens and max_tokens {request.max_tokens}"
            f" exceed the context of {context} tokens",
            param=field,
        )
    if total > kv_tokens:
        raise RequestError(
            f"{total} tokens exceed the K/V memory of this cluster, {kv_tokens} tokens",
            param=field,
        )


def check_queue(waiting: Collection[Sequence], places: int, client: str, served: int) -> None:
    """Raise CapacityError if the queue has no place for a request of `client`.

    The queue has `places` places, and the plan serves up to `served` sequences at once.
    """
    free = places - len(waiting)
    own = sum(sequence.request.client == client for sequence in waiting)
    if free > 0 and own < WAITING_PER_PLACE * free:
        return
    whose = f"{len(waiting)} requests are" if free <= 0 else f"{own} requests of this client are"
    raise CapacityError(
        f"{whose} waiting already, the queue takes no more",
        retry_after=1.0 + len(waiting) / max(1, served),
    )


def most_waiting(places: int) -> int:
    """Return how many requests of one client an empty queue of `places` places takes."""
    return -(-WAITING_PER_PLACE * places // (WAITING_PER_PLACE + 1))


def fits(room: Capacity, running: Collection[Sequence], *more: Sequence) -> bool:
    """Return whether the sequences `running`, and `more` of them, keep to `room`.

    A sequence whose backup is on its way to the stages does not fit yet.
    """
    if any(sequence.restoring for sequence in more):
        return False
    reserved = sum(sequence.capacity for sequence in (*running, *more))
    return len(running) + len(more) <= room.sequences and reserved <= room.kv_tokens
