from __future__ import annotations

import asyncio
import re
import threading

import pytest

from fakes_rollout import ListSource, MemoryLedger
from furlong.config.hooks import Hooks
from furlong.core.metric import mean, values
from furlong.core.sample import Group, Sample, Status
from furlong.errors import RolloutError
from furlong.rollout.metrics import SampleReport, evaluation_data
from furlong.rollout.replay import (
    FunctionRollout,
    ReplayRollout,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    SplitRollout,
)
from furlong.rollout.train_batch import Conversion


def answered(sample, reward=1.0):
    sample.append_response_tokens(tokens=[4], log_probs=[-1.0])
    sample.reward = reward
    return sample


def function_rollout(function, source=None, ledger=None, **options):
    source, ledger = source or ListSource(9), ledger or MemoryLedger()
    return FunctionRollout(function, source=source, ledger=ledger, conversion=Conversion(), args="args", **options)


def take(n, *, train=None):
    """A rollout function that asks for `n` groups and trains on those that `train` picks."""

    def function(args, rollout_id, data_source, evaluation=False):
        groups = data_source.get_samples(n)
        for group in groups:
            for sample in group:
                answered(sample)
        return groups if train is None else train(groups)

    return function


def test_groups_that_a_function_returns_are_trained_and_others_dropped():
    ledger = MemoryLedger()
    batch = asyncio.run(function_rollout(take(3, train=lambda groups: groups[:2]), ledger=ledger).produce(0))
    assert batch is not None
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert ledger.states == {0: "generated", 1: "generated", 2: "dropped"}
    assert ledger.reasons == {2: "rollout_function"}


def test_groups_that_a_function_returns_to_the_buffer_come_again():
    source, ledger = ListSource(9), MemoryLedger()

    def function(args, rollout_id, data_source, evaluation=False):
        groups = data_source.get_samples(2)
        data_source.add_samples(groups[1:])
        return [[answered(s) for s in groups[0]]]

    rollout = function_rollout(function, source, ledger)
    assert asyncio.run(rollout.produce(0)).group_ids.tolist() == [0, 0]
    assert asyncio.run(rollout.produce(1)).group_ids.tolist() == [1, 1]
    assert ledger.states[2] == "returned"


def test_metrics_of_a_function_are_recorded_and_its_nested_lists_flattened():
    def train(groups):
        return RolloutFnTrainOutput([[[s] for s in group] for group in groups], {"rollout/mine": 2.5})

    batch = asyncio.run(function_rollout(take(1, train=train)).produce(0))
    assert batch is not None
    metrics = values(batch.metrics)
    assert metrics["rollout/mine"] == 2.5
    assert metrics["rollout/raw_reward"] == 1
    assert metrics["perf/rollout_time"] >= 0


def test_function_without_groups_ends_the_run():
    assert asyncio.run(function_rollout(take(0)).produce(0)) is None


def made(*indexes):
    return [answered(Sample(tokens=[1, 2], group_index=index, index=5)) for index in indexes]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([made(None, None), made(None)], [0, 0, 1]),
        ([made(77, 77), made(3)], [0, 0, 1]),
        ([*made(8, 8, 9)], [0, 0, 1]),  # samples that are in no list
    ],
)
def test_groups_that_a_function_made_are_issued_by_it(groups, expected):
    ledger = MemoryLedger()
    rollout = function_rollout(lambda *args, **kwargs: groups, ledger=ledger)
    batch = asyncio.run(rollout.produce(0))
    assert batch is not None
    assert batch.group_ids.tolist() == expected
    assert len(set(batch.rollout_ids.tolist())) == len(set(batch.sample_ids.tolist())) == 3
    assert asyncio.run(rollout.produce(1)).group_ids.tolist() == [index + 2 for index in expected]
    assert set(ledger.states.values()) == {"generated"}


def test_made_groups_wait_in_the_buffer_with_their_responses():
    ledger = MemoryLedger()

    def function(args, rollout_id, data_source, evaluation=False):
        data_source.add_samples([made(None, None)])
        return data_source.get_samples(1)

    batch = asyncio.run(function_rollout(function, ledger=ledger).produce(0))
    assert batch is not None
    assert (len(batch), ledger.states) == (2, {0: "generated"})


def test_a_function_may_keep_groups_for_a_later_call_but_train_on_each_once():
    ledger, kept = MemoryLedger(), []

    def function(args, rollout_id, data_source, evaluation=False):
        if not kept:
            kept.extend([answered(s) for s in group] for group in data_source.get_samples(3))
        return [kept[min(rollout_id, 1)]]

    rollout = function_rollout(function, ledger=ledger)

    async def go():
        assert (await rollout.produce(0)).group_ids.tolist() == [0, 0]
        assert ledger.states == {0: "generated", 1: "held", 2: "held"}
        saved = rollout.snapshot()
        assert [(group.index, group.samples[0].response_length) for _, group in saved] == [(1, 0), (2, 0)]
        kept.pop()
        assert (await rollout.produce(1)).group_ids.tolist() == [1, 1]
        assert (ledger.states[2], ledger.reasons[2]) == ("dropped", "rollout_function")
        with pytest.raises(RolloutError, match=r"returned group 1 a second time; .* group_index None"):
            await rollout.produce(2)

    asyncio.run(go())


def test_a_thread_of_the_function_may_ask_between_the_calls_and_gets_nothing_after_the_run():
    ledger, asked = MemoryLedger(), []

    def function(args, rollout_id, data_source, evaluation=False):
        asked.append(data_source)
        return take(1)(args, rollout_id, data_source)

    async def go():
        rollout = function_rollout(function, ledger=ledger)
        await rollout.produce(0)
        groups = await asyncio.to_thread(asked[0].get_samples, 2)
        assert [group[0].group_index for group in groups] == [1, 2]
        assert ledger.states == {0: "generated", 1: "held", 2: "held"}
        await rollout.close()
        assert await asyncio.to_thread(asked[0].get_samples, 1) == []
        await asyncio.to_thread(asked[0].add_samples, groups)
        assert len(rollout.snapshot()) == 2

    asyncio.run(go())


def test_function_runs_in_a_thread_and_the_ledger_is_written_in_the_loop():
    seen: list[str] = []

    class Watching(MemoryLedger):
        def issued(self, groups, rollout_id):
            seen.append(threading.current_thread().name)
            super().issued(groups, rollout_id)

    def function(args, rollout_id, data_source, evaluation=False):
        seen.append(threading.current_thread().name)
        return take(1)(args, rollout_id, data_source)

    asyncio.run(function_rollout(function, ledger=Watching()).produce(0))
    assert seen[0] != threading.current_thread().name
    assert seen[1] == threading.current_thread().name


@pytest.mark.parametrize("wrap", [dict, RolloutFnEvalOutput])
def test_evaluation_of_a_function(wrap):
    def function(args, rollout_id, data_source, evaluation=False):
        assert evaluation
        data_source.get_samples(1)
        return wrap({"own": {"rewards": [1, 0, 0, 1], "truncated": [True, False, False, False]}})

    ledger = MemoryLedger()
    metrics = values(asyncio.run(function_rollout(function, ledger=ledger).evaluate(3)))
    assert metrics == {"eval/own": 0.5, "eval/own-truncated_ratio": 0.25}
    assert ledger.reasons == {0: "evaluation"}


def test_samples_of_an_evaluation_are_measured():
    def function(args, rollout_id, data_source, evaluation=False):
        samples = [answered(sample) for sample in data_source.get_samples(1)[0]]
        return {"own": {"rewards": [1.0] * len(samples), "samples": samples}}

    metrics = values(asyncio.run(function_rollout(function).evaluate(3)))
    assert metrics["eval/own/response_len/mean"] == metrics["eval/own"] == 1
    assert metrics["eval/own-truncated_ratio"] == 0


def test_evaluation_of_samples_without_rewards_has_no_mean():
    def function(args, rollout_id, data_source, evaluation=False):
        return {"aime": {"rewards": [1, None, 0]}, "none": {"rewards": [None]}, "empty": {"rewards": []}}

    assert values(asyncio.run(function_rollout(function).evaluate(3))) == {"eval/aime": 0.5}


@pytest.mark.parametrize("answer", [None, [[]]])
def test_evaluation_that_returns_groups_or_nothing_is_an_error_that_names_the_flags(answer):
    with pytest.raises(
        RolloutError, match=f"--eval-function-path, .* returned {re.escape(repr(answer))} for evaluation"
    ):
        asyncio.run(function_rollout(lambda *a, evaluation: answer).evaluate(3))


def test_evaluation_may_come_from_another_rollout():
    first, second = function_rollout(take(1)), function_rollout(lambda *a, evaluation: {"e": {"rewards": [2.0]}})
    both = SplitRollout(first, second)
    assert asyncio.run(both.produce(0)).group_ids.tolist() == [0, 0]
    assert values(asyncio.run(both.evaluate(0))) == {"eval/e": 2.0}


def dumped(n):
    groups = ListSource(n).next_groups(n)
    for group in groups:
        for sample in group.samples:
            answered(sample).status = Status.COMPLETED
    return groups


@pytest.mark.parametrize(("subsample", "count"), [(None, 4), (0.5, 2), (0.01, 1), (1.0, 4)])
def test_replay_reads_the_dump_or_a_part_of_it(subsample, count):
    asked: list[int] = []

    def load(rollout_id) -> list[Group]:
        asked.append(rollout_id)
        return dumped(4)

    batch = asyncio.run(ReplayRollout(load, Conversion(), subsample=subsample).produce(5))
    assert batch is not None
    assert (asked, batch.rollout_id, len(set(batch.group_ids.tolist()))) == ([5], 5, count)
    assert values(batch.metrics)["rollout/raw_reward"] == 1
    assert asyncio.run(ReplayRollout(load, Conversion()).evaluate(0)) == {}


@pytest.mark.parametrize("handled", [True, False])
def test_logging_hooks_replace_the_standard_metrics_if_they_return_true(handled):
    calls: list[tuple] = []

    def log_rollout(rollout_id, args, samples, extra_metrics, rollout_time):
        calls.append((rollout_id, args, len(samples), extra_metrics, rollout_time))
        return handled

    def log_evaluation(rollout_id, args, data, extra_metrics):
        calls.append((rollout_id, args, data["e"]["rewards"], extra_metrics))
        return handled

    hooks = Hooks(custom_rollout_log_function=log_rollout, custom_eval_rollout_log_function=log_evaluation)
    report = SampleReport(hooks=hooks, args="args")
    extra = {"perf/x": mean(1.5)}
    assert ("rollout/raw_reward" in report.of_rollout(3, dumped(2), extra, 0.5)) == (not handled)
    data = {"e": evaluation_data([answered(Sample(tokens=[1])), Sample()], None)}
    metrics = report.of_evaluation(3, data, {"eval/e": mean(1.0)}, extra)
    assert values(metrics) == ({"perf/x": 1.5} if handled else {"perf/x": 1.5, "eval/e": 1.0})
    assert calls == [(3, "args", 4, {"perf/x": 1.5}, 0.5), (3, "args", [1.0, None], {"perf/x": 1.5})]


def changed(**fields):
    """A rollout function's groups, in which the first sample has other fields."""

    def train(groups):
        for name, value in fields.items():
            setattr(groups[0][0], name, value)
        return groups

    return take(1, train=train)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": float("nan")}, "sample 0: the reward is float nan; return a finite number"),
        ({"loss_mask": [1, 1]}, "sample 0 has response_length 1 but loss_mask has 2 entries"),
        ({"rollout_log_probs": [float("nan")]}, "sample 0 has rollout_log_probs that are not finite"),
        ({"tokens": [1, 2, 99]}, "sample 0 .* 1 to 99.* 0 to 9"),
        ({"tokens": [1, 2, "4"]}, "sample 0 has str among its tokens"),
        ({"response_length": 7}, "sample 0 has 3 tokens and response_length 7"),
    ],
)
def test_samples_of_a_function_are_checked(fields, message):
    with pytest.raises(RolloutError, match=f"--rollout-function-path: {message}"):
        asyncio.run(function_rollout(changed(**fields), vocab_size=10).produce(0))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (lambda groups: [1], "returned a int "),
        (lambda groups: [["a", "b"]], "returned a list "),
    ],
)
def test_a_function_that_returns_no_groups_is_an_error_with_the_expected_type(train, message):
    with pytest.raises(RolloutError, match=f"--rollout-function-path {message}"):
        asyncio.run(function_rollout(take(1, train=train)).produce(0))
