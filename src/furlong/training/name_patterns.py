"""Regular expressions over parameter names, as `--only-train-params-name-list` and `--freeze-params-name-list` take."""

from __future__ import annotations

import re
from collections.abc import Sequence

from furlong.errors import ConfigError

ONLY, FREEZE = "--only-train-params-name-list", "--freeze-params-name-list"


def matching(names: Sequence[str], patterns: Sequence[str], flag: str) -> set[str]:
    """Return those of `names` in which one of the expressions is found.

    Raises ConfigError for an expression that does not compile or is found nowhere.
    """
    found: set[str] = set()
    for pattern in patterns:
        try:
            matches = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise ConfigError(f"{flag}: {pattern!r} is no regular expression: {error}") from error
        if not matches:
            raise ConfigError(f"{flag}: {pattern!r} matches no parameter; names look like {', '.join(names[:3])}")
        found |= matches
    return found
