"""Draw one step of a trace as SVG: `draw_trace.py RUN/trace.json --step 2 > docs/guides/trace.svg`.

The SVG has one row per process and kind of work. Requests and rewards are drawn as areas. docs/guides/profiling.md
shows the result. To explore a trace interactively, open it in ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Span = tuple[float, float, str]

WIDTH, LEFT, ROW = 1000, 150, 26
COLOURS = {
    "wait for rollout": "#d8dee4", "train": "#b6d7f2", "update weights": "#f7d9a8", "save": "#e2d3f0",
    "rollout": "#cdeac0", "forward backward": "#5aa0d8", "optimizer step": "#2f6fa8", "broadcast bucket": "#e0a030",
    "read bucket": "#c07d10", "engine busy": "#6fb35c",
}  # fmt: skip


def main() -> None:
    """Read a trace and print the SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--step", type=int, default=2, help="weight update at the end of the interval to draw")
    args = parser.parse_args()
    events: list[Event] = json.loads(args.trace.read_text())["traceEvents"]
    for event in events:
        if event["name"] == "publish weights":  # the name in traces of older versions
            event["name"] = "update weights"
    spans = _flights(events) + [(e, e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    updates = {e["args"]["version"]: (a, b) for e, a, b in spans if e["name"] == "update weights"}
    start, end = updates[args.step - 1][0], updates[args.step][1]
    print(_picture(spans, start, end, _processes(events)))


def _processes(events: Sequence[Event]) -> dict[int, str]:
    """Return the process names by id, in trace order."""
    return {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}


def _flights(events: Sequence[Event]) -> list[tuple[Event, float, float]]:
    """Pair the begin and end events of overlapping (async) spans."""
    begun = {(e["cat"], e["id"]): e for e in events if e["ph"] == "b"}
    return [(begun[e["cat"], e["id"]], begun[e["cat"], e["id"]]["ts"], e["ts"]) for e in events if e["ph"] == "e"]


def _picture(spans: Sequence[tuple[Event, float, float]], start: float, end: float, processes: dict[int, str]) -> str:
    def named(*names: str, pid: int | None = None) -> list[Span]:
        return [
            (a, b, e["name"])
            for e, a, b in spans
            if e["name"] in names and b > start and a < end and (pid is None or e["pid"] == pid)
        ]

    rows: list[tuple[str, list[Span], bool]] = [
        ("loop", named("wait for rollout", "train", "update weights", "save"), False)
    ]
    trains = [pid for pid in processes if named("forward backward", pid=pid)]
    for pid in trains:
        of = f" {processes[pid].rpartition(' ')[2]}" if len(trains) > 1 else ""
        rows.append((f"trainer{of}", named("forward backward", "optimizer step", pid=pid), False))
        rows.append((f"weights{of}", named("read bucket", "broadcast bucket", pid=pid), False))
    rows += [
        ("rollouts", named("rollout"), False),
        ("requests", named("generate"), True),
        ("rewards", named("reward"), True),
    ]
    rows += [(name, named("engine busy", pid=pid), False) for pid, name in processes.items() if "engine" in name]
    scale = (WIDTH - LEFT - 10) / (end - start)
    height = ROW * len(rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    ]
    for i, (title, row, is_area) in enumerate(rows):
        top = i * ROW + 4
        parts.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(title)}</text>')
        clipped = [(max(a, start), min(b, end), name) for a, b, name in row]
        at = [((a - start) * scale + LEFT, (b - start) * scale + LEFT, name) for a, b, name in clipped]
        parts += _area(at, top) if is_area else _bars(at, top)
    parts += _axis(end - start, scale, height)
    return "\n".join([*parts, "</svg>"])


def _bars(row: Sequence[Span], top: float) -> list[str]:
    parts: list[str] = []
    for a, b, name in row:
        colour = COLOURS[name]
        parts.append(f'<rect x="{a:.1f}" y="{top}" width="{max(b - a, 0.6):.1f}" height="{ROW - 6}" fill="{colour}"/>')
        if b - a > 7 * len(name):
            parts.append(f'<text x="{a + 4:.1f}" y="{top + 14}">{escape(name)}</text>')
    return parts


def _area(row: Sequence[Span], top: float) -> list[str]:
    """Draw the number of open spans over time, with the maximum as a label."""
    changes = sorted([(a, 1) for a, _, _ in row] + [(b, -1) for _, b, _ in row])
    most = count = 0
    for _, change in changes:
        count += change
        most = max(most, count)
    if not most:
        return []
    bottom, points, count = top + ROW - 6, [f"{LEFT},{top + ROW - 6}"], 0
    for x, change in changes:
        before, count = count, count + change
        points += [f"{x:.1f},{bottom - (ROW - 6) * n / most:.1f}" for n in (before, count)]
    points.append(f"{changes[-1][0]:.1f},{bottom}")
    shape = f'<polygon points="{" ".join(points)}" fill="#9ccf8d"/>'
    return [shape, f'<text x="{LEFT - 8}" y="{top + 25}" text-anchor="end" font-size="9">at most {most}</text>']


def _axis(duration: float, scale: float, height: float) -> list[str]:
    """Draw the time axis with ticks in milliseconds."""
    step = next(s for s in (10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if duration / 1e3 / s <= 12)
    parts: list[str] = []
    for number in range(int(duration / 1e3 // step) + 1):
        x = LEFT + number * step * 1e3 * scale
        parts.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - 22}" stroke="#00000022"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle">{number * step} ms</text>')
    return parts


if __name__ == "__main__":
    main()
