"""The content of the rows of a run folder's files: which fields readers rely on, and the types of their values.

A row whose fields have other types, or lack a required one, is damaged: readers skip it and report its line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from furlong.catalogue import SEVERITIES

Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_severity(value: Any) -> bool:
    return value in SEVERITIES


def _is_name(value: Any) -> bool:
    return isinstance(value, int | str)


# Event -> field -> check. Fields that end with "?" may be absent or null: older versions did not write them.
FIELDS: Mapping[str, Mapping[str, Check]] = {
    "start": {"version?": _is_text, "process?": _is_count, "machine?": _is_text},
    "failed": {"error": _is_text, "message": _is_text, "code?": _is_text},
    "stopped": {"message": _is_text},
    "diagnosis": {
        "id": _is_text,
        "severity": _is_severity,
        "finding": _is_text,
        "cause": _is_text,
        "remedy": _is_text,
        "evidence": _is_object,
        "step?": _is_count,
    },
    "step": {"step": _is_count, "seconds?": is_number},
    "save": {"step?": _is_count, "folder?": _is_text, "seconds?": is_number},
    "weight_update_started": {"version?": _is_count},
    "weight_update": {"version?": _is_count, "tensors?": _is_count, "bytes?": is_number, "seconds?": is_number},
    "weight_update_timeout": {
        "version?": _is_count,
        "seconds?": is_number,
        "bucket?": _is_name,
        "missing?": _is_list,
        "transport?": _is_text,
    },
    "weights_compared": {"version": _is_count, "tensors": _is_count, "changed": _is_count, "unchanged": _is_texts},
    "ranks_timed": {
        "rollout": _is_count,
        "seconds": is_number,
        "stages": _is_count,
        "layers_s": _is_numbers,
        "per_cost_s": _is_numbers,
        "slowest": _is_count,
        "place": _is_text,
    },
    "engines_connected": {"num": _is_count, "kv_cache_dtypes": _is_texts},
    "engine_lost": {"engine?": _is_name, "url?": _is_text, "reason?": _is_text, "why?": _is_text, "code?": _is_text},
    "engine_silent": {
        "url?": _is_text,
        "running?": is_number,
        "asked?": _is_text,
        "seconds?": is_number,
        "health?": _is_text,
    },
    "placement_waiting": {"seconds?": is_number},
    "hang": {
        "seconds?": is_number,
        "doing?": _is_text,
        "probable?": _is_text,
        "report?": _is_text,
        "stops?": _is_bool,
        "last?": _is_object,
        "queues?": _is_object,
        "waits?": _is_texts,
        "requests?": _is_count,
    },
    "no_progress": {"seconds?": is_number, "doing?": _is_text, "probable?": _is_text},
    "blocked": {"seconds?": is_number, "where?": _is_text},
    "worker_died": {"worker?": _is_text, "error?": _is_text, "message?": _is_text},
}


def is_event(row: Mapping[str, Any]) -> bool:
    """Whether an event has the fields that readers rely on. Events of unknown names may have any."""
    if row.get("time") is not None and not is_number(row["time"]):
        return False
    for name, check in FIELDS.get(str(row.get("event")), {}).items():
        value = row.get(name.removesuffix("?"))
        if value is None and name.endswith("?"):
            continue
        if not check(value):
            return False
    return row.get("event") != "ranks_timed" or _has_equal_ranks(row)


def _has_equal_ranks(row: Mapping[str, Any]) -> bool:
    count, stages = len(row["layers_s"]), row["stages"]
    return len(row["per_cost_s"]) == count and stages > 0 and count % stages == 0


def is_step(row: Mapping[str, Any]) -> bool:
    """Whether all values of a row of `metrics.jsonl` are numbers, or null for a metric that was not finite."""
    return all(value is None or is_number(value) for value in row.values())
