"""Assertions on the results of runs on several ranks."""

from __future__ import annotations

import numpy as np
import pytest

from furlong.core.metric import Metric, merge


def _merged(ranks, rollout):
    parts = [{k: Metric(*v) for k, v in rank["metrics"][rollout].items()} for rank in ranks]
    return {name: metric.value for name, metric in merge(parts).items()}


def assert_equal_runs(got, want, *, rel=2e-5, abs=2e-6):
    for rollout in range(len(want[0]["metrics"])):
        metrics, expected = _merged(got, rollout), _merged(want, rollout)
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=rel, abs=abs), (rollout, name)
    for rank in got:
        assert list(rank["weights"]) == list(want[0]["weights"])
        for name, values in want[0]["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], values, rtol=rel, atol=abs, err_msg=name)
