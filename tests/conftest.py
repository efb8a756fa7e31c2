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

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a mistyped path is not looked up on the Hub

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


# Suites that take minutes run in `make nightly`. These tests of them run on each commit, too: two of each kind.
ON_EACH_COMMIT = {
    "test_engines.py": ["a_run_replaces_killed_and_stopped_engines_and_a_killed_router"],
    "test_kill.py": ["partial_rollouts_ahead_of_training_are_accounted_for_when_killed"],
    "test_kill_agents.py": ["run_killed_with_twenty_agents_in_flight_resumes_with_a_clean_ledger"],
    "test_signals.py": ["a_stopped_script_prints_one_line"],
    "test_ray.py": ["two_ranks_on_two_machines_train_as_one_process_does", "next_run_resumes_from_that_checkpoint"],
    "test_ray_megatron.py": ["two_processes_that_share_each_layer_train_as_one_and_resume"],
    "test_cpu_runs.py": ["a_killed_server_is_started_again_behind_the_router_and_has_the_weights"],
    "test_its_transformers.py": ["recurrent_states_and_routers_are_found"],
    "test_examples.py": ["math_example_trains_and_evaluates", "reward_example_assigns_every_answer_one_kind"],
    "test_external_engines.py": ["external_engines_reproduce_the_run_of_the_embedded_engine"],
    "test_ranks_agree.py": ["ranks_that_share_sequences_train_like_one", "ranks_train_like_one"],
    "test_megatron_replay.py": ["losses_norms_and_log_probs_are_those_of_one_rank"],
}

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
    "test_ray_job.py",
    "test_launch_scripts.py",
    "test_megatron_replay.py",
    "test_kill.py",
    "test_agents.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `ON_EACH_COMMIT`, and put the longest files first, so that no worker ends alone with one."""
    for item in items:
        if any(item.name.startswith(f"test_{name}") for name in ON_EACH_COMMIT.get(item.path.name, ())):
            item.add_marker("commit")
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
