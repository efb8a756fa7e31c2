from __future__ import annotations

import asyncio

import numpy as np
import pytest

from data_zoo import chat_tokenizer
from fakes_rollout import ListSource, MemoryLedger
from furlong.core.metric import values
from furlong.core.sample import Sample
from furlong.errors import DataError
from furlong.rollout.sft import DemonstrationRollout, conversation_tokens, demonstrate


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def says(role, content, **more):
    return {"role": role, "content": content, **more}


def learned(messages, tokenizer, **kwargs) -> str:
    tokens, mask = conversation_tokens(messages, tokenizer, **kwargs)
    return tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])


def test_only_assistant_turns_are_trained_on(tokenizer):
    messages = [says("system", "be brief"), says("user", "hi"), says("assistant", "yo"), says("user", "bye")]
    assert learned(messages, tokenizer) == "yo<|im_end|>\n"
    assert learned([*messages, says("assistant", "ok")], tokenizer) == "yo<|im_end|>\nok<|im_end|>\n"


def test_turn_with_mask_0_is_not_learned(tokenizer):
    messages = [says("user", "a"), says("assistant", "wrong", step_loss_mask=0), says("assistant", "right")]
    assert learned(messages, tokenizer) == "right<|im_end|>\n"


def test_template_that_rewrites_history_is_refused(tokenizer):
    class Forgetful:
        def apply_chat_template(self, messages, **kwargs):
            return tokenizer.apply_chat_template(messages[-1:], **kwargs)

    messages = [says("user", "a"), says("assistant", "b"), says("user", "c")]
    with pytest.raises(DataError, match=r"rewrites history at message 1 \(assistant\)"):
        conversation_tokens(messages, Forgetful())


def test_conversation_without_an_assistant_is_refused(tokenizer):
    with pytest.raises(DataError, match="a conversation of 1 message has no assistant turn"):
        conversation_tokens([says("user", "a")], tokenizer)


def test_prompt_and_label_become_prompt_and_response(tokenizer):
    sample = Sample(prompt="1+1=", label="2")
    demonstrate(sample, tokenizer)
    assert tokenizer.decode(sample.tokens) == "1+1=2<|im_end|>"
    assert (sample.response_length, sample.loss_mask, sample.response) == (2, [1, 1], "2")


def test_plain_prompt_needs_a_text_as_label(tokenizer):
    for label in (None, "", 4):
        with pytest.raises(DataError, match="--label-key"):
            demonstrate(Sample(index=3, prompt="1+1=", label=label), tokenizer)


def source_of(*labels) -> ListSource:
    source = ListSource(len(labels), n=1)
    groups = source.next_groups(len(labels))
    for group, label in zip(groups, labels, strict=True):
        group.samples[0].tokens, group.samples[0].prompt, group.samples[0].label = [], "p", label
    source.return_groups(groups)
    return source


def rollout_of(source, tokenizer, ledger=None, **options) -> DemonstrationRollout:
    ledger = ledger or MemoryLedger()
    return DemonstrationRollout(tokenizer=tokenizer, source=source, ledger=ledger, batch_size=2, **options)


def test_batch_has_no_advantage_to_normalize_and_reports_lengths(tokenizer):
    batch = asyncio.run(rollout_of(source_of("a", "bcd"), tokenizer).produce(0))
    assert batch is not None
    assert batch.response_lengths.tolist() == [2, 4]
    assert np.isnan(batch.raw_rewards).all()
    assert values(batch.metrics)["rollout/response_len/mean"] == 3


def test_long_demonstrations_are_dropped_and_counted(tokenizer):
    ledger = MemoryLedger()
    rollout = rollout_of(source_of("a", "much too long", "b", "c"), tokenizer, ledger, max_len=5)
    batch = asyncio.run(rollout.produce(0))
    assert batch is not None
    assert batch.group_ids.tolist() == [0, 2]
    assert ledger.reasons == {1: "too_long"}
    assert values(batch.metrics)["rollout/too_long_frac"] == pytest.approx(1 / 3)


class Rewriting:
    """A template that keeps the last message only once a conversation has a tool's answer."""

    def __init__(self, tokenizer):
        self.encode, self.eos_token_id = tokenizer.encode, tokenizer.eos_token_id
        self._render = tokenizer.apply_chat_template

    def apply_chat_template(self, messages, **kwargs):
        if any(message["role"] == "system" for message in messages):
            raise ValueError("no system messages")
        return self._render(messages[-1:] if messages[-1]["role"] == "tool" else messages, **kwargs)


GOOD = [says("user", "a"), says("assistant", "b")]
REWRITTEN = [*GOOD, says("tool", "c")]
REJECTED = [says("system", "s"), *GOOD]


def conversations(*prompts) -> ListSource:
    source = ListSource(len(prompts), n=1)
    groups = source.next_groups(len(prompts))
    for group, prompt in zip(groups, prompts, strict=True):
        group.samples[0].tokens, group.samples[0].prompt, group.samples[0].label = [], prompt, None
    source.return_groups(groups)
    return source


@pytest.mark.parametrize(("bad", "reason"), [(REWRITTEN, "rewrites history"), (REJECTED, "no system messages")])
def test_rows_that_the_template_cannot_locate_are_skipped_and_counted(bad, reason, tokenizer, caplog):
    ledger, source = MemoryLedger(), conversations(GOOD, bad, bad, bad, bad, GOOD)
    rollout = rollout_of(source, Rewriting(tokenizer), ledger, skip_bad_rows=True)
    batch = asyncio.run(rollout.produce(0))
    assert batch is not None
    assert batch.group_ids.tolist() == [0, 5]
    assert ledger.reasons == dict.fromkeys([1, 2, 3, 4], "bad_row")
    assert values(batch.metrics)["rollout/bad_rows_frac"] == pytest.approx(4 / 6)
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(logged) == 3
    assert all(reason in message for message in logged)


def test_a_row_that_cannot_be_used_names_the_flag_that_skips_it(tokenizer):
    for bad in (REWRITTEN, REJECTED):
        with pytest.raises(DataError, match=r"row 0 of the data.*--skip-bad-rows"):
            asyncio.run(rollout_of(conversations(bad, GOOD, GOOD), Rewriting(tokenizer)).produce(0))


def test_data_without_a_usable_row_is_an_error(tokenizer, monkeypatch):
    monkeypatch.setattr("furlong.rollout.sft.MAX_USELESS", 3)
    rollout = rollout_of(conversations(*[REWRITTEN] * 5), Rewriting(tokenizer), skip_bad_rows=True)
    with pytest.raises(DataError, match="3 rows in a row could not be used"):
        asyncio.run(rollout.produce(0))


def test_data_that_cannot_fill_a_batch_is_dropped_with_a_report(tokenizer):
    ledger = MemoryLedger()
    rollout = rollout_of(source_of("a", "b", "c"), tokenizer, ledger)
    assert asyncio.run(rollout.produce(0)) is not None
    assert asyncio.run(rollout.produce(1)) is None
    assert ledger.reasons == {2: "end_of_data"}


def test_run_without_engine_has_nothing_to_evaluate(tokenizer):
    assert asyncio.run(rollout_of(source_of("a"), tokenizer).evaluate(0)) == {}
