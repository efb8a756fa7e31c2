"""The pool keeps as many episodes in flight as are wanted, although their durations differ by a factor of 200."""

from __future__ import annotations

import argparse
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "cpu"


def test_a_pool_keeps_the_wanted_episodes_in_flight_and_cancels_none(monkeypatch):
    """Time is simulated. Episodes have a third of the benchmark's turns, which take three times as long."""
    monkeypatch.syspath_prepend(FOLDER)
    import agents
    from simulated_time import run_simulated

    monkeypatch.setattr(agents, "MEDIAN_TURNS", 9)
    monkeypatch.setattr(agents, "MAX_TURNS", 67)
    arguments = argparse.Namespace(steps=12, turn_ms=90.0, train_ms=50.0, samples_per_prompt=1)
    row = run_simulated(agents.measure(arguments, ahead=5, bound=5))
    assert row.most_in_flight == agents.WANTED
    assert row.in_flight >= 27
    assert row.episodes_per_s >= 22
    assert row.oldest <= 5
    assert row.num_lost == 0
    assert abs(row.length_bias) < 0.02
