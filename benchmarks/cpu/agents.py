"""Measure agents: schedules of episodes whose durations differ widely, turns over HTTP, and the prefix cache.

    python benchmarks/cpu/agents.py all         # everything below, with defaults
    python benchmarks/cpu/agents.py pool        # shared groups against rollouts with their own groups
    python benchmarks/cpu/agents.py sessions    # session over HTTP against policy().chat (agent_turns.py)
    python benchmarks/cpu/agents.py cache       # prefix cache against none (agent_turns.py)

`pool`: the loop, the rollout and the ledger's calls are those of a run. Stand-ins replace the engine (a turn takes
--turn-ms), the trainer (a step takes --train-ms) and the weight update. Episodes have log-normal numbers of turns
(median 27, sigma 0.9, at most 200), drawn by the number of the sample, so that every row has the same ones. Each step
trains on 32 episodes, and 32 are wanted in flight. Time is simulated, so that rows do not depend on other work of the
machine; with --real-time it is that of the clock, and all rows together take seven minutes.

The rows are a synchronous run, one rollout ahead, and the pool with bounds of the token staleness of 4 and 5. Columns:
episodes in flight on average, until the last one starts, and at most; episodes trained per second; oldest token in
weight versions; episodes started and not completed before the end; mean number of turns that were trained, relative to
those drawn; CPU seconds of the process.
"""

# ruff: noqa: ARG001, ARG002, ARG005  stand-ins have the signatures of the interfaces

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agent_turns
from agent_turns import TimedEngine
from simulated_time import run_simulated

from furlong.config.hooks import Hooks
from furlong.config.sections import RolloutFlags
from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics
from furlong.core.outcome import Outcome
from furlong.core.sample import Group, Sample, Status
from furlong.core.weights import SyncReport, WeightSource
from furlong.files.atomic import PendingFiles
from furlong.interfaces import DeviceSharing, Parts, SamplingParams, Trainer, WeightSync
from furlong.loop.checkpoints import Checkpoints
from furlong.loop.schedule import RunSchedule
from furlong.loop.train import train
from furlong.rollout.agent import policy
from furlong.rollout.engine_rollout import EngineRollout
from furlong.rollout.episodes import EpisodeLoad
from furlong.rollout.generate import Generation
from furlong.rollout.group_pool import GroupPool
from furlong.rollout.train_batch import Conversion

WANTED = 32
MEDIAN_TURNS, SIGMA, MAX_TURNS = 27, 0.9, 200


def turns_of(index: int) -> int:
    """Return the number of turns of an episode."""
    return max(1, min(MAX_TURNS, round(random.Random(index).lognormvariate(0.0, SIGMA) * MEDIAN_TURNS)))


class TimedTrainer(Trainer):
    """A step takes `train_s`. `lengths` are those of the trained responses."""

    def __init__(self, train_s: float) -> None:
        self.train_s, self.lengths = train_s, list[int]()

    async def train(self, batch: RolloutBatch) -> Metrics:
        """Wait."""
        await asyncio.sleep(self.train_s)
        self.lengths += batch.response_lengths.tolist()
        return {}

    def weights(self) -> WeightSource:
        """Return no weights."""
        return WeightSource(list)

    async def save(self, folder: Path) -> None:
        """Do nothing."""

    async def snapshot(self, folder: Path) -> PendingFiles:
        """Return no files."""
        return PendingFiles()

    async def load(self, folder: Path) -> None:
        """Do nothing."""

    async def save_hf(self, folder: Path) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class VersionSync(WeightSync):
    """Sets the engine's version."""

    def __init__(self, engine: TimedEngine) -> None:
        self.engine = engine

    async def update_weights(self, version: int) -> SyncReport:
        """Set the version."""
        self.engine.version = version
        return SyncReport(version, 0, 0, 0.0)


class EndlessSource:
    """Prompts without end."""

    groups_per_epoch = None
    num_long_prompts = 0

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.next = num_samples, 0

    def next_groups(self, n: int) -> list[Group]:
        """Return the next groups."""
        first, self.next = self.next, self.next + n
        return [Group(i, [self._sample(i, k) for k in range(self.num_samples)]) for i in range(first, self.next)]

    def _sample(self, group: int, k: int) -> Sample:
        index = group * self.num_samples + k
        return Sample(group_index=group, index=index, rollout_id=index, prompt="p", tokens=[1], seed=index)

    def return_groups(self, groups: Sequence[Group]) -> None:
        """Do nothing."""

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def restore(self, state: dict[str, Any], *, data_changed: bool = False) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Ignored:
    """A ledger, observer and tracker that keeps the metrics of each step."""

    stop_requested = False

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Keep the metrics."""
        self.rows.append(metrics)

    def __getattr__(self, name: str) -> Any:
        """Accept every other call."""
        return lambda *args, **kwargs: {} if name == "mark" else None


class FixedReward:
    """Rewards 0 and 1."""

    async def __call__(self, group: Sequence[Sample]) -> list[Outcome]:
        """Score by the number of the sample."""
        return [Outcome.scored(float((s.index or 0) % 2)) for s in group]


class Counted:
    """Episodes in flight over the time of the event loop. `mean`: until the last one started."""

    def __init__(self) -> None:
        self.started = self.ended = self.most = self._now = 0
        self._began = self._since = asyncio.get_running_loop().time()
        self._seconds = self.mean = 0.0

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Wrap one episode."""
        self._change(1)
        self.started += 1
        try:
            yield
            self.ended += 1
        finally:
            self._change(-1)

    def _change(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        self._seconds += (now - self._since) * self._now
        self._since, self._now = now, self._now + change
        if change > 0 and now > self._began:
            self.mean = self._seconds / (now - self._began)
        self.most = max(self.most, self._now)


@dataclass(frozen=True)
class Measured:
    """Figures of one schedule. length_bias: mean trained turns by mean drawn ones, minus 1."""

    in_flight: float
    most_in_flight: int
    episodes_per_s: float
    oldest: float
    num_lost: int
    length_bias: float


async def measure(arguments: argparse.Namespace, *, ahead: int, bound: int | None) -> Measured:
    """Run one schedule."""
    counted, log = Counted(), Ignored()
    engine, trainer = TimedEngine(arguments.turn_ms / 1000), TimedTrainer(arguments.train_ms / 1000)
    batch_size = WANTED // arguments.samples_per_prompt

    async def agent(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        async with counted.episode():
            for _ in range(turns_of(sample.index or 0)):
                turn = await policy().generate(sample.tokens, **{**sampling_params, "max_new_tokens": 1})
                sample.append_response_tokens(
                    tokens=turn.tokens, log_probs=turn.log_probs, version=turn.versions, text=turn.text
                )
        sample.status = Status.COMPLETED
        return sample

    permits = None if bound is None else WANTED
    generation = Generation(
        engine, None, FixedReward(), SamplingParams(max_new_tokens=4096),
        hooks=Hooks(custom_generate_function=agent), load=EpisodeLoad(permits),
    )  # fmt: skip
    pool = None if bound is None else GroupPool(batch_size, bound, "pace")
    source = EndlessSource(arguments.samples_per_prompt)
    rollout = EngineRollout(
        generation=generation, source=source, ledger=log, conversion=Conversion(), flags=RolloutFlags(),
        batch_size=batch_size, in_order=bound is None, pool=pool,
    )  # fmt: skip
    parts = Parts(
        trainer=trainer, sync=VersionSync(engine), rollout=rollout, source=source, ledger=log,
        device_sharing=DeviceSharing(), trackers=[log], observer=log, engine=engine, pool=rollout,
    )  # fmt: skip
    started = asyncio.get_running_loop().time()
    await train(parts, RunSchedule(num_rollout=arguments.steps, ahead=ahead), Checkpoints())
    seconds = asyncio.get_running_loop().time() - started
    drawn = [turns_of(i) for i in range(counted.started)]
    bias = (sum(trainer.lengths) / len(trainer.lengths)) / (sum(drawn) / len(drawn)) - 1
    oldest = max(row.get("rollout/staleness/max", 0) for row in log.rows)
    return Measured(
        counted.mean, counted.most, len(trainer.lengths) / seconds, oldest,
        counted.started - counted.ended, bias,
    )  # fmt: skip


def compare_pool(arguments: argparse.Namespace) -> None:
    """Print one line per schedule."""
    schedules: Iterable[tuple[str, int, int | None]] = [
        ("synchronous", 0, None), ("one rollout ahead", 1, None),
        ("pool, staleness 4", 4, 4), ("pool, staleness 5", 5, 5),
    ]  # fmt: skip
    heads = ("in flight", "at most", "episodes/s", "oldest", "lost", "length", "CPU s")
    print(f"{'schedule':20}" + "".join(f"{head:>12}" for head in heads))
    run = asyncio.run if arguments.real_time else run_simulated
    for name, ahead, bound in schedules:
        began = time.process_time()
        row = run(measure(arguments, ahead=ahead, bound=bound))
        columns = (
            f"{row.in_flight:.1f}", str(row.most_in_flight), f"{row.episodes_per_s:.1f}", f"{row.oldest:.0f}",
            str(row.num_lost), f"{row.length_bias:+.1%}", f"{time.process_time() - began:.1f}",
        )  # fmt: skip
        print(f"{name:20}" + "".join(f"{column:>12}" for column in columns), flush=True)


def main() -> None:
    """Run one comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    pool = commands.add_parser("pool", help="shared groups against rollouts with their own groups")
    pool.add_argument("--steps", type=int, default=30)
    pool.add_argument("--turn-ms", type=float, default=30.0)
    pool.add_argument("--train-ms", type=float, default=50.0)
    pool.add_argument("--samples-per-prompt", type=int, default=1, choices=(1, 2, 4, 8))
    pool.add_argument("--real-time", action="store_true", help="wait for real")
    pool.set_defaults(run=compare_pool)
    agent_turns.add_commands(commands)

    def run_all(_arguments: argparse.Namespace) -> None:
        for name in ("pool", "sessions", "cache"):
            chosen = parser.parse_args([name])
            chosen.run(chosen)
            print()

    commands.add_parser("all", help="all of them, with their defaults").set_defaults(run=run_all)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
