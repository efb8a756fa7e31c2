"""`furlong.train` as scripts and notebooks call it: the same run as the command."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

import furlong
from furlong.environments import Step
from furlong.errors import DataError
from runs import (
    FORKED,
    flags,
    print_to,
    reproducible,
    rows,
    train,
    write_prompts,
    write_prompts_bad_beyond_the_preflight,
)

EXAMPLE = Path(__file__).parents[2] / "examples/python_api.py"


def keywords_of(argv: list[str]) -> dict[str, object]:
    """The flags of `argv` as keywords; numbers where they look like it."""
    given: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            given[name.replace("-", "_")] = [value] if equals else []
        else:
            [*_, last] = given.values()
            last.append(word)
    return {name: plain(values) for name, values in given.items()}


def plain(values: list[str]) -> object:
    if not values:
        return True
    (value,) = values
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


@pytest.fixture
def make(model, tmp_path):
    data = write_prompts(tmp_path / "prompts.jsonl", 8)

    def keywords(name: str = "run", **changes: object) -> dict[str, object]:
        given = keywords_of(flags(model, data, tmp_path / name, **changes))
        if given.pop("no_use_tensorboard", False):
            given["use_tensorboard"] = False
        return given

    return keywords


def test_keywords_train_what_the_command_trains(make, model, tmp_path):
    run = furlong.train(**make(num_rollout=2))
    assert run.folder == tmp_path / "run"
    assert run.exit_code == 0
    assert [row["step"] for row in run.rows] == [1, 2]
    assert run.flags["num_rollout"] == 2
    train(flags(model, tmp_path / "prompts.jsonl", tmp_path / "command", num_rollout=2))
    assert list(map(reproducible, run.rows)) == list(map(reproducible, rows(tmp_path / "command")))


def test_a_notebook_trains_on_objects_and_keeps_the_model(model, tmp_path):
    """As the cells of a notebook do it: closures and a list, under a running loop."""
    seen: list[dict[str, Any]] = []
    bonus = 0.25

    def reward(response, label, carry):
        return len(response) / 8 + (bonus if carry else 0.0)

    async def cell() -> furlong.Run:
        return furlong.train(
            model=model,
            prompt_data=[{"prompt": f"{i}+{i}=", "label": str(2 * i), "carry": i > 4} for i in range(8)],
            reward=reward,
            on_step=lambda row: seen.append(row) or row["step"] < 2,
            rollout_batch_size=4,
            n_samples_per_prompt=4,
            num_rollout=5,
            rollout_max_response_len=8,
            num_threads=1,
            use_tensorboard=False,
            output_dir=tmp_path / "run",
        )

    run = asyncio.run(cell())
    assert run.exit_code == 0
    assert [row["step"] for row in seen] == [1, 2]  # the callback has ended it
    assert seen[0]["rollout/raw_reward"] == run.rows[0]["rollout/raw_reward"] > 0
    assert seen[0]["rollout/reward_failed"] == 0
    assert (run.model_path / "config.json").is_file()


def test_a_class_of_a_notebook_is_an_environment_in_worker_processes(model, tmp_path):
    word = "ab"

    class Echo:
        def reset(self, task, seed):
            return word

        def step(self, message):
            return Step(reward=float(len(message["content"])), done=True)

    run = furlong.train(
        model=model,
        prompt_data="episodes:8",
        environment=Echo,
        env_workers=["process", "1"],
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        num_rollout=1,
        rollout_max_response_len=8,
        num_threads=1,
        use_tensorboard=False,
        output_dir=tmp_path / "run",
    )
    assert run.rows[0]["env/Echo/episodes"] == 8
    assert run.rows[0]["rollout/raw_reward"] > 0


def test_a_callback_that_raises_ends_the_run(make):
    def stop(row):
        raise ValueError("enough")

    with pytest.raises(furlong.HookError, match=r"on_step raised ValueError: enough\n.*test_python_api.py:\d+ in stop"):
        furlong.train(**make(), on_step=stop)


def test_a_mistake_has_no_frames_of_furlong(make):
    async def cell() -> None:
        furlong.train(**make(lr="fast"))

    with pytest.raises(furlong.ConfigError) as caught:
        asyncio.run(cell())
    files = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[-2:] == ["test_python_api.py", "python_api.py"]
    assert "concurrent" not in "".join(traceback.format_exception(caught.value))
    assert caught.value._render_traceback_() == [f"ConfigError: {caught.value}"]


def test_a_running_event_loop_does_not_matter(make):
    def train_another(row) -> None:
        with pytest.raises(furlong.ConfigError, match=r"furlong.train is already running in this process"):
            furlong.train(**make("other"))

    async def cell() -> furlong.Run:
        return furlong.train(**make(num_rollout=1), on_step=train_another)

    before = threading.active_count()
    run = asyncio.run(cell())
    assert run.exit_code == 0
    assert threading.active_count() <= before
    assert "CHECK01" not in (run.folder / "run.log").read_text()  # checks of rewards run a loop of their own


def test_an_error_is_raised_and_recorded(make, tmp_path):
    write_prompts_bad_beyond_the_preflight(tmp_path / "prompts.jsonl")

    async def cell() -> None:
        furlong.train(**make())

    with pytest.raises(DataError):
        asyncio.run(cell())
    with pytest.raises(furlong.ConfigError, match="lr: got 'fast'"):
        furlong.train(**make("other", lr="fast"))
    assert not (tmp_path / "other").exists()


def notebook(keywords: dict[str, Any], log: Path) -> None:
    """Body of a forked process: train under a running loop, and write how that ends into `log`."""
    print_to(log)

    async def cell() -> None:
        furlong.train(**keywords)

    try:
        asyncio.run(cell())
    except BaseException as error:  # noqa: BLE001  it is what the test is about
        with log.open("a") as file:
            last = Path(traceback.extract_tb(error.__traceback__)[-1].filename).name
            file.write(f"{type(error).__name__} {furlong.Run(keywords['output_dir']).exit_code} {last}\n")


@pytest.mark.parametrize(
    ("number", "error", "code"), [(signal.SIGINT, "KeyboardInterrupt", 130), (signal.SIGTERM, "SystemExit", 143)]
)
def test_a_signal_ends_a_run_under_a_running_loop(make, tmp_path, number, error, code):
    log, metrics = tmp_path / "log.txt", tmp_path / "run" / "metrics.jsonl"
    process = FORKED.Process(target=notebook, args=(make(num_rollout=100_000), log))
    process.start()
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.is_alive(), log.read_text()
            time.sleep(0.01)
        os.kill(process.pid, number)
        process.join(60)
    finally:
        process.kill()
    assert log.read_text().splitlines()[-1] == f"{error} {code} python_api.py"


def test_the_example_trains(tmp_path):
    text = EXAMPLE.read_text()
    text = text.replace("num_rollout=40", "num_rollout=1, n_samples_per_prompt=2")
    (tmp_path / "python_api.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "python_api.py"], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("outputs/grpo-model: reward ")
