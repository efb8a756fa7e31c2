"""Fixtures of all tests, which import what takes seconds: a controller of pytest-xdist needs none of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from furlong.cluster.ray_session import LOCAL_SETTINGS, SETTINGS

if TYPE_CHECKING:
    from forked_engines import ForkedEngines
    from forked_ray import RayWorkers

# Ray reads these once, when it is imported, which some test does first.
for _name, _value in {**SETTINGS, **LOCAL_SETTINGS, "RAY_AUTH_TOKEN": "secret" * 8}.items():
    os.environ.setdefault(_name, _value)

# Ctrl-C reaches the runs of tests: what a shell starts in its background ignores it, and so does all that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from runs import write_model

    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    from runs import write_prompts

    return write_prompts(tmp_path_factory.mktemp("data") / "prompts.jsonl")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> ForkedEngines:
    """Start the engine servers of runs as processes that have everything imported."""
    from forked_engines import ForkedEngines

    return ForkedEngines(monkeypatch)


@pytest.fixture
def forked():
    """Start processes that have everything imported. Runs that a failed test has left are ended."""
    from runs import FORKED, Child

    yield FORKED
    while Child.started:
        Child.started.pop().process.kill()


@pytest.fixture(scope="session")
def ray_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayWorkers]:
    """Start the workers of Ray clusters as processes that have everything imported."""
    from forked_ray import forked_workers

    with forked_workers(tmp_path_factory.mktemp("ray")) as workers:
        yield workers


# Files that take longest. Those whose processes compute and those that wait for processes alternate.
LONGEST = (
    "test_cpu_runs.py",
    "test_megatron_families.py",
    "test_ray_processes.py",
    "test_megatron_layouts.py",
    "test_engines.py",
    "test_examples.py",
    "test_ray_megatron.py",
    "test_ranks_agree.py",
    "test_ray.py",
    "test_quantized.py",
    "test_signals.py",
    "test_running.py",
    "test_serve_attacks.py",
    "test_ray_job.py",
    "test_launch_scripts.py",
    "test_megatron_replay.py",
    "test_kill.py",
    "test_agents.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that no worker is left alone with one of them at the end."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
