from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fakes_rollout import LabelReward, ListSource, MemoryLedger, ScriptedEngine
from furlong.config.hooks import Hooks
from furlong.config.sections import RolloutFlags
from furlong.core.metric import values
from furlong.core.outcome import Outcome
from furlong.core.sample import Group, Sample, Status
from furlong.errors import DataError, RolloutError
from furlong.inference.server.generate_api import sampling_params as server_params
from furlong.interfaces import SamplingParams
from furlong.rollout.agent import policy
from furlong.rollout.engine_rollout import EngineRollout, all_failed
from furlong.rollout.episodes import SILENT
from furlong.rollout.generate import Generation, generate_sample, score
from furlong.rollout.train_batch import Conversion


class CharTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) for c in text]


def generation(params, *, engine=None, reward=None, **options):
    return Generation(engine or ScriptedEngine(), CharTokenizer(), reward or LabelReward(), params, **options)


def rollout(
    engine, source, *, ledger=None, submit_size=None, how=None, reward=None, dynamic_filter=None, partial=False,
    mask_offpolicy=False, batch_size=2, **options,
):  # fmt: skip
    how = how or generation(SamplingParams(max_new_tokens=4), args=SimpleNamespace(reward_key=None))
    return EngineRollout(
        source=source,
        ledger=ledger or MemoryLedger(),
        generation=dataclasses.replace(
            how,
            engine=engine,
            reward=reward or LabelReward(),
            hooks=dataclasses.replace(how.hooks, dynamic_sampling_filter=dynamic_filter),
        ),
        flags=RolloutFlags(
            over_sampling_batch_size=submit_size,
            partial_rollout=partial,
            mask_offpolicy_in_partial_rollout=mask_offpolicy,
        ),
        batch_size=batch_size,
        conversion=Conversion(),
        **options,
    )


def produce(parts, rollout_id=0):
    return asyncio.run(parts.produce(rollout_id))


def test_a_batch_has_its_groups_in_order_with_rewards_and_log_probs():
    batch = produce(rollout(ScriptedEngine(), ListSource(4)))
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.tokens.tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1]
    assert batch.raw_rewards.tolist() == [0, 1, 0, 1]
    assert batch.columns["rollout_log_probs"].tolist() == [-0.5] * 4


def test_throughput_is_per_generating_gpu():
    def rates(num_gpus):
        metrics = values(produce(rollout(ScriptedEngine(), ListSource(2), num_gpus=num_gpus)).metrics)
        names = ("perf/tokens_per_gpu_per_sec", "perf/effective_tokens_per_gpu_per_sec")
        return [metrics[name] * metrics["perf/rollout_time"] for name in names]

    assert rates(4) == pytest.approx([rate / 4 for rate in rates(1)])


def test_a_filter_that_keeps_nothing_ends_the_run_with_its_reasons(monkeypatch):
    monkeypatch.setattr("furlong.rollout.engine_rollout.HOPELESS_GROUPS", 30)
    parts = rollout(ScriptedEngine(), ListSource(100_000), dynamic_filter=lambda args, samples, **kw: False)
    with pytest.raises(RolloutError, match=r"all of the first 40 groups were dropped \({'filter': 40}\).*--rm-type"):
        produce(parts)
    parts = rollout(ScriptedEngine(), ListSource(20), dynamic_filter=lambda args, samples, **kw: False)
    with pytest.raises(DataError, match=r"nothing was trained: all of the first 20 groups were dropped"):
        produce(parts)  # the data ends before


def test_a_filter_that_keeps_few_groups_continues(monkeypatch):
    monkeypatch.setattr("furlong.rollout.engine_rollout.HOPELESS_GROUPS", 30)
    keep = lambda args, samples, **kw: samples[0].group_index in (39, 200)  # noqa: E731
    batch = produce(rollout(ScriptedEngine(), ListSource(1000), dynamic_filter=keep))
    assert sorted(set(batch.group_ids.tolist())) == [39, 200]


def test_aborted_oversampled_groups_are_returned_without_their_tokens():
    ledger, source = MemoryLedger(), ListSource(3)
    parts = rollout(ScriptedEngine(slow={0}), source, ledger=ledger, submit_size=3)
    batch = produce(parts)
    assert set(batch.group_ids.tolist()) == {1, 2}
    assert ledger.states[0] == "returned"
    assert [(s.tokens, s.response_length, s.status) for s in source.returned[0].samples] == [
        ([0, 0], 0, Status.PENDING)
    ] * 2


def test_partial_rollout_keeps_the_tokens_of_aborted_groups():
    engine, source = ScriptedEngine(lambda prompt, params: [7, 8, 9], slow={0}), ListSource(4)
    parts = rollout(engine, source, submit_size=3, partial=True, mask_offpolicy=True)
    produce(parts)
    assert [s.response_length for s in source.returned[0].samples] == [1, 1]
    engine.slow.clear()
    engine.version = 5
    batch = produce(parts, 1)
    cut = np.flatnonzero(batch.group_ids == 0)
    assert batch.response_lengths[cut].tolist() == [4, 4]
    start = batch.response_starts[cut[0]]
    assert batch.loss_masks[start : start + 4].tolist() == [0, 1, 1, 1]
    assert batch.columns["token_versions"][start : start + 4].tolist() == [0, 5, 5, 5]


def test_a_continuation_that_times_out_leaves_the_prompt_unchanged():
    class Hanging:
        async def generate(self, prompt, params, *, session=None):
            await asyncio.sleep(60)

    begun = Sample(index=0, tokens=[1, 2])
    begun.append_response_tokens(tokens=[7, 8], log_probs=[-0.1, -0.2], version=0)
    how = generation(SamplingParams(max_new_tokens=4), engine=Hanging(), timeout_s=0.01)
    work = generate_sample(begun, how, rollout_id=1, continues=lambda: True)
    [sample] = asyncio.run(work)
    assert (sample.status, sample.tokens, sample.response_length) == (Status.FAILED, [1, 2], 0)


def test_a_reward_that_always_fails_ends_the_run_with_its_reason():
    class Broken(LabelReward):
        async def __call__(self, group):
            return [Outcome.failed("ZeroDivisionError: division by zero") for _ in group]

    with pytest.raises(RolloutError, match=r"\[REW03\] .*2 groups in a row failed: 4x ZeroDivisionError"):
        produce(rollout(ScriptedEngine(), ListSource(8), reward=Broken()))


def test_the_function_that_fails_for_every_sample_is_named_with_a_fix():
    cases = [
        (Outcome.failed("gone"), {}, "REW03", "`furlong reward test`"),
        (Outcome.timed_out(3), {}, "REW03", "--reward-timeout"),
        (Outcome.failed("KeyError: 1", stage="generate"), {}, "HOOK01", "fix these"),
        (Outcome.timed_out(3, stage="generate"), {}, "STOP02", "--generate-timeout"),
        (Outcome.failed("no answer", stage="generate"), {SILENT: True}, "AGT07", "OPENAI_BASE_URL"),
    ]
    for outcome, metadata, id, flag in cases:
        group = Group(0, [Sample(status=Status.FAILED, outcome=outcome, metadata=metadata) for _ in range(3)])
        diagnosis = all_failed(7, [group], is_custom=False)
        finding = f"rollout 7: every sample of 1 groups in a row failed: 3x {outcome.reason}"
        assert (diagnosis.id, diagnosis.finding) == (id, finding)
        assert flag in diagnosis.remedy
    slow = Group(0, [Sample(status=Status.FAILED, outcome=Outcome.timed_out(3, stage="generate"))])
    assert all_failed(7, [slow], is_custom=True).id == "HOOK01"


def test_a_reward_that_starts_to_fail_ends_the_run():
    class Gone(LabelReward):
        async def __call__(self, group):
            if group[0].group_index:
                return [Outcome.failed("no connection") for _ in group]
            return await super().__call__(group)

    source = ListSource(10_000)
    with pytest.raises(RolloutError, match=r"64 groups in a row failed: 128x no connection"):
        produce(rollout(ScriptedEngine(), source, reward=Gone()))


def test_the_end_of_data_drops_an_incomplete_batch_and_logs_it(caplog):
    ledger = MemoryLedger()
    parts = rollout(ScriptedEngine(), ListSource(3), ledger=ledger)
    assert produce(parts) is not None
    assert produce(parts, 1) is None
    assert ledger.reasons == {2: "end_of_data"}
    assert "data ended with 1 of 2 groups" in caplog.text


async def tool_user(args, sample, sampling_params):
    first = await policy().generate(sample.tokens, **sampling_params)
    sample.append_response_tokens(tokens=first.tokens, log_probs=first.log_probs, text=first.text, version=3)
    sample.append_response_tokens(tokens=policy().encode("ok"), trainable=False, text="ok")
    return sample


def test_a_custom_generate_function_masks_tool_output():
    how = generation(SamplingParams(max_new_tokens=4), hooks=Hooks(custom_generate_function=tool_user))
    batch = produce(rollout(ScriptedEngine(), ListSource(2), how=how))
    assert batch.loss_masks.tolist() == [1, 0, 0] * 4
    assert batch.columns["token_versions"].tolist() == [3, -1, -1] * 4


class NamingSource(ListSource):
    """Samples of the groups in `functions` name the function that generates them."""

    def __init__(self, count, functions):
        super().__init__(count)
        self.functions = functions

    def next_groups(self, n):
        groups = super().next_groups(n)
        for sample in (sample for group in groups if group.index in self.functions for sample in group.samples):
            sample.generate_function_path = self.functions[sample.group_index]
        return groups


def test_a_sample_may_name_the_function_that_generates_it(monkeypatch):
    monkeypatch.setattr("furlong.rollout.generate.load_generate_function", {"tools": tool_user}.__getitem__)
    how = generation(SamplingParams(max_new_tokens=4))
    batch = produce(rollout(ScriptedEngine(), NamingSource(2, {1: "tools"}), how=how))
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.loss_masks.tolist() == [1] * 2 + [1, 0, 0] * 2
    assert batch.metrics["perf/generate_held_time"].value >= 0


@pytest.mark.parametrize("partial", [False, True])
def test_aborted_groups_with_and_without_a_custom_function_are_returned(partial, monkeypatch):
    ledger, source = MemoryLedger(), NamingSource(4, {0: "hangs"})
    monkeypatch.setattr("furlong.rollout.generate.load_generate_function", {"hangs": hanging}.__getitem__)
    how = generation(SamplingParams(max_new_tokens=4))
    parts = rollout(ScriptedEngine(slow={1}), source, ledger=ledger, submit_size=4, how=how, partial=partial)
    assert produce(parts).group_ids.tolist() == [2, 2, 3, 3]
    assert [ledger.states[index] for index in (0, 1)] == ["returned"] * 2
    assert [[s.tokens for s in group.samples] for group in source.returned] == [
        [[0, 0]] * 2,
        [[1, 0, 1] if partial else [1, 0]] * 2,  # what an engine had generated of a single turn is kept
    ]


async def fan_out(args, sample, sampling_params):
    parts = []
    for k in range(2):
        part = Sample(tokens=[*sample.tokens, 5 + k], response_length=1, rollout_log_probs=[-1.0], token_versions=[0])
        part.reward = float(k)
        parts.append(part)
    return parts


def test_a_sample_may_fan_out_into_several_of_one_rollout_id():
    how = generation(SamplingParams(), hooks=Hooks(custom_generate_function=fan_out))
    batch = produce(rollout(ScriptedEngine(), ListSource(2), how=how))
    assert len(batch) == 8
    assert batch.rollout_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert batch.group_ids.tolist() == [0] * 4 + [1] * 4


async def hanging(args, sample, sampling_params):
    await asyncio.sleep(60)


async def failing(args, sample, sampling_params):
    raise KeyError("tool")


async def exiting(args, sample, sampling_params):
    raise SystemExit(3)


async def cancelled(args, sample, sampling_params):
    raise asyncio.CancelledError("a client of its own")


async def with_words_for_tokens(args, sample, sampling_params):
    sample.tokens, sample.response_length = [*sample.tokens, "a"], 1
    return sample


async def with_nan(args, sample, sampling_params):
    sample.append_response_tokens(tokens=[5], log_probs=[float("nan")])
    return sample


def test_a_custom_generate_function_that_fails_makes_failed_samples_with_the_reason():
    cases = [
        (hanging, "no answer within"), (failing, "KeyError"), (exiting, "SystemExit: 3"),
        (cancelled, "CancelledError: a client of its own"),
        (with_words_for_tokens, "sample 0 has str among its tokens"),
        (with_nan, "sample 0 has rollout_log_probs that are not finite"),
    ]  # fmt: skip
    for function, reason in cases:
        how = generation(SamplingParams(), hooks=Hooks(custom_generate_function=function), timeout_s=0.01)
        with pytest.raises(RolloutError, match=reason):
            produce(rollout(ScriptedEngine(), ListSource(4), how=how))


def test_custom_samples_with_trained_tokens_beyond_the_context_fail_with_their_lengths_and_one_warning(caplog):
    async def longer(args, sample, sampling_params):
        await tool_user(args, sample, sampling_params)
        sample.append_response_tokens(tokens=[5, 5], log_probs=[-1.0, -1.0])
        return sample

    how = generation(SamplingParams(max_new_tokens=4), hooks=Hooks(custom_generate_function=tool_user), max_tokens=5)
    assert len(produce(rollout(ScriptedEngine(), ListSource(2), how=how))) == 4
    how = dataclasses.replace(how, hooks=Hooks(custom_generate_function=longer), max_tokens=4)
    with pytest.raises(RolloutError, match=r"(?s)sample of . tokens .*--rollout-max-context-len"):
        produce(rollout(ScriptedEngine(), ListSource(2), how=how))
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert ["generate function failed" in record.message for record in warnings] == [True]


@pytest.mark.parametrize("observed", [1, 2, 9])
def test_a_conversation_that_fills_the_context_is_truncated_and_scored(observed):
    """Prompt 2, one sampled token a turn, `observed` tokens of the environment: a context of 8 becomes full."""
    ended = []

    async def converse(args, sample, sampling_params):
        for _ in range(5):
            turn = await policy().generate(sample.tokens, **sampling_params)
            sample.append_response_tokens(tokens=turn.tokens, log_probs=turn.log_probs, version=turn.versions)
            ended.append(turn.finish_reason)
            sample.append_response_tokens(tokens=[5] * observed, trainable=False)
        return sample

    hooks = Hooks(custom_generate_function=converse)
    how = generation(SamplingParams(max_new_tokens=4), hooks=hooks, max_tokens=8)
    batch = produce(rollout(ScriptedEngine(), ListSource(2), how=how))
    assert batch.lengths.tolist() == [8] * 4
    assert not np.isnan(batch.raw_rewards).any()
    assert "length" in ended
    assert values(batch.metrics)["rollout/truncated_ratio"] == 1.0
    assert values(batch.metrics)["rollout/context_full_frac"] == 1.0


def test_a_function_that_ignores_a_full_context_fails_instead_of_looping():
    async def endless(args, sample, sampling_params):
        while True:
            turn = await policy().generate(sample.tokens, **sampling_params)
            sample.append_response_tokens(tokens=turn.tokens, log_probs=turn.log_probs)

    how = generation(SamplingParams(max_new_tokens=4), hooks=Hooks(custom_generate_function=endless), max_tokens=6)
    with pytest.raises(RolloutError, match="17 times with a full context"):
        produce(rollout(ScriptedEngine(), ListSource(2), how=how))


def test_a_request_that_a_weight_update_aborts_is_continued_for_the_agent():
    class Interrupted(ScriptedEngine):
        """Ends the first request of each prompt after one token."""

        async def generate(self, prompt, params, *, session=None):
            self.version += 1
            whole = await super().generate(prompt, params, session=session)
            is_first = len(prompt) == 2
            return dataclasses.replace(whole, finish_reason="abort") if is_first else whole

    turns = []

    async def one_turn(args, sample, sampling_params):
        turn = await policy().generate(sample.tokens, **sampling_params)
        turns.append(turn)
        sample.append_response_tokens(
            tokens=turn.tokens, log_probs=turn.log_probs, version=turn.versions, text=turn.text
        )
        return sample

    engine = Interrupted()
    how = generation(SamplingParams(max_new_tokens=4), hooks=Hooks(custom_generate_function=one_turn))
    batch = produce(rollout(engine, ListSource(2), how=how))
    assert {turn.finish_reason for turn in turns} == {"stop"}
    assert [(len(turn.tokens), len(turn.log_probs), len(turn.versions), turn.text) for turn in turns] == [
        (2, 2, 2, "xx")
    ] * 4
    assert all(first < second for first, second in (turn.versions for turn in turns))
    assert batch.response_lengths.tolist() == [2] * 4
    assert {params.max_new_tokens for prompt, params in engine.calls if len(prompt) == 3} == {3}


def test_a_timeout_of_the_function_itself_counts_as_timed_out():
    async def slow_tool(args, sample, sampling_params):
        if sample.index % 2:
            raise TimeoutError("the tool's server did not answer")
        return await tool_user(args, sample, sampling_params)

    how = generation(SamplingParams(max_new_tokens=4), hooks=Hooks(custom_generate_function=slow_tool))
    metrics = values(produce(rollout(ScriptedEngine(), ListSource(2), how=how)).metrics)
    assert metrics["rollout/generate_timed_out"] == 2
    assert "rollout/generate_failed" not in metrics


def test_sample_hooks_get_only_the_keywords_that_they_name():
    seen = []

    def plain(args, sample):
        seen.append(("plain", {}))

    async def of_slime(args, sample, *, rollout_id=None):
        seen.append(("slime", rollout_id))

    def any_keywords(args, sample, **kwargs):
        seen.append(("any", kwargs))

    how = generation(SamplingParams(), hooks=Hooks(rollout_sample_hook=(plain, of_slime, any_keywords)))
    produce(rollout(ScriptedEngine(), ListSource(1), how=how))
    assert ("plain", {}) in seen
    assert ("slime", 0) in seen
    assert ("any", {"rollout_id": 0, "evaluation": False}) in seen


def test_sampling_parameters_of_a_generate_function_can_be_posted_to_a_server():
    accepted = []

    async def posting(args, sample, sampling_params):
        accepted.append(server_params(sampling_params))
        return await tool_user(args, sample, sampling_params)

    how = generation(
        SamplingParams(max_new_tokens=4, return_routed_experts=True),
        hooks=Hooks(custom_generate_function=posting),
        args=None,
    )
    engine = ScriptedEngine()
    produce(rollout(engine, ListSource(1), how=how))
    assert {(params.max_new_tokens, params.return_routed_experts) for params in accepted} == {(4, False)}
    assert {params.return_routed_experts for _, params in engine.calls} == {True}


def test_the_sample_returned_by_a_hook_replaces_the_original():
    async def relabelled(args, sample, *, rollout_id, evaluation):
        return dataclasses.replace(sample, label=7)

    def counted(args, sample, *, rollout_id, evaluation):
        sample.label += 1

    how = generation(SamplingParams(), hooks=Hooks(rollout_sample_hook=(relabelled, counted)))
    assert produce(rollout(ScriptedEngine(), ListSource(2), how=how)).raw_rewards.tolist() == [8] * 4


def test_a_hook_that_returns_something_else_is_an_error():
    cases = [
        (lambda sample: 5, "--rollout-sample-hook-path returned int for sample 0; it must return None"),
        (
            lambda sample: dataclasses.replace(sample, loss_mask=[1] * 9),
            "--rollout-sample-hook-path leaves sample 0 with 9 entries of loss_mask for 1 response tokens",
        ),
        (lambda sample: dataclasses.replace(sample, group_index=1), "changed group_index of sample 0 from 0 to 1"),
        (
            lambda sample: dataclasses.replace(sample, rollout_log_probs=[float("nan")]),
            "sample 0 has rollout_log_probs",
        ),
        (
            lambda sample: dataclasses.replace(sample, response_length=7),
            "leaves sample 0 with 1 entries of rollout_log_probs for 7 response tokens",
        ),
    ]
    for returned, message in cases:
        hook = lambda args, sample, *, rollout_id, evaluation, returned=returned: returned(sample)  # noqa: E731
        hooks = Hooks(rollout_sample_hook=(hook,))
        how = generation(SamplingParams(), hooks=hooks)
        with pytest.raises((RolloutError, DataError), match=message):
            produce(rollout(ScriptedEngine(), ListSource(2), how=how))


def test_a_prompt_that_fills_the_context_is_an_error_with_the_numbers():
    how = generation(SamplingParams(), flags=RolloutFlags(rollout_max_context_len=2))
    with pytest.raises(RolloutError, match=r"2 tokens leaves no room in a context of 2"):
        produce(rollout(ScriptedEngine(), ListSource(2), how=how))


def test_an_invalid_reward_of_a_generate_function_is_a_failure_with_its_reason():
    class NeverAsked:
        async def __call__(self, samples):
            raise AssertionError("all samples have rewards")

    samples = [Sample(index=n, reward=value) for n, value in enumerate((1, "high", float("nan"), torch.tensor(0.5)))]
    asyncio.run(score(samples, generation(SamplingParams(), reward=NeverAsked())))
    assert [sample.reward for sample in samples] == [1, None, None, 0.5]
    assert [sample.status is Status.FAILED for sample in samples] == [False, True, True, False]
    assert samples[1].outcome.reason == "the reward is str 'high'; return a finite number or a dict of them"


def test_four_failures_after_good_rollouts_do_not_end_the_run():
    class Flaky(LabelReward):
        async def __call__(self, group):
            if 8 <= group[0].group_index < 12:
                return [Outcome.failed("killed") for _ in group]
            return await super().__call__(group)

    parts = rollout(ScriptedEngine(), ListSource(100), reward=Flaky())
    failed = [values(produce(parts, number).metrics)["rollout/reward_failed"] for number in range(6)]
    assert failed == [0, 0, 0, 0, 8, 0]  # also those of dropped groups
