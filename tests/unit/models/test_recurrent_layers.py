"""Packed sequences of models with gated delta nets: no state reaches another sequence."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from furlong.core.batch import pack_micro_batch
from furlong.errors import TrainerError
from furlong.models.hf_model import build_model
from furlong.models.model_facts import delta_nets
from furlong.models.packed_layout import plan_layout
from furlong.models.packed_model import PackedModel
from models_zoo import VOCAB, family_config, packed_log_probs, plain_log_probs, random_batch

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"]
# Groups with a common prompt, lengths in several buckets, one longer than the chunk of the delta rule (64).
BATCH = random_batch(prompts=[5, 3, 30], responses=[[6, 2], [4], [47, 20]])
ROWS = list(range(len(BATCH)))


def config_of(family):
    if family != "olmo_hybrid":
        return family_config(family)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    widths = {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "vocab_size": VOCAB, "pad_token_id": 0}
    kinds = {"layer_types": ["linear_attention", "full_attention"], "linear_allow_neg_eigval": True}
    return AutoConfig.for_model("olmo_hybrid", max_position_embeddings=128, **sizes, **heads, **widths, **kinds)


def built(family, **options):
    model = build_model(config_of(family), seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return PackedModel(model, **options)


def plain_twin(packed, family):
    twin = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager", dtype=torch.float32)
    twin.load_state_dict(packed.model.state_dict())
    return twin


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_packing_changes_neither_log_probs_nor_gradients(family, share_prompts):
    packed = built(family, share_prompts=share_prompts)
    twin = plain_twin(packed, family)
    weights = torch.linspace(-1, 1, int(BATCH.response_lengths.sum()))
    results = []
    for model, log_probs in (
        (packed, packed_log_probs(packed, pack_micro_batch(BATCH, ROWS))),
        (twin, plain_log_probs(twin, BATCH)),
    ):
        (log_probs * weights).sum().backward()
        inner = getattr(model, "model", model) if model is packed else model
        results.append((log_probs.detach(), {name: each.grad for name, each in inner.named_parameters()}))
    (ours, grads), (theirs, expected) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("padded", [True, False])
def test_a_layer_computes_each_sequence_from_an_empty_state(padded):
    packed = built("qwen3_5_text")
    (net,) = delta_nets(packed.model)
    micro = pack_micro_batch(BATCH, ROWS)
    layout = plan_layout(micro, share_prompts=False, padded=padded)
    x = torch.randn(1, len(micro.tokens_T), 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    whole = net(x, packed=layout)[0]
    start, end = micro.cu_seqlens_S1[1:3].tolist()
    alone = type(net).__base__.forward(net, x[:, start:end])[0]
    torch.testing.assert_close(whole[start:end], alone, rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(whole[start:end].square().sum(), x)
    assert grad[0, start:end].abs().sum() > 0
    assert not grad[0, :start].any()
    assert not grad[0, end:].any()


def test_the_delta_rule_reads_offsets_without_padding_unless_prompts_are_shared():
    micro = pack_micro_batch(BATCH, ROWS)
    for padded in (True, False):
        layout = plan_layout(micro, share_prompts=False, padded=padded)
        assert layout.sequences.cu_S1.tolist() == micro.cu_seqlens_S1.tolist()
    shared = plan_layout(micro)
    assert len(shared.buckets) > 1
    assert shared.sequences.cu_S1.diff().tolist() == [width for count, width in shared.buckets for _ in range(count)]


def test_a_layer_without_a_layout_is_an_error():
    (net,) = delta_nets(built("qwen3_5_text").model)
    with pytest.raises(TrainerError, match="GatedDeltaNet received no layout"):
        net(torch.zeros(1, VOCAB, 32))
