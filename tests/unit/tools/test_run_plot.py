import json
from xml.etree import ElementTree

import pytest

from furlong.core.text import sparkline
from furlong.errors import ConfigError
from furlong.tools.run_plot import WIDTH, Panel, panels_of, svg_of, ticks


def write_steps(folder, rows):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_reward_and_evaluations_of_several_runs_are_drawn(tmp_path):
    rows = [{"step": i, "rollout/raw_reward": i / 4, "perf/step_time": 1.0} for i in range(1, 5)]
    a = write_steps(tmp_path / "a<b>", [{"step": 0, "eval/x": 0.5}, *rows])
    b = write_steps(tmp_path / "b", rows[:1])
    panels = panels_of([a, b])
    assert [panel.metric for panel in panels] == ["rollout/raw_reward", "eval/x"]
    assert panels[0].curves[str(b)] == [(1, 0.25)]
    root = ElementTree.fromstring(svg_of(panels))
    kinds = [element.tag.rpartition("}")[2] for element in root]
    assert (kinds.count("polyline"), kinds.count("circle")) == (1, 2)
    assert str(a) in [element.text for element in root]


def test_labels_of_many_steps_are_whole_numbers_inside_of_the_picture():
    root = ElementTree.fromstring(svg_of([Panel("train/loss", {"run": [(1, 0.5), (2_000_000, 0.25)]})]))
    [last] = [element for element in root if element.text == "2000000"]
    assert last.get("text-anchor") == "middle"
    assert float(last.get("x")) + 4 * len(last.text) <= WIDTH


def test_an_unknown_metric_and_a_folder_without_steps_are_refused(tmp_path):
    run = write_steps(tmp_path / "run", [{"step": 1, "train/loss": 0.0}])
    with pytest.raises(ConfigError, match="train/loss"):
        panels_of([run], ["train/los"])
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        panels_of([tmp_path / "none"])


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (-3.0, -3.0), (1e-9, 2e-9), (0, 1e7), (-0.31, 0.29), (5, 5)])
def test_ticks_cover_the_range_with_a_few_numbers(low, high):
    values = ticks(low, high)
    assert values[0] <= low <= high <= values[-1]
    assert 2 <= len(values) <= 8
    assert values == sorted(set(values))


def test_a_sparkline_has_one_character_for_each_part():
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline(range(100), 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(range(1000))) == 24
