"""Write docs/results.md and its figures from the published results: python scripts/make_results.py [RESULT ...].

Each RESULT is a `result.json` of `furlong reproduce`, which replaces the published result of its row.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from furlong.evals.eval_summary import Estimate
from furlong.reproduce.published import PUBLISHED, gap, read_published
from furlong.reproduce.rows import NEEDS, ResultRow, RowGroup, RowTask, read_rows
from furlong.reproduce.run_row import HELD_OUT, MISMATCH, REWARD
from furlong.tracking.curves import Panel, svg_of

DOCS = Path(__file__).resolve().parent.parent / "docs"
ONE_GPU = DOCS / "results" / "one-gpu.json"  # learning.json of benchmarks/gpu/one_gpu_learning.py, and where it ran
Result = Mapping[str, Any]
Curves = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
"""By side, seed and step: accuracy, and the seconds that all steps until then took."""

SIDES = {"furlong": "furlong", "trl": "TRL 1.16"}
INTRODUCTION = """\
# Results

<!-- Written by scripts/make_results.py from src/furlong/reproduce: rows.yaml and published.json. Change those. -->

Each row is a `furlong train` command, run over several seeds. `furlong reproduce` lists the rows, and runs one:

```bash title="a minute per row on two CPU cores"
furlong reproduce grpo                  # print the commands, run seeds 1 to 3, compare with this page
furlong reproduce grpo --seeds 4 5      # other seeds
furlong reproduce grpo --print-only     # print the commands
```

A row's folder in `outputs/reproduce` contains the runs, `result.json` and `curve.svg`. A row agrees with this page if
the two intervals of the accuracy after training overlap; otherwise the exit code is 1.

- **Accuracy** is the share of held-out problems that are answered correctly at temperature 1, before training and after
  the last step, as the mean over seeds.
- **Intervals** are 95 % Wilson intervals over problems and seeds. Their number of trials gives the variance of the
  mean: the variance between problems divided by their number, plus that between seeds divided by theirs.
- **Result** is `flat` if the intervals before and after overlap, `higher` or `lower` otherwise.
- **Seconds** are those of one run from start to exit, evaluations included; the median over seeds.
- **Tokens** are those of the responses that one run trained on.
"""


def main(arguments: list[str]) -> None:
    """Merge new results into the published ones, and write page and figures."""
    groups, rows = read_rows()
    published = dict(read_published())
    for path in map(Path, arguments):
        result = json.loads(path.read_text())
        kept = {key: value for key, value in result.items() if key != "commands"}  # which contain paths of the machine
        if "reason" in kept:
            kept["reason"] = kept["reason"].splitlines()[-1]
        published[result["row"]] = kept
    published = {name: published[name] for name in rows if name in published}
    lines = ["{", ",\n".join(f" {json.dumps(name)}: {json.dumps(result)}" for name, result in published.items()), "}"]
    PUBLISHED.write_text("\n".join(lines) + "\n")
    (DOCS / "results").mkdir(exist_ok=True)
    for name, group in groups.items():
        if panels := figure(members(name, rows), group, published):
            (DOCS / "results" / f"{name}.svg").write_text(svg_of(panels))
    curves = json.loads(ONE_GPU.read_text())["curves"]
    (DOCS / "results" / "one-gpu.svg").write_text(svg_of(one_gpu_figure(curves)))
    (DOCS / "results.md").write_text(render(published))


def render(published: Mapping[str, Result]) -> str:
    """Return the page."""
    groups, rows = read_rows()
    parts = [INTRODUCTION]
    for name, group in groups.items():
        parts += section(name, group, members(name, rows), published)
    parts += one_gpu_section(**json.loads(ONE_GPU.read_text()))
    tasks = {row.task: None for row in rows.values()}
    return "\n".join([*parts, *(line for task in tasks for line in task_section(task))])


def members(group: str, rows: Mapping[str, ResultRow]) -> list[ResultRow]:
    """Return the rows of a group."""
    return [row for row in rows.values() if row.group == group]


def section(name: str, group: RowGroup, rows: Sequence[ResultRow], published: Mapping[str, Result]) -> list[str]:
    """Return heading, table, conditions and figure of a group."""
    lines = [f"## {group.title}", ""]
    unmeasured = [row.name for row in rows if row.name not in published]
    rows = [row for row in rows if row.name in published]
    for task in dict.fromkeys(row.task for row in rows):
        named = ", ".join(f"`{row.name}`" for row in rows if row.task == task)
        lines += [f"Task of {named}: {task.title}; model: {task.model}; {task.steps} steps.", ""]
    lines += ["| row | method | before | after | per seed | result | seconds | tokens |", "|" + "---|" * 8]
    lines += [table_row(row, published[row.name]) for row in rows]
    lines += ["", *(f"- `{row.name}`: {remark}" for row in rows if (remark := remark_of(row))), ""]
    lines += [*conditions([published[row.name] for row in rows]), ""]
    if unmeasured:
        names = ", ".join(f"`{name}`" for name in unmeasured)
        lines += [f"Rows without a published result, which run the same way: {names}.", ""]
    lines += rivals(rows, group, published)
    if group.text:
        lines += [group.text, ""]
    if figure(rows, group, published):
        is_own = group.baseline in {row.name for row in rows}
        shown = f", with `{group.baseline}`" if group.baseline and not is_own else ""
        lines += [f"![Curves of the rows{shown}: mean over seeds by step](results/{name}.svg)", ""]
    return lines


def table_row(row: ResultRow, result: Result) -> str:
    """Return the line of a row."""
    head = f"| `{row.name}` | {row.method} |"
    if "after" not in result:
        return f"{head} | | | failed: {result['reason'].splitlines()[-1]} | | |"
    seeds = ", ".join(f"{share:.1%}" for share in result["after_by_seed"])
    seconds = f"{statistics.median(result['wall_s']):.0f}"
    tokens = f"{statistics.mean(result['tokens']):,.0f}"
    return (
        f"{head} {accuracy(result['before'])} | {accuracy(result['after'])} | {seeds} | {result['status']} | "
        f"{seconds} | {tokens} |"
    )


def remark_of(row: ResultRow) -> str:
    """Return the flags of a row, its note, and what it needs."""
    flags = f"`{row.flags}`." if row.flags else ""
    needs = f"Needs {' and '.join(NEEDS[need] for need in row.needs)}." if row.needs else ""
    return " ".join(filter(None, (flags, row.note, needs)))


def rivals(rows: Sequence[ResultRow], group: RowGroup, published: Mapping[str, Result]) -> list[str]:
    """Return how rivals compare with the baseline of their group."""
    lines = list[str]()
    for row in rows:
        ours, other = published.get(group.baseline or "", {}), published.get(row.name, {})
        if row.rival is None or "after" not in ours or "after" not in other:
            continue
        points = 100 * (ours["after"]["value"] - other["after"]["value"])
        missed = gap(Estimate(**ours["after"]), Estimate(**other["after"]))
        seconds = [statistics.median(result["step_s"]) for result in (ours, other)]
        tokens = [statistics.mean(result["tokens"]) for result in (ours, other)]
        lines += [
            f"Against `{row.name}`, furlong's `{group.baseline}` has {points:+.1f} points of accuracy "
            f"(the intervals {'overlap' if missed == 0 else 'do not overlap'}) after {tokens[0] / tokens[1]:.2f} times "
            f"the tokens. Its training steps take {seconds[0]:.0f} s in all, those of `{row.name}` {seconds[1]:.0f} s, "
            f"at loads of {ours['machine']['load']:g} and {other['machine']['load']:g} when the rows started.",
            "",
        ]
    return lines


def accuracy(estimate: Mapping[str, float]) -> str:
    """Return an accuracy with its interval."""
    return f"{estimate['value']:.1%} ({estimate['low']:.1%} to {estimate['high']:.1%})"


def conditions(results: Sequence[Result]) -> list[str]:
    """Return when and on what machine results were measured."""
    by_machine: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        machine = result["machine"]
        versions = f"Python {machine['python']}, torch {machine['torch']}, furlong {machine['furlong']}"
        where = [result["date"], *filter(None, [machine.get("gpu")]), machine["cpu"], f"{machine['cores']} cores"]
        by_machine[", ".join([*where, versions])].append(result)
    lines = list[str]()
    for where, measured in by_machine.items():
        loads = [result["machine"]["load"] for result in measured]
        rows = "" if len(by_machine) == 1 else f" ({', '.join(result['row'] for result in measured)})"
        lines.append(f"Measured on {where}; load at the start {min(loads):g} to {max(loads):g}{rows}.")
    return lines


def figure(rows: Sequence[ResultRow], group: RowGroup, published: Mapping[str, Result]) -> list[Panel]:
    """Return the panels of a group: a curve per row, the mean over seeds."""
    names = dict.fromkeys([*([group.baseline] if group.baseline else []), *(row.name for row in rows)])
    has_own = any("curves" in published.get(row.name, {}) for row in rows)
    shown = [name for name in names if has_own and "curves" in published.get(name, {})]
    titles = {HELD_OUT: "held-out accuracy", REWARD: "reward in training (rollout/raw_reward)", MISMATCH: MISMATCH}
    panels: list[Panel] = []
    for metric, title in titles.items():
        curves = {name: mean_curve(published[name]["curves"].get(metric, {})) for name in shown}
        if any(curves.values()) and (metric != MISMATCH or group.shows_mismatch):
            panels.append(Panel(title, curves))
    return panels


def mean_curve(seeds: Mapping[str, Sequence[Sequence[float]]]) -> list[tuple[int, float]]:
    """Return the mean over seeds for each step that all seeds recorded."""
    by_step: defaultdict[int, list[float]] = defaultdict(list)
    for points in seeds.values():
        for step, value in points:
            by_step[int(step)].append(value)
    return [(step, statistics.mean(values)) for step, values in sorted(by_step.items()) if len(values) == len(seeds)]


def one_gpu_section(where: str, curves: Curves) -> list[str]:
    """Return accuracy by step and by time of both sides."""
    lines = [
        "## TRL on one GPU, by time",
        "",
        "`python benchmarks/gpu/one_gpu_learning.py --smollm2 DIR --steps 40 --every 8 --out DIR`: "
        "SmolLM2-135M-Instruct learns sums of two numbers with two digits, 32 problems x 8 samples a step, with no "
        "flags for sizes or engine. Greedy answers to held-out problems; mean of the seeds (lowest to highest), and "
        "the seconds of all steps until then.",
        "",
        f"| step | {' | '.join(f'{SIDES[side]} | seconds' for side in curves)} |",
        "|---" * (1 + 2 * len(curves)) + "|",
    ]
    for step in next(iter(next(iter(curves.values())).values())):
        cells = [step]
        for seeds in curves.values():
            values = [points[step][0] for points in seeds.values()]
            spread = "" if min(values) == max(values) else f" ({min(values):.1%} to {max(values):.1%})"
            cells.append(f"{statistics.mean(values):.1%}{spread}")
            cells.append(f"{statistics.mean(points[step][1] for points in seeds.values()):.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"Measured on {where}.", "", f"![Curves of both sides]({ONE_GPU.parent.name}/one-gpu.svg)", ""]


def one_gpu_figure(curves: Curves) -> list[Panel]:
    """Return mean accuracy by step, and by time."""
    by_step: dict[str, list[tuple[int, float]]] = {}
    by_time: dict[str, list[tuple[int, float]]] = {}
    for side, seeds in curves.items():
        steps = next(iter(seeds.values()))
        means = [
            (step, *map(statistics.mean, zip(*(seeds[seed][step] for seed in seeds), strict=True))) for step in steps
        ]
        by_step[SIDES[side]] = [(int(step), value) for step, value, _ in means]
        by_time[SIDES[side]] = [(round(seconds), value) for _, value, seconds in means]
    return [Panel("held-out accuracy by step", by_step), Panel("held-out accuracy by seconds of steps", by_time)]


def task_section(task: RowTask) -> list[str]:
    """Return the command of a task."""
    return [
        f"## Task: {task.title}",
        "",
        f"Model: {task.model}. Held out: {task.held_out}. `furlong reproduce` fills in the words that begin with `$`:",
        "",
        '```bash title="the flags of all rows of the task"',
        f"furlong train {task.flags}".replace(" --", " \\\n  --"),
        "```",
        "",
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
