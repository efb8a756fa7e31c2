"""Environments play episodes with the policy: turns, rewards, threads, limits and failures."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import pytest

from furlong.config.sections import AlgoFlags, RolloutFlags
from furlong.core.sample import Group, Sample, Status
from furlong.environments import Observation, Rubric, Step, Task
from furlong.errors import InfraError
from furlong.rollout.environments import generate
from furlong.rollout.episodes import EpisodeLoad
from furlong.rollout.metrics import rollout_metrics
from furlong.rollout.train_batch import Conversion, batch_from_groups
from scripted_episodes import play

made: list[Any] = []


@pytest.fixture(autouse=True)
def no_instances() -> None:
    made.clear()


class Counting:
    """Rewards each answer by its number; ends after `rounds`."""

    def __init__(self, rounds: int = 2) -> None:
        self.rounds, self.turn = rounds, 0
        self.thread, self.closed = threading.current_thread(), 0
        made.append(self)

    def reset(self, task: Task, seed: int) -> str:
        self.seed = seed
        return f"begin {task.prompt}"

    def step(self, message: Any) -> Step:
        self.turn += 1
        self.said = message["content"]
        return Step(f"turn {self.turn}", float(self.turn), done=self.turn == self.rounds, info={"rounds": self.turn})

    def close(self) -> None:
        self.closed += 1


class Asynchronous:
    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation(task.messages)

    async def step(self, message: Any) -> Step:
        self.thread = threading.current_thread()
        made.append(self)
        return Step(reward=1.0, done=True)


def exact(episode: Any) -> float:
    return float(episode.answer == "four")


class Judged(Counting):
    rubric = Rubric(exact)


class Chatting:
    async def run(self, policy: Any, sample: Sample) -> dict[str, Any]:
        reply = await policy.chat([{"role": "user", "content": sample.prompt}])
        return {"reward": 0.5, "said": reply.content}


class Broken(Counting):
    def __init__(self, where: str, what: str = "raise") -> None:
        super().__init__()
        self.where, self.what = where, what

    def reset(self, task: Task, seed: int) -> Any:
        return self._broken("reset") or "begin"

    def step(self, message: Any) -> Any:
        return self._broken("step") or Step(reward=0.0, done=True)

    def _broken(self, where: str) -> Any:
        if where != self.where:
            return None
        if self.what == "raise":
            raise ValueError("a bug")
        if self.what == "infra":
            raise InfraError("the sandbox is gone")
        return {"text": 5, "number": 7, "silent": Step(), "nan": Step("x", float("nan")), "tuple": ("x", 1.0)}[
            self.what
        ]


class Unrewarded(Counting):
    def step(self, message: Any) -> Step:
        return Step(done=True)


class Batched(Counting):
    """As Counting; its steps are made together. batches: the number of the turn of each step, by call."""

    batches: ClassVar[list[list[int]]] = []
    threads: ClassVar[set[threading.Thread]] = set()

    @classmethod
    def step_many(cls, steps: list[tuple[Batched, Any]]) -> list[Step]:
        Batched.threads.add(threading.current_thread())
        cls.batches.append([environment.turn for environment, _ in steps])
        return [environment.step(message) for environment, message in steps]


class AsyncBatched(Batched):
    @classmethod
    async def step_many(cls, steps: list[tuple[Batched, Any]]) -> list[Step]:  # pyright: ignore[reportIncompatibleMethodOverride]
        time.sleep(0.06)
        return super().step_many(steps)


def of(*entries: str, **args: Any) -> dict[str, Any]:
    defaults = {"custom_rm_path": None, "rm_type": None, "env_workers": ("thread", "2")}
    defaults |= {"agent_memory_limit": None, "rollout_seed": 42}
    return {"environment": tuple(f"{__name__}:{entry}" for entry in entries), **defaults, **args}


def say(conversation: str) -> str:
    return "four"


def test_an_episode_alternates_until_the_environment_is_done_and_adds_rewards_up():
    seen: list[str] = []

    def answer(conversation: str) -> str:
        seen.append(conversation)
        return f"answer {len(seen)}"

    (sample,) = play(generate, answer, args=of("Counting?rounds=3"))
    assert sample.status is Status.COMPLETED
    assert sample.reward == 6.0
    assert sample.metadata["step_rewards"] == [1.0, 2.0, 3.0]
    by_turn = Conversion(AlgoFlags(advantage_estimator="ppo", return_level="turn"))
    paid = batch_from_groups(0, [Group(0, [sample])], by_turn).columns["turn_rewards"]
    assert paid[paid != 0].tolist() == [1.0, 2.0, -3.0]  # and the reward, 6, at the last token
    assert [number for number, _ in sample.metadata["turn_ends"]] == [0, 1, 2]
    assert all(paid[end] for _, end in sample.metadata["turn_ends"])
    assert sample.metadata["environment"] == "Counting"
    assert "begin 1+2=" in seen[0]
    assert "answer 2" in seen[2]
    assert "turn 2" in seen[2]
    texts = [message["content"] for message in sample.metadata["messages"]]
    assert texts == ["begin 1+2=", "answer 1", "turn 1", "answer 2", "turn 2", "answer 3"]
    assert sample.loss_mask is not None
    assert 0 < sum(sample.loss_mask) < len(sample.loss_mask)
    metrics = rollout_metrics([Group(0, [sample])])
    assert {key: value.value for key, value in metrics.items() if key.startswith("env/")} == {
        "env/Counting/episodes": 1,
        "env/Counting/failed": 0,
        "env/Counting/reward": 6.0,
        "env/Counting/turns": 3.0,
        "env/Counting/truncated_ratio": 0.0,
        "env/Counting/info/rounds": 3.0,
    }


def test_each_sample_has_its_instance_and_a_group_shares_the_seed():
    samples = play(generate, say, num_samples=3, args=of("Counting"))
    assert len(made) == 3
    assert {env.turn for env in made} == {2}
    assert len({env.seed for env in made}) == 1
    assert [env.closed for env in made] == [1, 1, 1]
    assert [sample.reward for sample in samples] == [3.0] * 3


def test_methods_that_are_not_async_run_in_threads_and_others_on_the_loop():
    play(generate, say, args=of("Counting"))
    assert made[0].thread is not threading.main_thread()
    play(generate, say, args=of("Asynchronous"))
    assert made[-1].thread is threading.main_thread()


def test_an_environment_may_run_the_conversation_itself():
    (sample,) = play(generate, say, args=of("Chatting"))
    assert (sample.reward, sample.metadata["said"]) == (0.5, "four")


class Forgetful:
    async def run(self, policy: Any, sample: Sample) -> float:
        for content in ("1+2=", "2+2="):  # two conversations
            await policy.chat([{"role": "user", "content": content}])
        return 1.0


def test_turns_are_those_of_all_conversations_of_an_episode():
    samples = play(generate, say, args=of("Forgetful"))
    assert len(samples) == 2
    assert rollout_metrics([Group(0, samples)])["env/Forgetful/turns"].value == 2


def test_a_limit_ends_the_episode_with_the_rewards_so_far():
    (sample,) = play(generate, say, args=of("Counting?rounds=9"), flags=RolloutFlags(max_turns=4))
    assert sample.status is Status.TRUNCATED
    assert sample.reward == 10.0
    assert sample.metadata["episode_limit"] == "turns"
    assert made[0].closed == 1


def test_what_an_environment_does_wrong_fails_its_sample_with_the_reason():
    cases = [
        ("Broken?where=reset", "ValueError: a bug"), ("Broken?where=reset&what=text", "reset returned 5"),
        ("Broken?where=step&what=number", "step returned 7"), ("Broken?where=step&what=silent", "no messages"),
        ("Broken?where=step&what=nan", "reward nan"), ("Broken?where=step&what=tuple", "Step"),
        ("Unrewarded", "no step returned a reward"),
    ]  # fmt: skip
    for entry, reason in cases:
        made.clear()
        (sample,) = play(generate, say, args=of(entry))
        assert sample.status is Status.FAILED
        assert sample.outcome is not None
        assert reason in sample.outcome.reason
        assert made[0].closed == 1


def test_lost_infrastructure_is_issued_once_more():
    (sample,) = play(generate, say, args=of("Broken?where=step&what=infra"))
    assert len(made) == 2
    assert sample.outcome is not None
    assert sample.outcome.kind == "infra"


def test_a_rubric_scores_unless_a_flag_does():
    (sample,) = play(generate, say, args=of("Judged"))
    assert sample.custom_rm_path == f"{__name__}:Judged.rubric"
    (sample,) = play(generate, say, label=0.25, args=of("Judged", custom_rm_path="other.py:reward"))
    assert sample.custom_rm_path is None
    assert sample.reward == 0.25


def test_a_sample_of_a_mixture_names_its_environment():
    (sample,) = play(generate, say, metadata={"environment": "Asynchronous"}, args=of("Counting", "Asynchronous"))
    assert sample.reward == 1.0
    (sample,) = play(generate, say, args=of("Counting", "Asynchronous"))
    assert sample.outcome is not None
    assert "Counting, Asynchronous" in sample.outcome.reason


@pytest.mark.parametrize("name", ["Batched", "AsyncBatched"])
def test_step_many_gets_the_steps_of_all_episodes_that_are_ready(name: str):
    Batched.batches.clear()
    Batched.threads.clear()
    load = EpisodeLoad()
    samples = play(generate, say, num_samples=6, args=of(f"{name}?rounds=3"), load=load)
    assert [sample.reward for sample in samples] == [6.0] * 6
    assert sum(len(batch) for batch in Batched.batches) == 18
    assert len(Batched.batches) < 12, "most steps were made alone"
    is_async = name == "AsyncBatched"
    assert (Batched.threads == {threading.main_thread()}) == is_async
    assert (load.take_blocked() >= 0.06 * len(Batched.batches)) == is_async  # the sleep of each call


class Sleeping(Counting):
    def step(self, message: Any) -> Step:
        time.sleep(0.05)
        return super().step(message)


def test_blocking_steps_of_32_episodes_overlap_and_do_not_hold_the_event_loop():
    load, started = EpisodeLoad(), time.monotonic()
    settings = of("Sleeping?rounds=4", env_workers=("thread", "32"))
    samples = play(generate, say, num_samples=32, args=settings, load=load)
    assert [sample.reward for sample in samples] == [10.0] * 32
    assert time.monotonic() - started < 32 * 4 * 0.05, "steps ran one after the other"
    assert load.take_blocked() < 32 * 4 * 0.05 / 4, "steps hold the event loop"  # a busy machine holds it for a moment
