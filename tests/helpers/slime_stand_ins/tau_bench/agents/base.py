"""Stand-in of tau-bench's agents."""

from __future__ import annotations


class Agent:
    pass
