"""The key that engine servers want, in the environment of a process: `ps` shows commands to others, and not that."""

from __future__ import annotations

KEY_VARIABLE = "FURLONG_API_KEY"


def key_environment(key: str | None) -> dict[str, str]:
    """The variables of a process that is to find the key there."""
    return {KEY_VARIABLE: key} if key else {}
