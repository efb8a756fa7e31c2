"""Changes that user code in another process makes to its copy of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furlong.core.sample import Sample, Status

_OUTCOME_FIELDS = ("reward", "outcome")  # returned by themselves


def changed_fields(sample: Sample, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that differ from those of `before`, which `Sample.to_dict` made."""
    after = sample.to_dict()
    return {name: value for name, value in after.items() if value != before.get(name) and name not in _OUTCOME_FIELDS}


def apply_changes(sample: Sample, changes: Mapping[str, Any]) -> None:
    """Apply the result of `changed_fields` to the sample in the driver."""
    for name, value in changes.items():
        if name == "attributes":  # of user code, by name
            vars(sample).update(value)
            continue
        setattr(sample, name, Status(value) if name == "status" else value)
