"""The colors of the run page have the contrast that WCAG 2.2 AA asks for, in both themes."""

from __future__ import annotations

import colorsys
import itertools
import math
import re
from importlib import resources

import pytest

CSS = (resources.files("furlong.view") / "static" / "app.css").read_text(encoding="utf-8")
RULES = re.findall(r":root(?:\[data-theme=\"dark\"\])? \{([^}]*)\}", CSS)
THEMES = [dict(re.findall(r"--(\w+): #([0-9a-f]{6})", rule)) for rule in RULES]
TOKENS = [(12, 85, 50, 0.55), (12, 80, 45, 0.45), (170, 80, 45, 0.45)]  # hue, saturation, lightness, alpha in sample.js
Color = tuple[float, ...]


def rgb(text: str) -> Color:
    return tuple(int(text[i : i + 2], 16) / 255 for i in (0, 2, 4))


def luminance(color: Color) -> float:
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Color, other: Color) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_texts_have_a_contrast_of_4_5_and_marks_of_3(theme: dict[str, str]):
    for text in ("text", "muted", "accent", "good", "warn", "bad"):
        for ground in ("page", "surface", "hover"):
            assert contrast(rgb(theme[text]), rgb(theme[ground])) >= 4.5, (text, ground)
    for mark in ("edge", *(f"c{i}" for i in range(8)), *(f"f{i}" for i in range(4))):
        assert contrast(rgb(theme[mark]), rgb(theme["surface"])) >= 3, mark


def oklab(color: Color) -> Color:
    """The color in OKLab, where a distance of 0.02 is just visible (Ottosson, 2020)."""
    red, green, blue = color
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    medium = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


SIGHT = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}  # of linear RGB (Machado et al., 2009, severity 1)


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_the_lines_of_eight_runs_are_told_apart_also_by_the_color_blind(theme: dict[str, str]):
    for sight, rows in SIGHT.items():
        seen: list[Color] = []
        for i in range(8):
            linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb(theme[f"c{i}"])]
            mixed = (sum(a * b for a, b in zip(row, linear, strict=True)) for row in rows)
            seen.append(oklab(tuple(min(max(v, 0.0), 1.0) for v in mixed)))
        assert min(math.dist(a, b) for a, b in itertools.combinations(seen, 2)) > 0.12, sight


@pytest.mark.parametrize("theme", THEMES, ids=["light", "dark"])
def test_tokens_can_be_read_on_the_strongest_color(theme: dict[str, str]):
    surface = rgb(theme["surface"])
    for hue, saturation, lightness, alpha in TOKENS:
        color = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
        ground = tuple(alpha * c + (1 - alpha) * s for c, s in zip(color, surface, strict=True))
        assert contrast(rgb(theme["text"]), ground) >= 4.5, hue


def test_the_dark_theme_is_the_same_by_choice_and_by_the_system():
    assert len(THEMES) == 2
    by_system = re.search(r":not\(\[data-theme=\"light\"\]\) \{([^}]*)\}", CSS)
    assert by_system is not None
    assert by_system[1].split() == RULES[1].split()
