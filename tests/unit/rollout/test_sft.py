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


@pytest.mark.parametrize("label", [None, "", 4])
def test_plain_prompt_needs_a_text_as_label(label, tokenizer):
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


def test_data_that_cannot_fill_a_batch_is_dropped_with_a_report(tokenizer):
    ledger = MemoryLedger()
    rollout = rollout_of(source_of("a", "b", "c"), tokenizer, ledger)
    assert asyncio.run(rollout.produce(0)) is not None
    assert asyncio.run(rollout.produce(1)) is None
    assert ledger.reasons == {2: "end_of_data"}


def test_run_without_engine_has_nothing_to_evaluate(tokenizer):
    assert asyncio.run(rollout_of(source_of("a"), tokenizer).evaluate(0)) == {}
