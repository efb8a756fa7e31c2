"""Where two runs part: flags, hashes of every stage (`--debug-determinism`), metrics (DET01). Reads files only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.core.text import abbreviate
from furlong.tracking.run_files import METRICS, JsonRow, read_flags, read_rows

DIGESTS = "determinism.jsonl"
MEASURED = ("perf/", "diagnosis/")  # times differ from run to run, and so do marks of what monitors make of them
PLACES = frozenset({"output_dir", "run_name", "save", "load", "dump_details", "wandb_group", "replay"})
DIGITS = 8  # of a sample's hash
ROW_KEYS = ("step", "stage", "values")

Key = tuple[int, str, int]


@dataclass(frozen=True)
class Difference:
    """The first value that differs. `samples`: ids of the samples in whose part of a column the runs differ."""

    step: int
    stage: str
    name: str
    a: Any
    b: Any
    at: int | None = None
    samples: list[int] = field(default_factory=list[int])

    def text(self) -> str:
        """One line."""
        where = f"step {self.step}, stage {self.stage}"
        if self.at is not None:
            where += f" of optimizer step {self.at}"
        text = f"{where}: {self.name} is {_shown(self.a)} in the first run, {_shown(self.b)} in the second"
        if self.samples:
            text += f"; in samples {abbreviate(self.samples, 5)}"
        return text


@dataclass(frozen=True)
class MetricDifference:
    """A metric in the first row in which it differs.

    `largest` is its largest relative difference in any row, None where one of the runs lacks a value.
    """

    step: int
    name: str
    a: float | None
    b: float | None
    largest: float | None


@dataclass(frozen=True)
class Comparison:
    """What is different between two runs."""

    flags: dict[str, tuple[Any, Any]]
    difference: Difference | None
    metrics: list[MetricDifference]
    steps: tuple[int, int]
    num_stages: int

    @property
    def is_same(self) -> bool:
        """Whether everything that both runs have is equal."""
        return self.difference is None and not self.metrics and self.steps[0] == self.steps[1]

    def record(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self) | {"is_same": self.is_same}


def compare_runs(a: Path, b: Path, *, rtol: float = 0.0) -> Comparison:
    """Compare two run folders. `rtol`: relative difference of metrics that is no difference.

    Raises ConfigError for a folder that holds no run.
    """
    rows_a, rows_b = (_metrics(folder) for folder in (a, b))
    difference, num_stages = _first_difference(a / DIGESTS, b / DIGESTS)
    return Comparison(
        flags=different_flags(read_flags(a), read_flags(b)),
        difference=difference,
        metrics=_metric_differences(rows_a, rows_b, rtol=rtol),
        steps=(max(rows_a, default=0), max(rows_b, default=0)),
        num_stages=num_stages,
    )


def findings(found: Comparison) -> list[Diagnosis]:
    """DET01, if the runs differ."""
    if found.is_same:
        return []
    evidence = found.record()
    if found.difference is not None:
        return [
            diagnosis("DET01", found.difference.text(), cause=_cause(found), remedy=_remedy(found), evidence=evidence)
        ]
    if not found.metrics:
        what = f"the first run has {found.steps[0]} steps, the second {found.steps[1]}; those that both have are equal"
        return [
            diagnosis(
                "DET01", what, cause="one of them was not finished", severity="warning", remedy="", evidence=evidence
            )
        ]
    first = min(found.metrics, key=lambda m: m.step)
    what = (
        f"step {first.step}: {first.name} is {first.a} in the first run, {first.b} in the second, and "
        f"{len(found.metrics) - 1} other metrics differ there or later"
    )
    remedy = _remedy(found)
    if not found.num_stages:
        remedy = f"run both with --debug-determinism: {DIGESTS} then tells stage and tensor; {remedy}"
    return [diagnosis("DET01", what, cause=_cause(found), remedy=remedy, evidence=evidence)]


def _cause(found: Comparison) -> str:
    if not found.flags:
        return "the flags are equal: what differs is the machine, its libraries, kernels, or the order of events"
    shown = [f"{name} {a} / {b}" for name, (a, b) in found.flags.items()]
    return f"flags that differ: {abbreviate(shown, 6)}"


def _remedy(found: Comparison) -> str:
    if found.flags:
        return "make the flags equal"
    stage = None if found.difference is None else found.difference.stage
    if stage in ("data", "rollout"):
        return "--replay FIRST_RUN follows its order of completion; --deterministic-mode fixes kernels and threads"
    return "--deterministic-mode fixes kernels and the number of threads"


def _first_difference(a: Path, b: Path) -> tuple[Difference | None, int]:
    """The first value that differs in two digest files, and how many stages both have."""
    if not (a.exists() and b.exists()):
        return None, 0
    stages_b = {_key(row): row for row in read_rows(b, *ROW_KEYS)}
    num_stages = 0
    samples: list[int] = []
    for row in read_rows(a, *ROW_KEYS):
        other = stages_b.get(_key(row))
        if other is None:
            continue
        num_stages += 1
        if row["stage"] == "data":
            samples = row["values"]["sample_ids"]
        if (difference := _difference(row, other, samples)) is not None:
            return difference, num_stages
    return None, num_stages


def _difference(row: JsonRow, other: JsonRow, sample_ids: list[int]) -> Difference | None:
    mine: Mapping[str, Any] = row["values"]
    theirs: Mapping[str, Any] = other["values"]
    for name in dict.fromkeys([*mine, *theirs]):
        a, b = mine.get(name), theirs.get(name)
        if _identity(a) == _identity(b):
            continue
        samples = _different_samples(a, b, sample_ids)
        return Difference(row["step"], row["stage"], name, _value(a), _value(b), row.get("at"), samples)
    return None


def _identity(value: Any) -> Any:
    return value["hash"] if isinstance(value, dict) else value


def _value(value: Any) -> Any:
    """A value without its samples' hashes, which are many."""
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if key != "samples"}
    return value


def _different_samples(a: Any, b: Any, ids: list[int]) -> list[int]:
    if not (isinstance(a, dict) and isinstance(b, dict) and "samples" in a and len(a["samples"]) == len(b["samples"])):
        return []
    places = [slice(i * DIGITS, (i + 1) * DIGITS) for i in range(len(ids))]
    return [number for number, at in zip(ids, places, strict=True) if a["samples"][at] != b["samples"][at]]


def _metric_differences(a: Mapping[int, JsonRow], b: Mapping[int, JsonRow], *, rtol: float) -> list[MetricDifference]:
    found: dict[str, MetricDifference] = {}
    for step in sorted(a.keys() & b.keys()):
        for name in dict.fromkeys([*a[step], *b[step]]):
            x, y = a[step].get(name), b[step].get(name)
            if name == "step" or name.startswith(MEASURED) or x == y:
                continue
            size = _relative(x, y)
            if size is not None and size <= rtol:
                continue
            first = found.get(name)
            if first is None:
                found[name] = MetricDifference(step, name, x, y, size)
            elif first.largest is not None and (size is None or size > first.largest):
                found[name] = replace(first, largest=size)
    return sorted(found.values(), key=lambda m: (m.step, m.largest is not None, -(m.largest or 0.0)))


def _relative(x: float | None, y: float | None) -> float | None:
    return None if x is None or y is None else abs(x - y) / max(abs(x), abs(y))


def different_flags(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Flags whose values differ; folders of the runs' own are left out."""
    return {
        f"--{name.replace('_', '-')}": (a.get(name), b.get(name))
        for name in dict.fromkeys([*a, *b])
        if a.get(name) != b.get(name) and name not in PLACES
    }


def replay_differences(recorded: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Flags that differ and because of which a run would not repeat the recorded one: not those that only watch."""
    watching = {spec.field for spec in flag_specs(Config).values() if spec.section in ("track", "debug")}
    watching |= {"num_rollout", "keep_checkpoints", "async_save", "save_hf"}
    if own.get("lr_decay_style") == "constant" and own.get("lr_warmup_fraction") is None:
        watching.add("lr_decay_iters")
    kept = [{name: value for name, value in flags.items() if name not in watching} for flags in (recorded, own)]
    return different_flags(kept[0], kept[1])


def _metrics(folder: Path) -> dict[int, JsonRow]:
    path = folder / METRICS
    return {row["step"]: row for row in read_rows(path, "step")} if path.exists() else {}


def _key(row: JsonRow) -> Key:
    return row["step"], row["stage"], row.get("at", -1)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        norm = f" (norm {value['norm']})" if "norm" in value else ""
        return f"{value['hash']}{norm}"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
