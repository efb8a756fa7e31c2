"""Choice of the groups to train on next, such that no token becomes older than a bound."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def choose_groups(ready: Sequence[int], running: Sequence[int], *, oldest: int, size: int) -> list[int] | None:
    """Return the positions in `ready` of the `size` groups to train on next; None to wait for more to complete.

    ready: the oldest weight version in each complete group, in order of completion. running: the same of the groups
    that are not complete; those without a token have the current version. Groups of version `oldest` or earlier must be
    in this batch, those of `oldest` + 1 in this or the next one, and so on. The first complete groups are taken as long
    as the batches until then have room for all others.

    >>> choose_groups([1, 0, 1], [0], oldest=0, size=2) is None  # waits for the running group of version 0
    True
    >>> choose_groups([1, 0, 1], [0], oldest=-1, size=2)
    [0, 1]
    """
    versions = sorted((*ready, *running))
    bounds = sorted({oldest, *(version for version in versions if version > oldest)})
    due = {bound: bisect_right(versions, bound) - (bound - oldest) * size for bound in bounds}
    due = {bound: min(count, size) for bound, count in due.items()}  # more than fit after a resume with other sizes
    chosen: list[int] = []
    for position, version in enumerate(ready):
        if len(chosen) == size:
            break
        room = size - len(chosen) - 1
        if all(count - (version <= bound) <= room for bound, count in due.items()):
            chosen.append(position)
            due = {bound: count - (version <= bound) for bound, count in due.items()}
    return chosen if len(chosen) == size else None
