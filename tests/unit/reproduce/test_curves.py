"""Curves of runs: what is drawn, and the numbers of their axes."""

from xml.etree import ElementTree

from furlong.core.text import sparkline
from furlong.tracking.curves import WIDTH, Panel, svg_of, ticks


def test_curves_of_several_runs_are_drawn_with_whole_steps_inside_of_the_picture():
    panels = [Panel("reward", {"a<b>": [(1, 0.5), (2_000_000, 0.25)], "b": [(1, 0.25)]}), Panel("x", {"b": []})]
    root = ElementTree.fromstring(svg_of(panels))
    kinds = [element.tag.rpartition("}")[2] for element in root]
    assert (kinds.count("polyline"), kinds.count("circle")) == (1, 1)
    assert "a<b>" in [element.text for element in root]
    [last] = [element for element in root if element.text == "2000000"]
    assert last.get("text-anchor") == "middle"
    assert float(last.get("x")) + 4 * len(last.text) <= WIDTH


def test_ticks_cover_the_range_with_a_few_numbers():
    for low, high in ((0.0, 0.0), (-3.0, -3.0), (1e-9, 2e-9), (0, 1e7), (-0.31, 0.29), (5, 5)):
        values = ticks(low, high)
        assert values[0] <= low <= high <= values[-1]
        assert 2 <= len(values) <= 8
        assert values == sorted(set(values))


def test_a_sparkline_has_one_character_for_each_part():
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline(range(100), 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(range(1000))) == 24
