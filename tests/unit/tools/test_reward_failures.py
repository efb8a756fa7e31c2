"""Failures of reward calls are named by their kind."""

from __future__ import annotations

import pytest

from furlong.tools.reward_test import failure_cause

SANDBOX = "the process of the reward function x.py:reward ended ({}) before it replied"


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (SANDBOX.format("killed by SIGKILL"), "out-of-memory"),
        (SANDBOX.format("killed by SIGSEGV"), "compiled library"),
        (SANDBOX.format("killed by SIGTERM"), "signal"),
        (SANDBOX.format("exit code 3"), "sys.exit"),
        ("SystemExit: 1\n  x.py:2 in reward: sys.exit(1)", "sys.exit"),
        ("ConnectionRefusedError: [Errno 111] Connection refused\n  x.py:2 in reward: f()", "refuses connections"),
        ("ConnectionError: HTTPConnectionPool(host='a', port=1): Max retries exceeded with url: /", "refuses"),
        ("ConnectError: All connection attempts failed", "refuses connections"),
        ("gaierror: [Errno -2] Name or service not known", "does not reach"),
        ("ModuleNotFoundError: No module named 'sympy2'", "not installed"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a.json'", "file"),
    ],
)
def test_a_failure_has_the_cause_of_its_kind(reason: str, word: str) -> None:
    found = failure_cause(reason)
    assert found is not None
    assert word in found[0]


@pytest.mark.parametrize(
    "reason",
    [
        "TypeError: string indices must be integers\n  x.py:2 in reward: raise ConnectionRefusedError",
        "ValueError: no answer",
    ],
)
def test_a_failure_that_the_data_may_have_caused_has_no_cause_of_its_own(reason: str) -> None:
    assert failure_cause(reason) is None
