"""Numbers in values that user functions return, converted to arrays or refused with the value."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from furlong.core.text import shortened
from furlong.errors import DataError

MAX_ID = (1 << 31) - 1  # tokens are int32


def returned_numbers(value: Any, count: int | None, what: str) -> NDArray[np.float64]:
    """Return `count` numbers, or any number of them for None. Raises DataError that starts with `what`."""
    expected = "numbers" if count is None else f"{count} numbers"
    try:
        array = np.asarray(value)
        if array.dtype.kind == "O":  # None is not a number, and 10**400 does not fit
            array = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DataError(f"{what} is {shortened(value)}; expected {expected} ({str(error)[:200]})") from error
    if array.ndim != 1 or (array.dtype.kind not in "biuf" and array.size):
        raise DataError(f"{what} is {shortened(value)}; expected {expected}")
    if count is not None and len(array) != count:
        raise DataError(f"{what} has {len(array)} values; expected {expected}")
    return array.astype(np.float64)


def returned_integers(
    value: Any, count: int | None, what: str, *, least: int = 0, most: int = 1 << 53
) -> NDArray[np.int64]:
    """Return integers from `least` to `most`, as `returned_numbers`."""
    array = returned_numbers(value, count, what)
    wrong = array[~((array >= least) & (array <= most) & (array == np.floor(array)))]
    if wrong.size:
        raise DataError(f"{what} contains {wrong[0]:g}; expected integers from {least} to {most}")
    return array.astype(np.int64)


def returned_rows(value: Any, count: int, what: str) -> list[Any]:
    """Return a list of `count` rows."""
    try:
        rows = list(value) if hasattr(value, "__len__") and not isinstance(value, str | bytes | dict) else None
    except TypeError:
        rows = None
    if rows is None or len(rows) != count:
        shown = shortened(value) if rows is None else f"a list of {len(rows)}"
        raise DataError(f"{what} is {shown}; expected a list with one entry for each of {count} samples")
    return rows
