"""Installed packages, and the API key of the engine servers from the environment."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

SESSIONS_KEY_VARIABLE = "FURLONG_SESSIONS_KEY"  # that applications send to take sessions
API_KEY_VARIABLE = "FURLONG_API_KEY"  # passed in the environment: other users can read command lines with `ps`

_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)


def api_key_environment(key: str | None) -> dict[str, str]:
    """Return the environment variables that pass the API key to a child process."""
    return {API_KEY_VARIABLE: key} if key else {}


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None.

    Faster than `importlib.metadata.version`, which parses the whole metadata, including the package's readme.

    >>> installed_version("no-such-package")
    """
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return None
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    match = _VERSION.search(text)
    return match[1] if match else None
