"""Results of the replans that users asked for, as `mtp-coord replan` shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ReplanLog:
    """Number of replans answered so far, and the result of the last one."""

    answered: int = 0
    result: str = ""
    pending: bool = False

    def request(self) -> None:
        """Note that a user asked for a replan. Requests before the result count as one."""
        self.pending = True

    def record(self, result: str) -> None:
        """Store the result of the pending replan, if there is one."""
        if self.pending:
            self.pending = False
            self.answered += 1
            self.result = result
