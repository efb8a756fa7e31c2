"""The kernels that quantize weights on a GPU: their results are those of a CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from furlong.quantization.fp8 import Fp8Blocks
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.weight_format import QuantizationError, has_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not has_kernels(torch.zeros(1, device="cuda")), reason="needs a GPU with FP8"
    ),
]
FORMS = [Fp8Blocks(), Fp8Blocks((64, 128)), Int4Groups(32), Int4Groups(128), Int4Groups(64, torch.float16)]


def hostile(rows, columns, dtype):
    """Weights with zeros, one huge value, tiny ones and ties."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.03
    weight[: rows // 4, : columns // 4] = 0
    weight[rows // 2, columns // 2] = 3e4
    weight[-1] *= 1e-6
    weight[1] = torch.arange(columns) % 16 / 2.0
    return weight.to(dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (200, 384), (33, 640), (4096, 2560)], ids=str)
def test_parts_equal_those_of_a_cpu(form, shape):
    weight = hostile(*shape, torch.float16 if getattr(form, "scale_dtype", None) == torch.float16 else torch.bfloat16)
    right, ours = form.quantize(weight), form.quantize(weight.cuda())
    assert right.keys() == ours.keys()
    for name, part in right.items():
        assert part.dtype == ours[name].dtype
        assert torch.equal(part.view(torch.uint8), ours[name].cpu().view(torch.uint8)), name


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_value_without_a_number_is_refused(form, value):
    weight = hostile(128, 256, torch.bfloat16).cuda()
    weight[100, 200] = value
    with pytest.raises(QuantizationError, match="1 of"):
        form.quantize(weight)
