"""Record what the compressed-tensors library makes of some weights: python scripts/make_quantization_golden.py.

Writes tests/golden/quantized.safetensors, with the library's version. Run it in an environment with SGLang
(`make sglang-cpu`), which includes the library: PYTHONPATH=.sglang-cpu.
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
from torch import Tensor

TARGET = Path(__file__).resolve().parent.parent / "tests" / "golden" / "quantized.safetensors"
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


def main() -> None:
    """Write the weights and the library's results."""
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
        TARGET,
        metadata={"compressed-tensors": compressed_tensors.__version__},
    )


if __name__ == "__main__":
    main()
