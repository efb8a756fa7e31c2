from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Gemma2Config

from furlong.core.batch import pack_micro_batch
from furlong.errors import ConfigError, TrainerError
from furlong.models import packed_model
from furlong.models.hf_model import build_model
from furlong.models.packed_layout import MAX_SLACK, MIN_FILL, bucket_lengths, plan_layout
from furlong.models.packed_model import OneDnnLinear, PackedModel, use_onednn
from models_zoo import FAMILIES, VOCAB, family_config, packed_log_probs, plain_log_probs, random_batch

MIXED = random_batch(prompts=[9, 4, 30], responses=[[5, 12, 1], [40, 3], [2, 2]])


def eager_twin(model):
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def randomized(family: str):
    """Return a model with random biases, norms and sinks, so that they matter."""
    model = build_model(family_config(family), seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_and_gradients_equal_one_sequence_at_a_time(family, share_prompts):
    model = randomized(family)
    twin = eager_twin(model)
    weights = torch.linspace(-1, 1, len(MIXED.loss_masks))

    want = plain_log_probs(twin, MIXED)
    (want * weights).sum().backward()
    got = packed_log_probs(PackedModel(model, share_prompts=share_prompts), pack_micro_batch(MIXED, range(len(MIXED))))
    (got * weights).sum().backward()

    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for (name, parameter), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        scale = float(other.grad.abs().max()) if other.grad is not None else 0.0
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5 * max(scale, 1.0), msg=name)


def test_prompts_of_a_group_are_run_once():
    layout = plan_layout(pack_micro_batch(MIXED, range(len(MIXED))))
    saved = 9 * 2 + 4 + 30
    last = len(MIXED)  # the last token of each response predicts nothing
    assert len(layout.run_U) == len(MIXED.tokens) - saved - last


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_a_layout_is_planned_from_the_indices_on_the_host(share_prompts, padded):
    micro = pack_micro_batch(MIXED, range(len(MIXED)))
    kept = plan_layout(micro, share_prompts=share_prompts, padded=padded)
    read = plan_layout(dataclasses.replace(micro, host=None), share_prompts=share_prompts, padded=padded)
    on_device = pack_micro_batch(MIXED, range(len(MIXED)), device="meta")  # its tensors cannot be read
    planned = plan_layout(on_device, share_prompts=share_prompts, padded=padded)
    for name in (field.name for field in dataclasses.fields(kept)):
        value, other, shape = (getattr(each, name) for each in (kept, read, planned))
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other), name
            assert (shape.shape, shape.dtype) == (value.shape, value.dtype), name
            assert shape.is_meta != ("host" in name), name
        else:
            assert value == other == shape, name
    with pytest.raises(NotImplementedError, match="meta"):
        plan_layout(dataclasses.replace(on_device, host=None))


def test_forward_and_backward_pass_do_not_wait_for_the_device():
    """Tensors on the meta device have no values: reading one for a decision, or copying it to the host, is an error."""
    model = randomized("qwen3").to("meta")
    log_probs_R = packed_log_probs(PackedModel(model), pack_micro_batch(MIXED, range(len(MIXED)), device="meta"))
    log_probs_R.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_unpadded_sequences_share_short_prompts_so_that_layers_compile_once():
    micro = pack_micro_batch(random_batch(prompts=[7], responses=[[43, 43]]), range(2))
    assert plan_layout(micro, padded=True).run_U is None
    assert len(plan_layout(micro, padded=False).run_U) == 93


def test_equal_lengths_without_a_shared_prompt_copy_no_rows():
    batch = random_batch(prompts=[6, 6, 6], responses=[[4], [4], [4]])
    layout = plan_layout(pack_micro_batch(batch, range(3)))
    assert layout.spread_P is None
    assert layout.run_U is None
    assert layout.buckets == ((3, 10),)


def test_buckets_contain_every_sequence_once_and_are_mostly_full():
    lengths = np.random.default_rng(0).integers(1, 900, 57)
    order, buckets = bucket_lengths(lengths)
    assert sorted(order.tolist()) == list(range(57))
    start = 0
    for count, width in buckets:
        members = lengths[order[start : start + count]]
        assert members.max() == width
        assert all(m >= MIN_FILL * width or width - m <= MAX_SLACK for m in members)
        start += count
    assert start == 57


def test_short_half_precision_sequences_agree_with_the_float32_kernel():
    model = randomized("qwen3")
    half = copy.deepcopy(model).to(torch.bfloat16)  # before its layers become those of float32
    micro = pack_micro_batch(MIXED, range(len(MIXED)))
    want = packed_log_probs(PackedModel(model), micro)
    got = packed_log_probs(PackedModel(half), micro)
    assert (got - want).abs().max() < 0.3
    assert (got - want).abs().mean() < 0.03


def test_a_response_of_length_zero_has_no_rows():
    batch = random_batch(prompts=[5, 3], responses=[[0], [4]])
    got = packed_log_probs(PackedModel(randomized("llama")), pack_micro_batch(batch, [0, 1]))
    assert got.shape == (4,)


def test_a_model_without_packed_attention_is_refused():
    model = eager_twin(build_model(family_config("qwen3"), seed=0))
    with pytest.raises(ConfigError, match="load_model"):
        PackedModel(model)


def test_scaled_logits_are_refused():
    model = build_model(family_config("llama"), seed=0)
    model.config.logit_scale = 0.5
    with pytest.raises(ConfigError, match=r"logit_scale=0\.5"):
        PackedModel(model)


def test_a_model_without_base_model_is_refused():
    model = build_model(family_config("llama"), seed=0)
    model.base_model_prefix = "language_model"  # as transformers' Llama4ForCausalLM, whose part is `model`
    with pytest.raises(ConfigError, match=r"base_model_prefix .*'language_model'"):
        PackedModel(model)


def test_a_forward_without_layout_is_refused():
    model = build_model(family_config("qwen3"), seed=0)
    with pytest.raises(TrainerError, match="no packed layout"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_soft_caps_on_attention_and_logits_are_applied():
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        sliding_window=7,
    )
    model = build_model(config, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    got = packed_log_probs(PackedModel(model), pack_micro_batch(MIXED, range(len(MIXED))))
    torch.testing.assert_close(got, plain_log_probs(eager_twin(model), MIXED), rtol=1e-5, atol=2e-5)


def pair(*, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(48, 72, bias=bias)
    fast = copy.deepcopy(plain)
    use_onednn(fast)
    if type(fast) is nn.Linear:
        pytest.skip("no oneDNN products here")
    return plain, fast


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (37,), (1, 37)], ids=str)
def test_output_and_gradients_are_those_of_a_plain_layer(rows, bias):
    plain, fast = pair(bias=bias)
    grad = torch.randn(*rows, 72)
    results = []
    for layer in (plain, fast):
        x = torch.linspace(-1, 1, 37 * 48).view(37, 48)[: rows[-1]].reshape(*rows, 48).clone().requires_grad_()
        out = layer(x)
        out.backward(grad)
        results.append([out, x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_output_may_be_written_into():
    plain, fast = pair(bias=True)
    x = torch.linspace(-1, 1, 3 * 48).view(1, 3, 48)
    for layer in (plain, fast):
        out = layer(x)
        out += 1
        out.square().sum().backward()
    torch.testing.assert_close(fast.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-5)


def test_a_frozen_layer_passes_gradients_on():
    _, fast = pair(bias=True)
    fast.requires_grad_(requires_grad=False)
    x = torch.randn(5, 48, requires_grad=True)
    fast(x).sum().backward()
    torch.testing.assert_close(x.grad, fast.weight.sum(0).expand(5, 48))
    assert fast.weight.grad is None


def test_other_dtypes_keep_their_layers():
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.bfloat16))
    use_onednn(model)
    assert not any(isinstance(layer, OneDnnLinear) for layer in model)


def test_the_compiler_traces_a_plain_linear_layer(monkeypatch):
    layer, x = OneDnnLinear(8, 4), torch.randn(3, 8)
    monkeypatch.setattr(packed_model, "_onednn", None)  # calling oneDNN would fail
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
