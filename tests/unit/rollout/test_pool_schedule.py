"""The pool keeps as many episodes in flight as are wanted, although their durations differ by a factor of 200."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "cpu"


@pytest.mark.parametrize(("bound", "least_in_flight", "least_per_s"), [(4, 20, 16), (5, 27, 22)])
def test_a_pool_keeps_the_wanted_episodes_in_flight_and_cancels_none(monkeypatch, bound, least_in_flight, least_per_s):
    """Time is simulated. Episodes have a third of the benchmark's turns, which take three times as long."""
    monkeypatch.syspath_prepend(FOLDER)
    import agents
    from simulated_time import run_simulated

    monkeypatch.setattr(agents, "MEDIAN_TURNS", 9)
    monkeypatch.setattr(agents, "MAX_TURNS", 67)
    arguments = argparse.Namespace(steps=12, turn_ms=90.0, train_ms=50.0, samples_per_prompt=1)
    row = run_simulated(agents.measure(arguments, ahead=bound, bound=bound))
    assert row.most_in_flight == agents.WANTED
    assert row.in_flight >= least_in_flight
    assert row.episodes_per_s >= least_per_s
    assert row.oldest <= bound
    assert row.num_lost == 0
    assert abs(row.length_bias) < 0.02
