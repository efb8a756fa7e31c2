from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.core.routing import RoutingShape, text_from_routes
from furlong.core.sample import Sample, Status
from furlong.errors import DataError


def test_a_server_response_is_appended_as_in_slime():
    for kind, status in [("stop", Status.COMPLETED), ("length", Status.TRUNCATED), ("abort", Status.ABORTED)]:
        sample = Sample(tokens=[5])
        meta_info = {"finish_reason": {"type": kind}, "weight_version": "7"}
        sample.append_response_tokens(
            "args", tokens=[6], log_probs=[-1.0], text="a", meta_info=meta_info, trainable=True
        )
        assert (sample.status, sample.weight_versions, sample.response) == (status, ["7"], "a")
        sample.append_response_tokens(tokens=[7], log_probs=[-1.0], meta_info=meta_info, update_terminal_info=False)
        assert sample.weight_versions == ["7"]


def test_a_response_may_start_with_environment_tokens():
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[5, 6], trainable=False)
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0])
    sample.append_response_tokens(tokens=[8], log_probs=[0.0], trainable=False)
    assert (sample.tokens, sample.loss_mask) == ([1, 5, 6, 7, 8], [0, 0, 1, 0])
    assert sample.rollout_log_probs == [0, 0, -1, 0]


def test_environment_tokens_may_follow_a_response_without_log_probs():
    sample = Sample(tokens=[1, 2], response_length=1)
    sample.append_response_tokens(tokens=[5], trainable=False)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0], None)
    with pytest.raises(DataError, match="the 1 trainable tokens before have no log-probs"):
        sample.append_response_tokens(tokens=[6], log_probs=[-1.0])


def test_tensors_arrays_and_absent_values_are_accepted():
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=torch.tensor([5, 6]), log_probs=np.array([-1.0, -2.0]), text=None)
    sample.append_response_tokens(meta_info={"finish_reason": {"type": "length"}, "weight_version": 4})
    assert (sample.tokens, sample.rollout_log_probs, sample.response) == ([1, 5, 6], [-1.0, -2.0], "")
    assert {type(each) for each in sample.tokens} == {int}
    assert (sample.status, sample.weight_versions) == (Status.TRUNCATED, ["4"])
    sample.append_response_tokens(meta_info={"finish_reason": None, "weight_version": 5})
    assert (sample.status, sample.weight_versions) == (Status.TRUNCATED, ["4"])


def test_an_invalid_append_leaves_the_sample_unchanged():
    for wrong, message in [
        ({}, "2 trainable tokens without log-probs"),
        ({"log_probs": [-1.0]}, "2 tokens but 1 log-probs"),
        ({"log_probs": [-1.0, -2.0], "version": [3]}, "2 tokens but 1 weight versions"),
        ({"log_probs": [-1.0, -2.0], "trainable": False}, "not trainable; leave log_probs out"),
        (
            {"log_probs": [-1.0, -2.0], "meta_info": {"finish_reason": {"type": "tool_calls"}}},
            "tool_calls.*stop, length",
        ),
        ({"log_probs": [-1.0, -2.0], "meta_info": {"finish_reason": "eos"}}, "'eos', which is none of stop"),
        ({"log_probs": [-1.0, -2.0], "meta_info": {"routed_experts": "not base64"}}, "not base64 of int32"),
    ]:
        sample = Sample(tokens=[1])
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0])
        before = copy.deepcopy(sample.to_dict())
        with pytest.raises(DataError, match=message):
            sample.append_response_tokens(tokens=[6, 7], **wrong)
        assert sample.to_dict() == before


SHAPE = RoutingShape(num_layers=3, top_k=2, num_experts=8)


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.integers(1, 4),
    turns=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_routed_experts_of_replies_are_kept_for_every_token(prompt, turns, seed):
    """Each reply reports all tokens so far, or those from a start on; environment tokens come with the next reply."""
    total = prompt + sum(generated + observed for generated, observed, _ in turns)
    routes = np.random.default_rng(seed).integers(0, 8, (total, 3, 2)).astype(np.int16)
    sample, known = Sample(tokens=list(range(prompt))), 0
    for generated, observed, is_partial in turns:
        end = len(sample.tokens) + generated
        start = known if is_partial else 0
        meta_info = {"finish_reason": {"type": "stop"}, "routed_experts": text_from_routes(routes[start : end - 1])}
        meta_info |= {"routed_experts_start_len": start} if is_partial else {}
        if end - 1 > start:
            sample.append_response_tokens(tokens=[9] * generated, log_probs=[-1.0] * generated, meta_info=meta_info)
            known = end - 1
            assert np.array_equal(SHAPE.checked(sample.rollout_routed_experts, "x"), routes[:known])
        else:
            sample.append_response_tokens(tokens=[9] * generated, log_probs=[-1.0] * generated)
        sample.append_response_tokens(tokens=[8] * observed, trainable=False)
    restored = Sample.from_dict(sample.to_dict())
    if known:
        assert np.array_equal(SHAPE.checked(restored.rollout_routed_experts, "x"), routes[:known])


def test_routes_of_replies_and_of_completions_can_be_mixed():
    routes = np.arange(5 * 3 * 2).reshape(5, 3, 2) % 8
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=[3], log_probs=[-1.0], routed_experts=routes[:2])
    meta_info = {"routed_experts": text_from_routes(routes[2:4]), "routed_experts_start_len": 2}
    sample.append_response_tokens(tokens=[4, 5], log_probs=[-1.0, -1.0], meta_info=meta_info)
    assert np.array_equal(SHAPE.checked(sample.rollout_routed_experts, "x"), routes[:4])


def test_routed_experts_of_another_number_of_tokens_are_refused():
    for rows, start, message in [
        (3, 0, "18 routed experts from token 0 on, but the sample has 6 tokens"),
        (1, 4, "6 routed experts from token 4 on.*experts for 0 before"),
        (0, 0, "0 routed experts"),
    ]:
        text = text_from_routes(np.zeros((rows, 3, 2), np.int16))
        sample = Sample(tokens=[1, 2, 3, 4])
        meta_info = {"routed_experts": text, "routed_experts_start_len": start}
        with pytest.raises(DataError, match=message):
            sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -1.0], meta_info=meta_info)
        assert (sample.response_length, sample.rollout_routed_experts) == (0, None)


def test_ids_in_the_place_of_args_are_refused():
    sample = Sample(tokens=[1])
    with pytest.raises(DataError, match="pass the ids as tokens="):
        sample.append_response_tokens([5, 6], trainable=False)
    assert (sample.tokens, sample.response_length) == ([1], 0)
