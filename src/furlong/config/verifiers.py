"""The names of `--rm-type`, which flags, evaluation sets and rows give: known before a verifier is imported."""

from __future__ import annotations

from furlong.config.compat.slime_flags import VALUES
from furlong.core.text import did_you_mean

RM_TYPES = ("math", "dapo", "deepscaler", "f1", "gpqa", "remote_rm", "random")  # rows of `rewards.verifiers.REWARDS`
BOXED = "boxed_"  # before a name: the response is cut down to its last box


def verifier_problem(where: str, name: str) -> str | None:
    """Why there is no verifier `name`, which `where` gives; None if there is.

    >>> verifier_problem("--rm-type", "gqpa").split("; ")
    ['--rm-type gqpa is not known', 'did you mean gpqa?']
    """
    inner = name.removeprefix(BOXED)
    if (why := VALUES.get(("--rm-type", name)) or VALUES.get(("--rm-type", inner))) is not None:
        return why.message(f"{where} {name}")
    if inner in RM_TYPES:
        return None
    _, hint = did_you_mean(name, [*RM_TYPES, *(BOXED + known for known in RM_TYPES)])
    ways = f"use one of {', '.join(RM_TYPES)}, each also as {BOXED}<name>, or --custom-rm-path"
    return f"{where} {name} is not known; {hint or ways}"
