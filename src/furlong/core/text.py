"""Text for messages: shortened lists and suggestions for misspelled names."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
import secrets
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal


def abbreviate(values: Sequence[object], count: int = 8, *, separator: str = ", ") -> str:
    """Join the first `count` values and add the number of the others.

    >>> abbreviate(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = len(values) - count
    return separator.join(map(str, values[:count])) + (f" and {more} more" if more > 0 else "")


# User name and password before a host: after a scheme or `//`, whose slashes JSON may escape, and before a port. A
# password with a slash is one where a port must be a number.
_USER_INFO = re.compile(
    r"""((?:\b[A-Za-z][A-Za-z0-9+.-]*:)?(?:\\?/){2})"""
    r"""(?:[^\s/@"'<>?#\\]+(?:@[^\s/@"'<>?#\\]+)*|[^\s/@:"'<>]*:(?!\d+(?:[/?#\s"']|$))[^\s@"'<>]*)@"""
)
_BARE_USER_INFO = re.compile(
    r"""(?<![\w/@.:*-])[\w.%+~-]+:[^\s/@"'<>,]+@(?=(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}\b)"""
)
_SECRET_PARAMETER = re.compile(
    r"""([?&;#][\w.-]*(?:key|token|secret|pass|pwd|\bpw|auth|credential|signature|\bsig|jwt|\bcode|session|bearer)"""
    r"""[\w.-]*=)[^\s&"'<>#]+""",
    re.IGNORECASE,
)


_RANDOM_KEY = re.compile(r"\b([sce]k-)[0-9a-f]{48}\b")


def random_key(kind: Literal["sk", "ck", "ek"]) -> str:
    """Return a new key: of a session (sk), of the controller of one (ck), or of engines (ek)."""
    return f"{kind}-{secrets.token_hex(24)}"


def redact_credentials(text: str) -> str:
    """Replace user name and password, and values of secret query parameters, in the URLs of a text by `***`.

    Random keys of sessions, applications and engines are replaced everywhere.

    >>> redact_credentials("POST http://me:pass@host/score?api_key=abc&n=2: HTTP 500")
    'POST http://***@host/score?api_key=***&n=2: HTTP 500'
    """
    if "k-" in text:
        text = _RANDOM_KEY.sub(r"\1***", text)
    if "@" in text:
        text = _BARE_USER_INFO.sub("***@", _USER_INFO.sub(r"\1***@", text))
    return _SECRET_PARAMETER.sub(r"\1***", text) if "://" in text or ":\\/" in text else text


BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw a curve in one line of at most `width` characters, each the mean of a part of the values.

    >>> sparkline([0, 1, 2, 3])
    '▁▃▆█'
    """
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    if low == high:
        return BLOCKS[3] * count
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)


def did_you_mean(name: str, known: Iterable[str]) -> tuple[list[str], str]:
    """Return up to three of `known` that resemble `name`, best first, and a phrase that suggests them ("" if none do).

    >>> did_you_mean("--rollout-batchsize", ["--rollout-batch-size", "--lr"])
    (['--rollout-batch-size'], 'did you mean --rollout-batch-size?')
    """
    matches = difflib.get_close_matches(name, list(known), n=3, cutoff=0.75)
    best = _similarity(name, matches[0]) if matches else 0.0
    matches = [match for match in matches if _similarity(name, match) > best - 0.08]
    return matches, f"did you mean {' or '.join(matches)}?" if matches else ""


def nearest_path(path: Path) -> str:
    """Return a fix for a path that does not exist: the entry of its folder with the nearest name, if there is one."""
    try:
        names = os.listdir(path.parent)
    except OSError:
        return f"there is no folder {path.parent}; check the path"
    matches, _ = did_you_mean(path.name, names)
    return f"did you mean {' or '.join(str(path.parent / name) for name in matches)}?" if matches else "check the path"


def _similarity(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 2, 4, 4, 80, 80


def shortened(value: object) -> str:
    """Return the text of a value for a message, with at most a few entries and characters of it."""
    return _SHORT.repr(value)
