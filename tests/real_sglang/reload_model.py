"""python reload_model.py OLD,NEW,MODULE,CLASS...: weight updates of SGLang's own quantized models, on a CPU.

Each model loads the folder OLD and then, by `quantized_loading.load`, the tensors of NEW, and is compared with one that
loads NEW at its start. Another update then loads OLD again. The repacking of INT4 weights runs on GPUs only; here it is
a permutation that depends on its arguments. Writes NEW/reloaded.json: the parameters that differ or moved, and what two
updates end with: one without some tensors, and one that SGLang loads wrongly.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from load_model import initialize
from safetensors.torch import load_file

from furlong.sglang_layout.quantized_loading import header_of, load
from furlong.transfer.device_checksum import Checksums
from furlong.transfer.shared_memory import offsets
from furlong.weight_sync.transports.ipc import check_message

FP8 = "sglang.srt.layers.quantization.fp8"
WNA16 = "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16"


def repacked(packed: torch.Tensor, perm: torch.Tensor, size_k: int, size_n: int, num_bits: int) -> torch.Tensor:
    """Stand in for Marlin's repacking: the same number of elements in another shape and order."""
    del perm, num_bits  # a scalar type of sgl_kernel, which is absent
    assert packed.numel() == size_k * size_n // 8
    return packed.flatten().flip(0).reshape(size_k // 16, size_n * 2)


def repacked_experts(packed: torch.Tensor, perm: torch.Tensor, size_k: int, size_n: int, num_bits: int) -> torch.Tensor:
    """Stand in for Marlin's repacking of experts."""
    return torch.stack([repacked(each, perm, size_k, size_n, num_bits) for each in packed])


def patch_kernels() -> None:
    """Replace what runs on a GPU only."""
    dense, experts = importlib.import_module(WNA16), importlib.import_module(f"{WNA16}_moe")
    dense.gptq_marlin_repack = repacked
    experts.gptq_marlin_moe_repack = repacked_experts
    importlib.import_module(FP8)._is_cpu = False  # there it needs AMX, and rearranges as it does not on GPUs
    torch.cuda.empty_cache = lambda: None
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    for module in (dense, experts):
        module.marlin_make_workspace = lambda device, *_: torch.ones(8, dtype=torch.int32, device=device)


def built(folder: str, module: str, name: str) -> Any:
    """Return SGLang's model of a folder, loaded and rearranged as SGLang does at its start."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _get_quantization_config

    config = ModelConfig(model_path=folder, dtype="bfloat16")
    models = importlib.import_module(f"sglang.srt.models.{module}")
    quantization = _get_quantization_config(config, LoadConfig())
    model = getattr(models, name)(config.hf_config, quant_config=quantization)
    model.load_weights(iter(load_file(f"{folder}/model.safetensors").items()))
    for each in model.modules():
        if (method := getattr(each, "quant_method", None)) is not None:
            method.process_weights_after_loading(each)
    return model


def update(model: Any, tensors: list[tuple[str, torch.Tensor]], num_buckets: int) -> None:
    """Send tensors as the ipc transport does."""
    size = -(-len(tensors) // num_buckets)
    for index in range(num_buckets):
        some = tensors[index * size : (index + 1) * size]
        starts, total = offsets(some)
        buffer = torch.zeros(total, dtype=torch.uint8)
        for (_, tensor), begin in zip(some, starts, strict=True):
            data = tensor.contiguous().view(-1).view(torch.uint8)
            buffer[begin : begin + len(data)] = data
        header = header_of(some, starts, is_first=index == 0, is_last=index == num_buckets - 1)
        load(model, [(header, buffer)])


def error_of(model: Any, tensors: list[tuple[str, torch.Tensor]]) -> str:
    """Return the error that an update ends with."""
    try:
        update(model, tensors, 2)
    except RuntimeError as error:
        return str(error)
    return ""


def compare(model: Any, fresh: Any, places: dict[str, int]) -> dict[str, list[str]]:
    """Return the parameters that differ from those of a fresh model, and those that moved in memory."""
    loaded, right = dict(model.named_parameters()), dict(fresh.named_parameters())
    differ = [
        name
        for name in sorted(loaded.keys() | right.keys())
        if name not in loaded or name not in right or loaded[name].shape != right[name].shape
        or not torch.equal(loaded[name].detach().contiguous().view(-1).view(torch.uint8),
                           right[name].detach().contiguous().view(-1).view(torch.uint8))
    ]  # fmt: skip
    return {"differ": differ, "moved": [name for name, each in loaded.items() if each.data_ptr() != places[name]]}


def main(models: list[list[str]]) -> None:
    """Update each model and write what differs."""
    initialize(models[0][0])
    patch_kernels()
    for old, new, module, name in models:
        model, fresh = built(old, module, name), built(new, module, name)
        places = {each: parameter.data_ptr() for each, parameter in model.named_parameters()}
        tensors = sorted(load_file(f"{new}/model.safetensors").items())
        before = compare(model, fresh, places)["differ"]
        update(model, tensors, 3)
        found: dict[str, Any] = compare(model, fresh, places) | {"before": before}
        update(model, sorted(load_file(f"{old}/model.safetensors").items()), 3)
        found["repeated"] = compare(model, built(old, module, name), places)
        update(model, tensors, 3)
        workspaces = [each.workspace for layer in model.modules() for each in (layer, getattr(layer, "scheme", None))
                      if isinstance(getattr(each, "workspace", None), torch.Tensor)]  # fmt: skip
        found["locks"] = sum(int(each.sum()) for each in workspaces)
        parts = [pair for pair in tensors if ".layers.1." not in pair[0]]
        found["without_a_layer"] = error_of(model, parts)
        update(model, tensors, 1)
        found["after_a_failure"] = compare(model, fresh, places)
        found["checked"] = [checked(model, 0), checked(model, 1)]
        found["loaded_wrongly"] = error_of(spoiled(model), tensors)
        Path(new, "reloaded.json").write_text(json.dumps(found))


def checked(model: Any, change: int) -> str:
    """Compare the unquantized parameters by their checksums, one of which may be wrong; return the error."""
    from sglang.srt.utils import MultiprocessingSerializer

    sums = Checksums()
    for name, parameter in model.named_parameters():
        if "norm" in name or "embed_tokens" in name:
            sums.add(name, [parameter.detach()])
    right = {name: ["0" * 16, digest] for name, digest in sums.digests().items()}
    if change:
        right["model.layers.1.input_layernorm.weight"].pop()
    try:
        load(model, MultiprocessingSerializer.deserialize(check_message(right)))
    except RuntimeError as error:
        return str(error)
    return ""


def spoiled(model: Any) -> Any:
    """Have a model change one bit of every quantized weight after it has loaded it."""
    load_weights = model.load_weights

    def load_and_spoil(pairs: Any) -> None:
        load_weights(pairs)
        for name, parameter in model.named_parameters():
            is_weight = name.endswith(
                ("proj.weight_packed", "proj.weight", "experts.w13_weight_packed", "experts.w13_weight")
            )
            if is_weight and parameter.is_contiguous():  # those of other blocks have the kernels' layout
                parameter.data.view(torch.uint8).view(-1)[0] ^= 1

    model.load_weights = load_and_spoil
    return model


if __name__ == "__main__":
    main([word.split(",") for word in sys.argv[1:]])
