"""The watch over prompts that change near their start, so that no prefix of them is ever found."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from coordinator.status.cluster_status import ChangingPrompts

log = logging.getLogger(__name__)

SHORTEST = 512
"""Tokens. A shorter prompt is computed in no time."""

EARLY = 0.5
"""Share of a prompt before which a change counts: most of the prompt is computed again."""

SAME = 64
"""Tokens after a change that are the same again, which two different conversations do not have."""

LONGEST = 256
"""Tokens of the longest change that is looked for."""

CLIENTS, KNOWN = 32, 8192
"""Clients whose last prompt is known, and how many of its tokens."""

CONVERSATIONS = 4
"""Prompts of a client that are compared."""

WORDS = 12
"""Tokens of the text that is shown."""


def change_of(before: Sequence[int], now: Sequence[int], length: int) -> int | None:
    """Return the place of a change near the start of a prompt, after which both prompts are the same again, or None.

    Both are beginnings of prompts, the shorter of which has `length` tokens.
    """
    early = min(int(EARLY * length), len(before), len(now))
    if length < SHORTEST or before[:early] == now[:early]:
        return None
    place = next(i for i in range(early) if before[i] != now[i])
    starts = {tuple(now[place + i : place + i + SAME]) for i in range(LONGEST)}
    for i in range(LONGEST):
        same = tuple(before[place + i : place + i + SAME])
        if len(same) == SAME and same in starts:
            return place
    return None


class PromptWatch:
    """The last prompt of each client, and the clients whose prompts change near their start.

    `text_of` returns the text of tokens.
    """

    def __init__(self, text_of: Callable[[Sequence[int]], str]) -> None:
        self._text_of = text_of
        self._last: OrderedDict[str, deque[tuple[int, tuple[int, ...]]]] = OrderedDict()
        self._found: dict[str, ChangingPrompts] = {}
        self._counts: Counter[str] = Counter()

    @property
    def found(self) -> tuple[ChangingPrompts, ...]:
        """The clients whose prompts change, with the newest change of each."""
        return tuple(self._found.values())

    def look(self, client: str, prompt: tuple[int, ...]) -> None:
        """Compare the next prompt of `client` with those before, and log its first change.

        A prompt that goes on one of them is no change: a client may have several conversations.
        """
        length, prompt = len(prompt), prompt[:KNOWN]
        known = self._last.pop(client, deque(maxlen=CONVERSATIONS))
        places = [change_of(tokens, prompt, min(n, length)) for n, tokens in known]
        before, place = (known[-1][1], places[-1]) if known else ((), None)
        self._last[client] = known
        known.append((length, prompt))
        while len(self._last) > CLIENTS:
            gone, _ = self._last.popitem(last=False)
            self._found.pop(gone, None)
            self._counts.pop(gone, None)
        if place is None or None in places:
            return
        self._counts[client] += 1
        first = max(0, place - WORDS // 2)
        texts = (self._text_of(tokens[first : place + WORDS]) for tokens in (before, prompt))
        change = ChangingPrompts(client, self._counts[client], place, *texts)
        if client not in self._found:
            details = {"client": client, "token": place, "before": change.before, "now": change.now}
            log.warning(
                "a client's prompts change near their start: no prefix is found", extra=details
            )
        self._found[client] = change
