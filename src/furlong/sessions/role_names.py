"""Names of the roles of an episode's agents."""

import re

from furlong.errors import RolloutError

ROLE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_role(name: str) -> None:
    """Raise RolloutError for a name that cannot be part of a URL and of metrics."""
    if not ROLE_NAME.fullmatch(name):
        raise RolloutError(
            f"a role is named {name[:80]!r}; use 1 to 64 letters, digits, '_', '-' and '.': the name is part of URLs "
            "and metrics"
        )
