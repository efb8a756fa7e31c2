"""The rows of the results page: their commands, and what they need."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from furlong.config.command_line import examine
from furlong.errors import ConfigError
from furlong.reproduce.published import comparison, read_published
from furlong.reproduce.rows import (
    NEEDS,
    ResultRow,
    Settings,
    find_row,
    merge_flags,
    missing_needs,
    prepare_commands,
    read_rows,
    seed_commands,
    shown_command,
)
from furlong.reproduce.run_row import summarize_seeds

ROOT = Path(__file__).parents[3]
GROUPS, ROWS = read_rows()
NOT_WRITTEN_YET = ("no such directory", "no file")  # what the commands before it write


def settings(tmp_path: Path, **more: object) -> Settings:
    return Settings(seeds=(1, 2), out=tmp_path / "row", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.nightly
def test_every_command_of_furlong_has_flags_that_exist_and_fit_each_other(row: ResultRow, tmp_path: Path):
    chosen = settings(tmp_path, model=tmp_path, trl_python=Path("python"))
    for words in [*prepare_commands(row, chosen), *seed_commands(row, chosen, 1).values()]:
        assert not any("$" in word for word in words)
        if words[1:4] == ["-m", "furlong", "train"]:
            _, problems = examine(words[4:])
            assert [text for text in map(str, problems) if not any(mark in text for mark in NOT_WRITTEN_YET)] == []


def test_every_row_names_a_group_and_known_needs():
    assert {row.group for row in ROWS.values()} == set(GROUPS)
    assert {need for row in ROWS.values() for need in row.needs} <= set(NEEDS)
    assert all(group.baseline in ROWS for group in GROUPS.values() if group.baseline)


def test_flags_of_a_row_replace_those_of_its_task(tmp_path: Path):
    words = seed_commands(find_row("sft-then-grpo"), settings(tmp_path), 2)["run"]
    assert words.count("--hf-checkpoint") == 1
    assert words[words.index("--hf-checkpoint") + 1].endswith("hf_20")
    assert words[words.index("--seed") + 1] == "2"


def test_flags_without_a_name_are_refused():
    with pytest.raises(ValueError, match="3e-4"):
        merge_flags("3e-4 --lr")


def test_seeds_differ_in_nothing_but_seed_and_folder(tmp_path: Path):
    one, two = (
        shown_command(seed_commands(find_row("grpo"), settings(tmp_path), seed)["run"]).replace(f"seed-{seed}", "")
        for seed in (1, 2)
    )
    assert one.replace("seed 1", "seed 2") == two
    assert one.startswith("furlong train ")


def test_an_unknown_row_is_refused_with_a_similar_name():
    with pytest.raises(ConfigError, match="dr-grpo"):
        find_row("drgrpo")


def test_a_row_without_what_it_needs_says_so(tmp_path: Path):
    assert missing_needs(find_row("smollm2-grpo"), settings(tmp_path, model=tmp_path)) == []
    assert missing_needs(find_row("smollm2-grpo"), settings(tmp_path)) == [NEEDS["model"]]


def figures(seed: int, before: list[int], after: list[int]) -> dict[str, object]:
    return {
        "seed": seed,
        "date": f"2026-01-0{seed}",
        "machine": {"cpu": "x"},
        "before": before,
        "after": after,
        "wall_s": 9.5,
        "step_s": 7.0,
        "tokens": 100,
        "curves": {"eval/held_out": [[0, 0.2], [4, 0.5]]},
    }


def test_the_model_may_be_a_name_on_the_hub(tmp_path: Path):
    words = [sys.executable, "-m", "furlong", "reproduce", "smollm2-grpo", "--model", "no/such", "--out", str(tmp_path)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--model no/such: no such local path, HF_HUB_OFFLINE is set" in done.stderr


def test_status_follows_from_the_intervals():
    for right, status in [(90, "higher"), (22, "flat"), (2, "lower")]:
        before, after = [1] * 20 + [0] * 80, [1] * right + [0] * (100 - right)
        summary = summarize_seeds([figures(1, before, after), figures(2, before, after)])
        assert summary["status"] == status
        assert summary["date"] == "2026-01-02"
        assert summary["after_by_seed"] == [right / 100, right / 100]
        assert set(summary["curves"]["eval/held_out"]) == {"1", "2"}


def published(right: int) -> dict[str, object]:
    return {"steps": 4, **summarize_seeds([figures(1, [0] * 100, [1] * right + [0] * (100 - right))])}


def test_a_result_agrees_if_the_intervals_overlap():
    for right, agrees in [(60, True), (65, True), (90, False), (20, False)]:
        assert comparison(published(right), published(60)).agrees is agrees


def test_other_budgets_and_missing_results_are_not_compared():
    assert comparison({**published(60), "steps": 8}, published(60)).agrees is None
    assert comparison(published(60), None).agrees is None
    assert comparison({"status": "failed", "reason": "x"}, published(60)).agrees is None


def make_results() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "scripts" / "make_results.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_results_page_is_up_to_date():
    page = (ROOT / "docs" / "results.md").read_text()
    assert page == make_results().render(read_published()), "run: python scripts/make_results.py"
    assert all(f"`{name}`" in page for name in ROWS)


def test_rows_without_results_are_named_below_the_table():
    page = make_results().render({})
    assert "| `gsm-grpo` |" not in page
    assert "Rows without a published result, which run the same way: `gsm-grpo`, `gsm-dr-grpo`" in page


def test_accuracy_by_time_is_the_mean_of_the_seeds():
    curves = {
        "furlong": {"1": {"0": [0.2, 0.0], "8": [0.4, 3.0]}, "2": {"0": [0.2, 0.0], "8": [0.8, 5.0]}},
        "trl": {"1": {"0": [0.1, 0.0], "8": [0.5, 8.0]}, "2": {"0": [0.3, 0.0], "8": [0.5, 10.0]}},
    }
    script = make_results()
    lines = script.one_gpu_section("somewhere", curves)
    assert "| 0 | 20.0% | 0.0 | 20.0% (10.0% to 30.0%) | 0.0 |" in lines
    assert "| 8 | 60.0% (40.0% to 80.0%) | 4.0 | 50.0% | 9.0 |" in lines
    by_step, by_time = script.one_gpu_figure(curves)
    assert by_step.curves["furlong"] == [(0, pytest.approx(0.2)), (8, pytest.approx(0.6))]
    assert by_time.curves["TRL 1.16"] == [(0, pytest.approx(0.2)), (9, pytest.approx(0.5))]


def test_a_failed_row_is_listed_with_its_reason():
    failed = {
        "row": "grpo", "status": "failed", "reason": "exit code 1, see x\nout of memory", "date": "2026-01-01",
        "machine": {"cpu": "x", "cores": 2, "load": 1.0, "python": "3", "torch": "2", "furlong": "0"}, "steps": 4,
    }  # fmt: skip
    assert "failed: out of memory" in make_results().render({"grpo": failed})
