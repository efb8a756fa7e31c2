"""Several agents in one episode: samples, rewards and baselines by role."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from furlong.agent import policy
from furlong.config.sections import AlgoFlags
from furlong.core.outcome import Outcome
from furlong.core.sample import Group, Sample, Status
from furlong.rollout.filters import check_reward_nonzero_std
from furlong.rollout.metrics import eval_metrics, rollout_metrics
from furlong.rollout.train_batch import Conversion, batch_from_groups
from scripted_episodes import play


class ByRole:
    """Right for the solver of the first sample only; always right for the verifier."""

    async def __call__(self, group: Any) -> list[Outcome]:
        self.roles = [sorted(sample.metadata["roles"]) for sample in group]
        return [Outcome.scored({"solver": float(sample.index == 0), "verifier": 1.0}) for sample in group]


async def solve_and_verify(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    solved = await policy().role("solver").chat([{"role": "user", "content": sample.prompt}])
    await policy().role("verifier").chat([{"role": "user", "content": f"is {solved.content} right?"}])
    return sample


def say(conversation: str) -> str:
    return "yes" if "right?" in conversation else "3"


@pytest.mark.parametrize(("normalizes", "first", "others"), [(True, 1.5, -0.5), (False, 0.75, -0.25)])
def test_advantages_are_those_of_the_role(normalizes: bool, first: float, others: float):
    samples = play(solve_and_verify, say, num_samples=4, reward=ByRole())
    assert [sample.metadata["role"] for sample in samples] == ["solver", "verifier"] * 4
    assert [sample.reward for sample in samples] == [1, 1, 0, 1, 0, 1, 0, 1]
    flags = AlgoFlags(grpo_std_normalization=normalizes)
    batch = batch_from_groups(0, [Group(0, samples)], Conversion(algo=flags))
    assert batch.rewards[::2] == pytest.approx([first, others, others, others], abs=1e-5)
    assert batch.rewards[1::2].tolist() == [0.0] * 4
    assert batch.group_ids.tolist() == [0] * 8
    assert batch.rollout_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_reward_function_gets_the_conversations_of_all_roles_once_for_each_episode():
    reward = ByRole()
    samples = play(solve_and_verify, say, num_samples=2, reward=reward)
    assert reward.roles == [["solver", "verifier"]] * 2
    assert samples[1].metadata["roles"]["solver"][-1]["content"] == "3"


def test_roles_are_no_branches_and_have_metrics():
    samples = play(solve_and_verify, say, num_samples=4, reward=ByRole())
    group = Group(0, samples)
    metrics = {name: metric.value for name, metric in rollout_metrics([group]).items()}
    assert metrics["role/solver/reward"] == 0.25
    assert metrics["role/verifier/reward"] == 1.0
    assert metrics["role/solver/samples"] == 4
    assert not any(name.startswith("session/branch_reason") for name in metrics)
    assert metrics["rollout/zero_std/count_1"] == 1
    assert metrics["rollout/zero_std_frac"] == 0.5
    evaluated = {name: metric.value for name, metric in eval_metrics("sums", [group]).items()}
    assert evaluated["eval/sums/role/solver/pass@1"] == pytest.approx(0.25)
    assert evaluated["eval/sums/role/solver/pass@4"] == pytest.approx(1.0)
    assert evaluated["eval/sums/role/verifier/reward"] == 1.0


def test_the_answers_of_a_frozen_role_are_context_of_the_reward_only():
    async def judged(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        await policy().chat([{"role": "user", "content": sample.prompt}])
        await policy().role("judge", trainable=False).chat([{"role": "user", "content": "right?"}])
        return sample

    (sample,) = play(judged, say, label=0.5)
    assert sample.metadata["role"] == "policy"
    assert sample.metadata["roles"]["judge"][-1]["content"] == "yes"
    assert sample.reward == 0.5
    assert sample.metadata["session_counts"]["turns"] == 2

    async def only_judged(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        await policy().role("judge", trainable=False).chat([{"role": "user", "content": "right?"}])
        return sample

    (sample,) = play(only_judged, say)
    assert sample.outcome is not None
    assert "not trainable" in sample.outcome.reason


def test_a_reward_without_a_role_of_the_episode_fails_that_role():
    class Partial:
        async def __call__(self, group: Any) -> list[Outcome]:
            return [Outcome.scored({"solver": 1.0}) for _ in group]

    solver, verifier = play(solve_and_verify, say, reward=Partial())
    assert solver.reward == 1.0
    assert verifier.status is Status.FAILED
    assert verifier.outcome is not None
    assert "verifier" in verifier.outcome.reason


def test_a_dict_that_is_not_by_role_stays_for_the_reward_key():
    class Parts:
        async def __call__(self, group: Any) -> list[Outcome]:
            return [Outcome.scored({"score": 1.0, "style": 0.5}) for _ in group]

    assert [sample.reward for sample in play(solve_and_verify, say, reward=Parts())] == [
        {"score": 1.0, "style": 0.5}
    ] * 2


def roles_of(rewards: dict[str, list[float]]) -> list[Sample]:
    rows = [(role, reward) for role, values in rewards.items() for reward in values]
    return [
        Sample(
            0, i, i, tokens=[1, 2], response_length=1, reward=reward, metadata={"role": role}, status=Status.COMPLETED
        )
        for i, (role, reward) in enumerate(rows)
    ]


def test_a_filter_keeps_a_group_if_the_rewards_of_one_role_differ():
    assert check_reward_nonzero_std(None, roles_of({"solver": [1, 0], "verifier": [1, 1]})).keep
    dropped = check_reward_nonzero_std(None, roles_of({"solver": [0, 0], "verifier": [1, 1]}))
    assert not dropped.keep


def test_a_function_may_name_the_roles_of_its_samples():
    batch = batch_from_groups(
        0, [Group(0, roles_of({"solver": [1, 0, 0, 0], "verifier": [1, 1]}))], Conversion(algo=AlgoFlags())
    )
    assert np.allclose(batch.rewards, [1.5, -0.5, -0.5, -0.5, 0, 0], atol=1e-5)


def test_roles_of_a_group_are_compared_within_their_episode():
    async def propose_and_solve(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        proposed = await policy().role("proposer").chat([{"role": "user", "content": "write a problem"}])
        for i in range(3):
            solver = policy().role(f"solver-{i}", group="solver")
            await solver.chat([{"role": "user", "content": proposed.content}])
        return sample

    class ByAttempt:
        async def __call__(self, group: Any) -> list[Outcome]:
            rows = [(1.0, [1.0, 0.0, 0.0]), (0.0, [1.0, 1.0, 1.0])]  # of the two episodes
            return [Outcome.scored({"proposer": own, **{f"solver-{i}": each for i, each in enumerate(solved)}})
                    for own, solved in rows]  # fmt: skip

    samples = play(propose_and_solve, say, num_samples=2, reward=ByAttempt())
    batch = batch_from_groups(0, [Group(0, samples)], Conversion(algo=AlgoFlags(grpo_std_normalization=False)))
    assert batch.rewards.tolist() == pytest.approx([0.5, 2 / 3, -1 / 3, -1 / 3, -0.5, 0, 0, 0], abs=1e-6)
    assert batch.rollout_ids.tolist() == [0] * 4 + [1] * 4, "an episode is one completion"
    equal = [sample for sample in samples if sample.index == 1]
    assert not check_reward_nonzero_std(None, equal).keep
    assert check_reward_nonzero_std(None, samples).keep


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a/b", "ä"])
def test_a_role_that_cannot_be_part_of_a_url_is_refused(name: str):
    async def ask(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        await policy().role(name).chat([{"role": "user", "content": "1"}])
        return sample

    (sample,) = play(ask, say)
    assert sample.outcome is not None
    assert "a role is named" in sample.outcome.reason
