"""Curves of runs as an SVG picture, drawn without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[int, float]]

WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 220, 64, 16, 34, 28
LEGEND_LINE = 20
DIGIT = 8  # width of a digit, rounded up
COLORS = ("#00796b", "#c2410c", "#1d4ed8", "#a21caf", "#4d7c0f", "#be123c", "#0e7490", "#6d28d9")
TEXT, GRID = "#3d4650", "#d5dae0"  # readable on white


@dataclass(frozen=True)
class Panel:
    """One metric: its name, and the points (step, value) of each run, empty for runs without it."""

    metric: str
    curves: Mapping[str, Points]


def svg_of(panels: Sequence[Panel]) -> str:
    """Draw panels below each other, with a legend if there are several runs. Names are escaped."""
    runs = list(dict.fromkeys(run for panel in panels for run in panel.curves))
    legend = LEGEND_LINE * len(runs) if len(runs) > 1 else 0
    height = PANEL_HEIGHT * len(panels) + legend
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for i, panel in enumerate(panels):
        parts += _panel(panel, runs, PANEL_HEIGHT * i)
    for i, run in enumerate(runs if legend else ()):
        y = PANEL_HEIGHT * len(panels) + LEGEND_LINE * i + 12
        parts.append(f'<rect x="{LEFT}" y="{y - 9}" width="14" height="4" fill="{COLORS[i % len(COLORS)]}"/>')
        parts.append(f'<text x="{LEFT + 22}" y="{y - 3}" fill="{TEXT}">{escape(run)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, runs: Sequence[str], top: int) -> list[str]:
    points = [point for curve in panel.curves.values() for point in curve]
    steps, values = [step for step, _ in points], [value for _, value in points]
    x_ticks = ticks(min(steps, default=0), max(steps, default=1), is_whole=True)
    y_ticks = ticks(min(values, default=0.0), max(values, default=1.0))
    low, high = min(y_ticks[0], *values, math.inf), max(y_ticks[-1], *values, -math.inf)
    first, last = min(steps, default=0), max(max(steps, default=1), min(steps, default=0) + 1)

    def x(step: float) -> float:
        return round(LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(top + PANEL_HEIGHT - BOTTOM - (value - low) / (high - low) * (PANEL_HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<text x="{LEFT}" y="{top + 20}" font-weight="600" fill="{TEXT}">{escape(panel.metric)}</text>']
    for tick in y_ticks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4}" text-anchor="end" fill="{TEXT}">{tick:.6g}</text>')
    for tick in x_ticks:
        if first <= tick <= last:
            bottom, label = top + PANEL_HEIGHT - 10, f"{tick:.0f}"
            middle = min(x(tick), WIDTH - DIGIT * len(label) / 2)  # inside of the picture
            parts.append(f'<text x="{middle}" y="{bottom}" text-anchor="middle" fill="{TEXT}">{label}</text>')
    for i, run in enumerate(runs):
        curve = panel.curves.get(run, ())
        color = COLORS[i % len(COLORS)]
        if len(curve) == 1:
            parts.append(f'<circle cx="{x(curve[0][0])}" cy="{y(curve[0][1])}" r="3" fill="{color}"/>')
        elif curve:
            line = " ".join(f"{x(step)},{y(value)}" for step, value in curve)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.8"/>')
    return parts


def ticks(low: float, high: float, *, is_whole: bool = False) -> list[float]:
    """Return about five round numbers that cover [low, high]; whole ones for steps.

    >>> ticks(0.03, 0.97)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if low == high:
        low, high = (low - 1, high + 1) if low == 0 or is_whole else (low - abs(low) / 2, high + abs(high) / 2)
    raw = (high - low) / 5
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw * 0.999)
    step = max(step, 1.0) if is_whole else step
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(start, end + 1)]
