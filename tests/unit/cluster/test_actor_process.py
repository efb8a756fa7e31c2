"""Errors of a rank on the driver: furlong's own class, once, with the remote traceback below."""

from __future__ import annotations

import pickle
import traceback

import numpy as np
import pytest

from furlong.cluster.actor_process import Failure
from furlong.errors import CheckpointError, ConfigError, SyncError, TrainerError
from furlong.training.backend_interface import NotFiniteLossError


def failure_of(error: Exception) -> Failure:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001
        return Failure.of(caught)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CheckpointError("no such folder"), CheckpointError),
        (ConfigError("wrong flag"), ConfigError),
        (NotFiniteLossError("loss nan", rows=np.array([1])), TrainerError),
        (ValueError("wrong value"), TrainerError),
    ],
)
def test_an_error_of_furlong_keeps_its_class_and_others_become_trainer_errors(error, expected):
    raised = failure_of(error).error("trainer rank 1, process 7 on vm")
    assert type(raised) is expected
    assert "on trainer rank 1, process 7 on vm" in str(raised)
    assert str(error) in str(raised)


def test_a_timeout_or_failure_of_a_weight_update_crosses_processes():
    late = {"version": 3, "seconds": 60.0, "bucket": 2, "group": "g", "missing": ["http://a:1"]}
    broken = {"http://a:2": "the server closed the connection without an answer"}
    passed = pickle.loads(pickle.dumps(failure_of(SyncError("bucket 2 was not received", late=late, broken=broken))))
    error = passed.error("trainer rank 0")
    assert isinstance(error, SyncError)
    assert (error.late, error.broken) == (late, broken)


def test_the_remote_traceback_is_shown_once():
    shown = "".join(traceback.format_exception(failure_of(ValueError("wrong value")).error("rank 1")))
    assert shown.count("in failure_of") == 1
    assert shown.count("Traceback (most recent call last)") == 1
    assert "ValueError: wrong value" in shown
