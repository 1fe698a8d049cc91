"""The machines that round in the same way. With `--exact` only such machines serve together."""

from __future__ import annotations


class ArithmeticGroup:
    """The arithmetic of a cluster with `--exact`: that of the first machine, for as long as this process runs.

    An answer may outlive a plan, so a later plan must not round differently.
    """

    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._name = ""
        self._arithmetic = ""

    def refusal(self, name: str, arithmetic: str) -> str:
        """Return why the machine `name` cannot take part, or an empty string. The first machine sets the arithmetic."""
        if not self._exact:
            return ""
        if not self._arithmetic:
            self._name, self._arithmetic = name, arithmetic
        if arithmetic == self._arithmetic:
            return ""
        return (
            f"rounds as {arithmetic or 'an unknown machine'}, but {self._name} as {self._arithmetic}. --exact needs "
            "equal machines and versions of mlx. Leave this machine out, or serve without --exact"
        )
