"""The gated delta rule on CUDA: flash-linear-attention in bfloat16 against PyTorch's operations in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from furlong.core.batch import pack_micro_batch
from furlong.models.delta_rule import PackedSequences, chunked_delta_rule, delta_kernel, gated_delta_rule
from furlong.models.hf_model import build_model
from furlong.models.model_facts import delta_nets
from furlong.models.packed_layout import plan_layout
from furlong.models.packed_model import PackedModel
from models_zoo import family_config, random_batch

HEADS, WIDTH = 4, 64
LENGTHS = (1, 63, 64, 65, 200, 7)
LIMIT = 2e-2  # of relative differences: bfloat16 has 8 bits
NAMES = ("output", "q", "k", "v", "g", "beta")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def packed(lengths: tuple[int, ...]) -> PackedSequences:
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return PackedSequences.of(offsets, torch.device("cuda"))


def inputs(num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, logarithms of decays, and betas."""
    torch.manual_seed(0)
    columns = [torch.randn(num_tokens, HEADS, WIDTH, device="cuda", dtype=dtype) for _ in range(3)]
    decays = -torch.rand(num_tokens, HEADS, device="cuda")
    betas = torch.rand(num_tokens, HEADS, device="cuda", dtype=dtype)
    return [*columns, decays, betas]


def values_and_gradients(rule, values: list[Tensor], sequences: PackedSequences) -> list[Tensor]:
    leaves = [value.detach().clone().requires_grad_() for value in values]
    out = rule(*leaves, sequences)
    torch.manual_seed(1)
    out.float().backward(torch.randn(out.shape, device="cuda"))
    return [out.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]


def gaps(actual: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Relative differences by name."""
    pairs = zip(NAMES, actual, expected, strict=True)
    return {name: float((a - e).norm() / e.norm()) for name, a, e in pairs}


def test_values_and_gradients_in_bfloat16_are_those_of_torch(caplog):
    with caplog.at_level("INFO"):
        if delta_kernel("cuda", torch.bfloat16) != "flash-linear-attention":
            pytest.skip(caplog.text or "its kernels are not used here")
    values, sequences = inputs(sum(LENGTHS), torch.bfloat16), packed(LENGTHS)
    expected = values_and_gradients(chunked_delta_rule, [value.float() for value in values], sequences)
    actual = values_and_gradients(gated_delta_rule, values, sequences)
    by_name = gaps(actual, expected)
    assert {name: gap for name, gap in by_name.items() if not gap < LIMIT} == {}


def test_float32_is_computed_as_on_a_cpu():
    values, sequences = inputs(sum(LENGTHS), torch.float32), packed(LENGTHS)
    assert delta_kernel("cuda", torch.float32) == "torch"
    on_cpu = PackedSequences.of(sequences.cu_S1.cpu(), torch.device("cpu"))
    expected = chunked_delta_rule(*(value.cpu() for value in values), on_cpu)
    torch.testing.assert_close(gated_delta_rule(*values, sequences).cpu(), expected, rtol=1e-5, atol=1e-5)


def test_no_state_reaches_the_next_sequence():
    values, sequences = inputs(sum(LENGTHS), torch.bfloat16), packed(LENGTHS)
    together = gated_delta_rule(*values, sequences)
    start = 0
    for length in LENGTHS:
        alone = gated_delta_rule(*(value[start : start + length] for value in values), packed((length,)))
        torch.testing.assert_close(together[start : start + length], alone, rtol=0, atol=1e-2)
        start += length


def test_a_layer_of_qwen3_next_in_bfloat16_computes_what_it_does_in_float32():
    config = family_config("qwen3_next")
    config.linear_key_head_dim = config.linear_value_head_dim = WIDTH
    model = PackedModel(build_model(config, seed=3).to("cuda"), share_prompts=False)
    net = delta_nets(model.model)[0]
    batch = random_batch(prompts=[5, 3, 30], responses=[[6, 2], [4], [80, 20]])
    rows = list(range(len(batch)))
    layout = plan_layout(pack_micro_batch(batch, rows, device="cuda"), share_prompts=False, padded=False)
    generator = torch.Generator("cuda").manual_seed(1)
    x_1TD = torch.randn(1, int(batch.lengths.sum()), config.hidden_size, device="cuda", generator=generator)
    with torch.no_grad():
        expected = net(x_1TD, packed=layout)
        actual = net.to(torch.bfloat16)(x_1TD.to(torch.bfloat16), packed=layout)
    gap = (actual.float() - expected).norm() / expected.norm()
    assert float(gap) < LIMIT
