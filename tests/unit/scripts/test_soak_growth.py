"""The soak's measurement finds growth of a process through noise, peaks and restarts."""

from __future__ import annotations

import importlib
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


def run_with(points):
    return SimpleNamespace(sampler=SimpleNamespace(usages=points))


@pytest.fixture
def soak_growth(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("soak_growth")


def usages(module, *, per_step=0.0, every=0, peak=0.0, steps=3700, processes=1, kind="engine", warm=0.0):
    """Usages of processes that grow by `per_step` MB a step and by a descriptor every `every` steps, with noise."""
    rng = random.Random(0)
    return [
        module.Usage(
            kind,
            f"{process}@0",
            step,
            100 + per_step * step + rng.uniform(-0.2, 0.2) + (peak if step % 50 == 0 else 0) + warm * min(step, 3200),
            20 + (step // every if every else 0),
        )
        for process in range(processes)
        for step in range(0, steps, 2)
    ]


def test_a_leak_is_measured_through_noise_and_peaks(soak_growth):
    [row] = soak_growth.growth(usages(soak_growth, per_step=0.003, peak=80.0), warm_up=0)
    assert row.memory_slope == pytest.approx(3.0, abs=0.3)
    assert row.memory_quartiles[0] < row.memory_slope < row.memory_quartiles[1]
    assert [word for word in row.problems if "memory" in word]


def test_no_leak_is_found_in_noise_with_peaks(soak_growth):
    [row] = soak_growth.growth(usages(soak_growth, peak=80.0), warm_up=0)
    assert abs(row.memory_slope) < 0.5
    assert (row.descriptor_slope, row.problems) == (0.0, [])


def test_a_rise_within_the_noise_of_few_steps_is_no_leak(soak_growth):
    rises = [0.0, 30.0, -20.0, 40.0, -30.0, 50.0, 20.0, -10.0, 30.0, 60.0] * 4  # MB, of a driver that does not grow
    points = [
        soak_growth.Usage("driver", "1@0", 100 * i, 510 + rise, 20) for i, rise in enumerate([*rises, 60.0, 70.0])
    ]
    [row] = soak_growth.growth(points, warm_up=0)
    assert (row.memory_slope > soak_growth.MEMORY_LIMIT, row.problems) == (True, [])


def test_a_rise_that_passes_is_no_leak(soak_growth):
    rng = random.Random(0)
    points = [
        soak_growth.Usage("driver", "1@0", step, 357 + 3 * (5900 < step < 6350) + rng.gauss(0, 0.6), 20)
        for step in range(2000, 6500, 3)
    ]
    [row] = soak_growth.growth(points, warm_up=0)
    assert (row.memory_slope > soak_growth.MEMORY_LIMIT, row.problems) == (True, [])


@pytest.mark.parametrize(("per_step", "leaks"), [(0.0, False), (0.002, True)])
def test_allocated_memory_shows_a_leak_of_2_kb_per_step_that_waves_of_resident_memory_hide(
    soak_growth, per_step, leaks
):
    rng = random.Random(0)
    points = [
        soak_growth.Usage("driver", "1@0", step, 515 + rng.gauss(0, 3), 50, 350 + per_step * step + rng.gauss(0, 1.7))
        for step in range(0, 4300, 3)
    ]  # as in a run of half an hour
    [row] = soak_growth.growth(points, warm_up=600)
    assert bool(row.problems) == leaks
    assert row.memory_slope == pytest.approx(1000 * per_step, abs=0.4)


def test_allocated_bytes_count_what_is_kept(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    soak_hooks = importlib.import_module("soak_hooks")
    before = soak_hooks.allocated_bytes()
    kept = [bytes(1000) for _ in range(20_000)]
    assert soak_hooks.allocated_bytes() - before > 1000 * len(kept)


def test_descriptors_that_rise_now_and_then_are_found(soak_growth):
    [row] = soak_growth.growth(usages(soak_growth, every=100), warm_up=0)
    assert row.descriptor_slope == pytest.approx(10, rel=0.4)
    assert [word for word in row.problems if "descriptors" in word]


def test_growth_while_a_process_warms_up_does_not_count(soak_growth):
    def slope(steps, warm_up):
        return soak_growth.growth(usages(soak_growth, warm=0.5, steps=steps), warm_up=warm_up)[0].memory_slope

    assert abs(slope(steps=6900, warm_up=3200)) < 1
    assert slope(steps=3700, warm_up=0) > 100


def test_memory_that_levels_off_is_not_a_leak_and_memory_that_does_not_is(soak_growth):
    def of(rss_mb):
        return [soak_growth.Usage("driver", "1@0", step, rss_mb(step), 20) for step in range(0, 3800, 6)]

    filling = soak_growth.growth(
        of(lambda step: 500 + 40 * (1 - 2.0 ** (-step / 180)) + 4.4 * (step > 1050)), warm_up=0
    )
    assert abs(filling[0].memory_slope) < 0.2
    steps = soak_growth.growth(of(lambda step: 500 + 4.4 * (step // 450)), warm_up=0)  # 10 MB per 1,000 steps
    assert steps[0].memory_slope == pytest.approx(10, rel=0.25)
    assert [word for word in steps[0].problems if "memory" in word]


def test_processes_are_not_compared_with_each_other(soak_growth):
    later = [
        soak_growth.Usage(each.kind, "later", each.step + 400, each.rss_mb + 500, each.descriptors + 50)
        for each in usages(soak_growth)
    ]
    [row] = soak_growth.growth([*usages(soak_growth), *later], warm_up=0)
    assert (abs(row.memory_slope) < 0.5, row.descriptor_slope, row.processes) == (True, 0.0, 2)


def test_a_soak_that_is_too_short_to_judge_growth_says_so_and_does_not_fail(soak_growth, capsys):
    leaks = {"per_step": 0.01, "every": 50, "steps": 1400}
    grown = [each for kind in ("driver", "reward worker") for each in usages(soak_growth, kind=kind, **leaks)]
    assert importlib.import_module("soak").report(run_with(grown), [], warm_up=0) == []
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("driver: ")]
    assert re.search(r"not judged: memory .*1,800.* and descriptors .*750.* --minutes", line)
    assert "not judged | 47 | not judged" in soak_growth.growth_table(soak_growth.growth(grown, warm_up=0))[2]


def test_a_soak_that_is_too_short_for_memory_judges_descriptors(soak_growth, capsys):
    grown = usages(soak_growth, steps=2400, per_step=0.01, every=50, kind="driver")
    [problem] = importlib.import_module("soak").report(run_with(grown), [], warm_up=0)
    assert problem.startswith("driver: descriptors grow by")
    assert "driver: not judged: memory (no process has 1,800 measured steps); use a larger" in capsys.readouterr().out


def test_a_rise_of_descriptors_that_come_and_go_is_no_leak(soak_growth):
    rng = random.Random(1)
    counts = [50 + rng.choice((0, 1, 3, 6)) for _ in range(200)]
    points = [soak_growth.Usage("driver", "1@0", 10 * i, 500, count) for i, count in enumerate(counts)]
    [row] = soak_growth.growth(points, warm_up=0)
    assert (row.descriptor_slope > 1, row.problems) == (True, [])


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("python -m furlong serve --port 1", "engine"),
        ("python -c import ctypes,os python -m furlong serve", "other"),  # before it executes its program
        ("python -m sglang_router.launch_router --port 1", "router"),
        ("python -c import sys; from furlong.rewards.sandbox_worker import main", "reward worker"),
        ("python -c from multiprocessing.resource_tracker import main", "other"),
    ],
)
def test_helper_processes_are_recognized(soak_growth, command, kind):
    assert soak_growth.kind_of(command.split()) == kind
