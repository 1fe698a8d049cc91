"""The prompts of a plan: limits, admission, order, chunks and expected times. Plain data."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Self

from coordinator.planning.capacity import Capacity
from coordinator.schedule.request import GenerationRequest
from coordinator.schedule.sequence import Sequence
from mtp.device import FrameLimits
from proto.errors import CapacityError, RequestError
from proto.frame import Frame
from proto.images import FIRST_IMAGE_TOKEN, without_images

PIPELINED_CHUNKS = 8
"""Chunks. Minimum of a prompt with longer ones than the shortest. N stages are then 8 N / (N + 7) times as fast."""

SHORTEST_CHUNK = 64
"""Tokens. Shortest chunk after a GPU gave up longer ones. Shorter chunks read the weights too often."""


@dataclass(frozen=True)
class Limits:
    """The user's limits. `context` and `vocab` come from the model.

    A prompt is cut into chunks of at most `prefill_chunk` tokens; None takes the lengths that suit the plan's machines,
    `frames`. Chunks of several prompts share a frame of up to `step_tokens` tokens.
    """

    context: int
    vocab: int = 2**31
    prefill_chunk: int | None = None
    frames: FrameLimits = field(default_factory=FrameLimits)
    step_tokens: int = 2048

    @property
    def longest_chunk(self) -> int:
        """Maximum chunk length of a long prompt."""
        return self.prefill_chunk or self.frames.longest

    def with_shorter_chunks(self) -> Self | None:
        """Return these limits with chunks of half the length, or None if the chunks are short already."""
        half = self.longest_chunk // 2
        if half < SHORTEST_CHUNK:
            return None
        return replace(self, prefill_chunk=half, step_tokens=max(1, self.step_tokens // 2))

    def chunk_length(self, prompt: int) -> int:
        """Return the maximum chunk length for a prompt of `prompt` tokens.

        A short prompt is cut into PIPELINED_CHUNKS smaller chunks, because two chunks of 512 tokens leave half of the
        stages idle. The length does not depend on the number of stages: some kernels round differently for another
        number of rows, so the answer would depend on the number of stages.
        """
        return min(self.longest_chunk, max(self.frames.shortest, -(-prompt // PIPELINED_CHUNKS)))


WAITING_PER_PLACE = 8
"""Requests of one client that may wait for each free place, so that one that floods the queue leaves every ninth."""


def check_request(request: GenerationRequest, context: int, vocab: int, kv_tokens: int) -> None:
    """Raise RequestError, with the field in `param`, for a request that exceeds the limits, given in tokens."""
    if not request.prompt:
        raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
    if request.max_tokens < 1:
        raise RequestError("max_tokens is at least 1", param="max_tokens")
    words = without_images(request.prompt, 0)
    if min(words) < 0 or max(words) >= vocab:
        raise RequestError(f"a token is outside the vocabulary of {vocab}", param="prompt")
    rows = [] if words is request.prompt else [i for i, t in enumerate(request.prompt) if t >= FIRST_IMAGE_TOKEN]
    if rows != [i for one in request.images for i in range(one.span.start, one.span.end)]:
        raise RequestError("the tokens of an image are not those of its rows", param="prompt")
    if any(token >= vocab for token in request.params.logit_bias):
        raise RequestError(f"a token of logit_bias is outside the vocabulary of {vocab}", param="logit_bias")
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
        raise RequestError(f"{total} tokens exceed the K/V memory of this cluster, {kv_tokens} tokens", param=field)


def check_queue(waiting: Collection[Sequence], places: int, client: str, served: int) -> None:
    """Raise CapacityError if a queue of `places` has none for `client`. The plan serves `served` sequences at once."""
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


SECONDS_BESIDE_STREAMS = 0.25
"""Seconds. Time of the prompt frames between two windows of a running stream, in all stages together.

A reader notices longer gaps. Frames of half the tokens cost prompts of a large model a tenth of their speed.
"""

SECONDS_ALONE = 1.0
"""Seconds. The same while no stream runs, for the chunks after the first of a frame. A short request waits for them."""

SHORTEST_FRAME = 32
"""Tokens. Lower bound, and unit, of a frame's budget. Reading the weights takes most of the time of a shorter frame."""

FIRST_FRAME = 64
"""Tokens. Budget before the first measurement. 512 tokens take several seconds on a slow machine."""

RECENT_FRAMES = 5
"""Frames. The expected time follows their median, so that one slow frame changes nothing."""

OTHER_FRAMES = 3
"""Prompt frames in a row without the oldest prompt. The next one begins with it, so it gets a quarter at least."""

SHORT_PROMPT = 128
"""Tokens. Prompts up to this length count as equally short, and the oldest of them is first."""

TURN_SECONDS = 1.0
"""Seconds. A sequence keeps its place so long before it pauses, so that clients do not only change places."""

RETURN_TURN = 2.0
"""The same after a pause, over the time in which lost tokens were computed again. That takes a third of its turn."""

Running = Mapping[int, Sequence]


class Prompts:
    """The order of prompts, admitted or waiting, the time that they take, and the tokens that fit into a frame.

    Answers that a failure has interrupted come first. Then comes the client with the fewest admitted sequences, of
    those without one the client that had none for the longest time. Among its prompts paused answers come first, then
    the shortest, by powers of two, and the older one of equals.
    """

    def __init__(self) -> None:
        self.other_frames = 0
        """Prompt frames since the oldest prompt was part of one, up to OTHER_FRAMES."""
        self._placed_at: dict[str, float] = {}
        """Seconds. When each client with open requests last got a place."""
        self._seconds_per_token: deque[float] = deque(maxlen=RECENT_FRAMES)
        """Seconds of a prompt token in the slowest stage, for the newest frames of prompts."""

    def record_frame(self, frame: Frame) -> None:
        """Record the time of a returned frame, unless it has windows or is shorter than SHORTEST_FRAME."""
        rows = frame.rows
        if frame.stage_us and rows >= SHORTEST_FRAME and not any(s.open for s in frame.segments):
            self._seconds_per_token.append(max(frame.stage_us) / 1e6 / rows)

    def expected_seconds(self, tokens: int) -> float | None:
        """Return the expected seconds for `tokens` tokens of a prompt; None before the first measurement."""
        return tokens * median_low(self._seconds_per_token) if self._seconds_per_token else None

    def frame_tokens(self, limits: Limits, stages: int, *, streams: bool) -> int:
        """Return the most prompt tokens of a frame. Each stage has one between two windows of the `streams`."""
        pace = self.expected_seconds(stages)
        if pace is None:
            return min(limits.step_tokens, FIRST_FRAME)
        seconds = SECONDS_BESIDE_STREAMS if streams else SECONDS_ALONE
        units = int(seconds / max(1e-9, pace)) // SHORTEST_FRAME
        return min(limits.step_tokens, max(1, units) * SHORTEST_FRAME)

    def next_to_admit(
        self,
        running: Running,
        waiting: Collection[Sequence],
        room: Capacity,
        limits: Limits,
        stages: int,
    ) -> Sequence | None:
        """Return the waiting sequence that has room and joins the next frame, or None. A shorter prompt may pass."""
        if not waiting or len(running) >= room.sequences:
            return None
        streams = any(one.decoding for one in running.values())
        left = self.frame_tokens(limits, stages, streams=streams)
        placed = [*running.values(), *(one for one in waiting if one.is_placed)]
        fits = len(placed) < room.sequences
        for sequence in self._sort_prompts(running, waiting):
            if sequence.seq_id not in running:
                reserved = sum(one.capacity for one in (*placed, sequence))
                if sequence.is_placed or (fits and reserved <= room.kv_tokens):
                    return sequence
                fits = False  # only one that has its room may pass it
                continue
            left -= min(limits.chunk_length(sequence.prefill_tokens), sequence.prompt_left)
            if left <= 0:
                return None
        return None

    def next_to_pause(
        self, running: Running, waiting: Collection[Sequence], room: Capacity, now: float
    ) -> tuple[Sequence, Sequence] | None:
        """Return the sequence that must give up its place, and the waiting one of another client that gets it, or None.

        The client with the most sequences pauses the one that has its place for the longest time. It keeps as many as
        the waiting client has then. Only a client without a sequence takes the last one of another. If K/V memory is
        missing, sequences that have enough of it come first.
        """
        prompts = [one for one in waiting if not one.restoring]
        if not prompts or not running:
            return None
        admitted = _count_clients(running)
        wanted = min(prompts, key=lambda one: self._key(one, admitted))
        placed = [*running.values(), *(one for one in waiting if one.is_placed)]
        missing = max(0, sum(one.capacity for one in (*placed, wanted)) - room.kv_tokens)
        if wanted.is_placed or (len(placed) < room.sequences and not missing):
            return None
        for one in running.values():
            if one.held_tokens < one.paused_tokens:
                one.keeps_place_until = now + max(TURN_SECONDS, RETURN_TURN * (now - one.placed_at))
        own, found = admitted[wanted.request.client], list[Sequence]()
        order = sorted(running.values(), key=lambda one: (max(0, missing - one.capacity), one.keeps_place_until))
        for client, count in admitted.most_common():
            theirs = [one for one in order if one.admitted and one.request.client == client]
            found += theirs[: max(0, count - own - 1, not own)]
        found.sort(key=lambda one: max(0, missing - one.capacity))
        if not found or sum(one.capacity for one in found) < missing or now < found[0].keeps_place_until:
            return None
        return found[0], wanted

    def record_place(self, sequence: Sequence, running: Running, waiting: Collection[Sequence], now: float) -> None:
        """Record that a sequence gets a place. Forget the clients without open requests."""
        clients = {one.request.client for one in (*running.values(), *waiting)}
        self._placed_at = {client: at for client, at in self._placed_at.items() if client in clients}
        self._placed_at[sequence.request.client] = now
        sequence.placed_at, sequence.keeps_place_until = now, now + TURN_SECONDS

    def queue_position(self, running: Running, waiting: Collection[Sequence], request: GenerationRequest) -> int | None:
        """Return the position of `request` in the order of the waiting prompts, from 1 on, or None."""
        order = self.sort_waiting(running, waiting)
        found = (place for place, one in enumerate(order, 1) if one.request is request)
        return next(found, None)

    def sort_waiting(self, running: Running, waiting: Collection[Sequence]) -> list[Sequence]:
        """Return the waiting sequences in their order, without those being restored."""
        return [one for one in self._sort_prompts(running, waiting) if one.seq_id not in running]

    def next_chunks(
        self,
        running: Running,
        waiting: Collection[Sequence],
        limits: Limits,
        stages: int,
        *,
        stormy: bool,
    ) -> list[tuple[Sequence, int]]:
        """Return the admitted sequences of the next frame with prompts, and the maximum length of their chunks.

        After a failure, a frame has one chunk's tokens. The first prompt continues while the others wait, so the next
        failure finds some of them advanced. While no stream runs, chunks are whole. So their lengths are a function of
        the prompts and not of measured times. GPUs round differently for another number of rows.
        """
        if not any(sequence.prefilling for sequence in running.values()):
            return []
        streams = any(one.decoding for one in running.values())
        chunks = list[tuple[Sequence, int]]()
        left = self.frame_tokens(limits, stages, streams=streams)
        prompts = self._sort_prompts(running, waiting)
        for sequence in prompts:
            chunk = limits.chunk_length(sequence.prefill_tokens)
            if stormy:
                left = min(left, chunk)
            if sequence.seq_id not in running or left <= 0:
                continue
            if streams:
                chunk = min(chunk, left)
            elif chunks and min(chunk, sequence.prompt_left) > left:
                break
            chunks.append((sequence, chunk))
            left -= min(chunk, sequence.prompt_left)
        oldest = _find_oldest(prompts, running)
        served = any(sequence is oldest for sequence, _ in chunks)
        self.other_frames = 0 if served else min(OTHER_FRAMES, self.other_frames + 1)
        return chunks

    def _sort_prompts(self, running: Running, waiting: Collection[Sequence]) -> list[Sequence]:
        """Return the prompts in the order in which the next frame takes them."""
        prompts = [sequence for sequence in running.values() if sequence.prefilling]
        prompts += [sequence for sequence in waiting if not sequence.restoring]
        admitted = _count_clients(running)
        prompts.sort(key=lambda sequence: self._key(sequence, admitted))
        if prompts and self.other_frames >= OTHER_FRAMES:
            oldest = _find_oldest(prompts, running)
            prompts.remove(oldest)
            prompts.insert(0, oldest)
        return prompts

    def _key(self, sequence: Sequence, admitted: Counter[str]) -> tuple[bool, int, float, bool, int, int]:
        client, rest = sequence.request.client, max(SHORT_PROMPT, sequence.prompt_left)
        own = admitted[client]
        turn = 0.0 if own else self._placed_at.get(client, -1.0)
        return (not sequence.interrupted, own, turn, not sequence.emitted, (rest - 1).bit_length(), sequence.seq_id)


def _count_clients(running: Running) -> Counter[str]:
    return Counter(sequence.request.client for sequence in running.values())


def _find_oldest(prompts: Collection[Sequence], running: Running) -> Sequence:
    """Return the oldest of `prompts` that is admitted or belongs to the waiting client with the fewest sequences."""
    admitted = _count_clients(running)
    counts = [admitted[one.request.client] for one in prompts if one.seq_id not in running]
    fewest = min(counts, default=0)
    found = (one for one in prompts if one.seq_id in running or admitted[one.request.client] == fewest)
    return min(found, key=lambda sequence: sequence.seq_id)
