"""Record what compressed-tensors and SGLang make of some weights: python scripts/make_quantization_golden.py.

Writes tests/golden/quantized.safetensors (FP8 and INT4 of compressed-tensors) and calibrated.safetensors (AWQ and GPTQ
as SGLang's own tests of kernels make and read them), with the version of the library. Run it in an environment with
SGLang (`make sglang-cpu`), which includes both: PYTHONPATH=tests/real_sglang/standins:.sglang-cpu.
"""

from __future__ import annotations

from pathlib import Path

import compressed_tensors  # pyright: ignore[reportMissingImports]  # of SGLang's environment
import torch
from compressed_tensors.compressors.pack_quantized.helpers import (  # pyright: ignore[reportMissingImports]
    pack_to_int32,
)
from compressed_tensors.quantization import QuantizationArgs  # pyright: ignore[reportMissingImports]
from compressed_tensors.quantization.lifecycle.forward import quantize  # pyright: ignore[reportMissingImports]
from compressed_tensors.quantization.utils import calculate_qparams  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file
from sglang.kernels.ops.quantization.awq_triton import (  # pyright: ignore[reportMissingImports]
    awq_dequantize_decomposition,
)
from sglang.srt.layers.quantization.utils import (  # pyright: ignore[reportMissingImports]
    pack_cols,
    pack_rows,
    permute_rows,
)
from sglang.version import __version__ as sglang_version  # pyright: ignore[reportMissingImports]
from torch import Tensor

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
SHAPES = {"plain": (16, 256), "odd": (5, 384), "row": (1, 128)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights() -> dict[str, Tensor]:
    """Return random weights and hostile ones: zeros, one huge value, tiny values, one sign."""
    generator = torch.Generator().manual_seed(0)
    cases = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in SHAPES.items()}
    cases["zeros"] = torch.zeros(4, 128)
    cases["huge"] = cases["plain"].clone()
    cases["huge"][3, 17] = 60000.0
    cases["tiny"] = cases["plain"] * 1e-6
    cases["one sign"] = -cases["plain"].abs()
    cases["ties"] = torch.arange(-1024, 1024).view(8, 256) / 128
    return cases


def awq() -> dict[str, Tensor]:
    """Return parts with random bits, and the weight [rows, columns] that SGLang reads from them."""
    generator = torch.Generator().manual_seed(1)
    words = [
        torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int()
        for shape in ((64, 6), (2, 6))
    ]
    scales = (torch.rand(2, 48, generator=generator) * 0.1).half()
    whole = awq_dequantize_decomposition(words[0], scales, words[1])
    return {"qweight": words[0], "qzeros": words[1], "scales": scales, "weight": whole.t()}


def gptq(bits: int, group_size: int = 32, *, act_order: bool = False) -> dict[str, Tensor]:
    """Return random integers, packed by SGLang, with scales, and the weight [rows, columns] that they stand for."""
    generator = torch.Generator().manual_seed(2)
    columns, rows, zero = 64, 48, 2 ** (bits - 1)
    size = columns if group_size == -1 else group_size
    integers = torch.randint(0, 2**bits, (columns, rows), generator=generator, dtype=torch.int32)
    scales = (torch.rand(columns // size, rows, generator=generator) * 0.1).half()
    whole = (integers - zero).half() * scales.repeat_interleave(size, 0)
    group_of = torch.arange(columns, dtype=torch.int32) // size
    if act_order:
        order = torch.randperm(columns, generator=generator)
        whole, integers, group_of, _ = permute_rows(integers, whole, size, order)
    zeros = torch.full((len(scales), rows), zero - 1, dtype=torch.int32)  # version 1 subtracts one
    return {
        "qweight": pack_rows(integers, bits, columns, rows), "qzeros": pack_cols(zeros, bits, len(scales), rows),
        "scales": scales, "g_idx": group_of, "weight": whole.t(),
    }  # fmt: skip


def record_calibrated() -> None:
    """Write AWQ and GPTQ."""
    cases = {"awq": awq(), "gptq-4": gptq(4), "gptq-8": gptq(8), "gptq-4-act-order": gptq(4, act_order=True)}
    cases["gptq-4-one-group"] = gptq(4, -1)
    save_file(
        {f"{case}/{part}": value.contiguous() for case, parts in cases.items() for part, value in parts.items()},
        GOLDEN / "calibrated.safetensors",
        metadata={"sglang": sglang_version},
    )


def record_rounded() -> None:
    """Write FP8 and INT4: the weights and the library's results."""
    recorded: dict[str, Tensor] = {}
    for case, values in weights().items():
        for dtype in DTYPES:
            weight = values.to(dtype)
            name = f"{case}/{str(dtype).removeprefix('torch.')}"
            recorded[f"{name}/weight"] = weight
            for size in (32, 128):
                args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=size, symmetric=True)
                groups = weight.unflatten(1, (-1, size))
                scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
                rounded = quantize(weight, scale, None, args, dtype=torch.int8)
                recorded[f"{name}/int4-{size}/weight_packed"] = pack_to_int32(rounded, 4)
                recorded[f"{name}/int4-{size}/weight_scale"] = scale
            for strategy in ("channel", "tensor"):
                args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True)
                axis = {"channel": (1,), "tensor": (0, 1)}[strategy]
                least, most = weight.amin(axis, keepdim=True), weight.amax(axis, keepdim=True)
                scale, _ = calculate_qparams(least, most, args)
                rounded = quantize(weight, scale, None, args, dtype=torch.float8_e4m3fn)
                recorded[f"{name}/fp8-{strategy}/weight"] = rounded.view(torch.uint8)
                recorded[f"{name}/fp8-{strategy}/weight_scale"] = scale
    save_file(
        {name: tensor.contiguous() for name, tensor in recorded.items()},
        GOLDEN / "quantized.safetensors",
        metadata={"compressed-tensors": compressed_tensors.__version__},
    )


if __name__ == "__main__":
    record_rounded()
    record_calibrated()
