"""A problem of a configuration: a message with the id of its diagnosis."""

from __future__ import annotations

MISFIT, NO_EFFECT = "CFG05", "CFG02"


class Problem(str):
    """A message: what is wrong, with the values; after the last semicolon, the fix. `row` is the diagnosis.

    >>> Problem("--ckpt-step -1: expected a number in [0, inf)").row
    'CFG05'
    """

    row: str

    def __new__(cls, message: str, row: str = "") -> Problem:
        """Keep the row of a message that is a Problem already; else a flag without effect is CFG02, the rest CFG05."""
        self = super().__new__(cls, message)
        own = message.row if isinstance(message, Problem) else ""
        self.row = own or row or (NO_EFFECT if "no effect" in message else MISFIT)
        return self
