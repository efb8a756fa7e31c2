"""What records of an evaluation say: pass@k and mean rewards with confidence intervals, and how episodes ended."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Z95 = 1.959963984540054
OUTCOMES = ("scored", "policy_limit", "agent_error", "infra")


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class EvalSummary:
    """The summary of one set. Rewards of failed episodes count as 0, except infra, which is left out.

    pass_at: by k; a reward of 1 passes. parts: means of the parts of rewards.
    """

    name: str
    tasks: int
    samples: int
    reward: Estimate
    pass_at: Mapping[int, Estimate]
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    turns: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    outcomes: Mapping[str, int] = field(default_factory=dict[str, int])

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self)


def summarize(name: str, records: Sequence[Mapping[str, Any]]) -> EvalSummary:
    """Summarize the records of one set; they may be of any number of tasks and samples.

    >>> rows = [{"task": t, "reward": r, "outcome": "scored"} for t, r in ((0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0))]
    >>> summary = summarize("x", rows)
    >>> summary.pass_at[1].value, summary.pass_at[2].value
    (0.75, 1.0)
    """
    by_task: defaultdict[int, list[float]] = defaultdict(list)
    for record in records:
        if record["outcome"] != "infra":
            by_task[record["task"]].append(0.0 if record["reward"] is None else float(record["reward"]))
    rewards = [*by_task.values()]
    most = min(map(len, rewards), default=0)
    ks = sorted({1, *(2**i for i in range(most.bit_length()) if 2**i <= most), most} - {0}) if most else []
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        for key, value in (record.get("parts") or {}).items():
            if isinstance(value, bool | int | float):
                parts[key].append(float(value))
    counts = Counter(record["outcome"] for record in records)
    return EvalSummary(
        name,
        len({record["task"] for record in records}),
        len(records),
        mean_interval([sum(each) / len(each) for each in rewards]),
        {k: pass_interval([pass_at_k(each, k) for each in rewards]) for k in ks},
        {key: sum(values) / len(values) for key, values in parts.items()},
        *(_mean(records, key) for key in ("turns", "tokens", "seconds")),
        outcomes={name: counts[name] for name in OUTCOMES if counts[name]},
    )


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the chance that k of these samples contain a pass, without bias (arXiv:2107.03374 eq. 1)."""
    wrong = sum(reward < 1.0 for reward in rewards)
    return 1.0 - math.comb(wrong, k) / math.comb(len(rewards), k)


def mean_interval(values: Sequence[float]) -> Estimate:
    """Return mean and normal interval over tasks; nan without values, no width with one."""
    if not values:
        return Estimate(math.nan, math.nan, math.nan)
    mean = sum(values) / len(values)
    width = Z95 * _error(values, mean)
    return Estimate(mean, mean - width, mean + width)


def pass_interval(values: Sequence[float]) -> Estimate:
    """Return mean and Wilson interval of chances in [0, 1], one for each task.

    The interval has as many trials as would give the variance between tasks, so it is narrower than that of one sample
    per task where more were drawn, and has a width where all tasks pass or fail.

    >>> estimate = pass_interval([1.0] * 10)
    >>> round(estimate.low, 2), round(estimate.high, 2)
    (0.72, 1.0)
    """
    if not values:
        return Estimate(math.nan, math.nan, math.nan)
    mean = sum(values) / len(values)
    variance = _error(values, mean) ** 2
    trials = mean * (1 - mean) / variance if variance > 0 else float(len(values))
    trials = max(trials, float(len(values)))
    return wilson(mean, trials)


def wilson(mean: float, trials: float) -> Estimate:
    """Return the Wilson interval of a share in [0, 1] that was measured in this many trials."""
    middle = (mean + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    width = Z95 / (1 + Z95**2 / trials) * math.sqrt(mean * (1 - mean) / trials + Z95**2 / (4 * trials**2))
    return Estimate(mean, max(0.0, middle - width), min(1.0, middle + width))


def _error(values: Sequence[float], mean: float) -> float:
    if len(values) < 2:
        return 0.0
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [float(record[key]) for record in records if record.get(key) is not None]
    return sum(values) / len(values) if values else 0.0


def table(summaries: Sequence[EvalSummary]) -> str:
    """Return the summaries as a table of text."""
    ks = sorted({k for summary in summaries for k in summary.pass_at})
    head = [
        "set",
        "tasks",
        "samples",
        "reward (95 %)",
        *(f"pass@{k} (95 %)" for k in ks),
        "turns",
        "tokens",
        "s",
        "ended",
    ]
    rows = [head]
    for s in summaries:
        ended = ", ".join(f"{count} {name}" for name, count in s.outcomes.items())
        passes = [_shown(s.pass_at[k]) if k in s.pass_at else "" for k in ks]
        numbers = [f"{s.turns:.1f}", f"{s.tokens:.0f}", f"{s.seconds:.1f}"]
        rows.append([s.name, str(s.tasks), str(s.samples), _shown(s.reward), *passes, *numbers, ended])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    parts = [f"{s.name}: {name} {value:.3f}" for s in summaries for name, value in sorted(s.parts.items())]
    return "\n".join([*lines, *(["", "parts of the reward:", *parts] if parts else [])])


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.3f}-{estimate.high:.3f})"
