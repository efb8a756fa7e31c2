"""Which version of a package is installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)


def installed_version(name: str) -> str | None:
    """The version of a distribution by its name on the index; None where it is not installed.

    Of its metadata only the first lines are looked at: `importlib.metadata.version` parses the package's whole readme.

    >>> installed_version("no-such-package")
    """
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    text = found.read_text("METADATA") or found.read_text("PKG-INFO") or ""
    match = _VERSION.search(text)
    return match[1] if match else None
