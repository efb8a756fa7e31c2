"""The colors of the run page have the contrast that WCAG 2.2 AA asks for, in both themes."""

from __future__ import annotations

import colorsys
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
