"""Quantizes the weights of a Hugging Face folder, or makes them whole again, file by file.

At most one file of the result is in memory, and each tensor is read back and compared. config.json is written after
them, so that a folder which was not finished does not load.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from furlong.core.text import abbreviate
from furlong.core.weights import NamedTensor, checksum
from furlong.errors import CheckpointError, ConfigError
from furlong.files.tensor_file import read_file
from furlong.models.hf_folder import check_folder
from furlong.models.hf_model import part_name, write_index
from furlong.models.quantized_folder import folder_scheme
from furlong.models.stored_tensors import open_tensors
from furlong.models.untrained_tensors import is_with_vision
from furlong.quantization.fp8 import Fp8Blocks, Fp8Scaled
from furlong.quantization.ignore_list import NEVER_QUANTIZED, checked_ignore, is_ignored, module_of
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.scheme import QuantizationScheme, quantization_settings
from furlong.quantization.weight_format import QuantizationError, WeightFormat
from furlong.tools.calibration import Calibration, Parts, calibrated_parts
from furlong.tools.model_folder import StoredModel, read_model

MAX_FILE_BYTES = 4 << 30
COPIED = (".json", ".jinja", ".txt", ".model", ".py", ".tiktoken")
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote: numbers of all tensors, of quantized and calibrated weights, bytes before and after."""

    num_tensors: int
    num_quantized: int
    source_bytes: int
    num_bytes: int
    num_calibrated: int = 0


def quantize_folder(
    source: Path,
    target: Path,
    form: WeightFormat,
    *,
    ignore: Sequence[str] = (),
    defaults: Sequence[str] | None = None,
    calibration: Calibration | None = None,
) -> Converted:
    """Write a quantized copy of `source` into the existing folder `target`, and verify it.

    ignore: entries besides `defaults` (`NEVER_QUANTIZED`), as in compressed-tensors. calibration: weights are
    chosen for texts, which needs the whole model in memory. Raises CheckpointError, naming the
    tensor, for a weight that cannot be quantized, and ConfigError for a folder that is quantized, or of which nothing
    would be.
    """
    check_folder(source)
    model = read_model(source)
    if quantization_settings(model.config):
        raise ConfigError(f"{source} is quantized; give its bfloat16 model, or `furlong convert dequantize` it first")
    if is_with_vision(source):
        raise ConfigError(f"{source} has a vision encoder, which is not converted; give a text model")
    ignored = checked_ignore([*(NEVER_QUANTIZED if defaults is None else defaults), *ignore])
    candidates = {name for name, t in model.tensors.items() if name.endswith(".weight") and len(t.shape) == 2}
    names = frozenset(name for name in candidates if not is_ignored(name, ignored))
    if not names:
        raise ConfigError(f"{source}: the ignore list covers all {len(candidates)} weight matrices; use a shorter one")
    kinds = {model.tensors[name].dtype for name in names}
    if len(kinds) > 1 or not kinds <= FLOATS.keys():
        raise ConfigError(
            f"{source}: its weights are {', '.join(sorted(kinds))}; give a folder in one of {', '.join(FLOATS)}"
        )
    dtype = FLOATS[kinds.pop()]
    scheme = QuantizationScheme(_in_dtype(form, dtype), names, dtype)
    parts = {} if calibration is None else _calibrated(model, scheme, calibration)

    def quantized(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        for name, tensor in tensors:
            if name in parts:
                yield from ((f"{module_of(name)}.{part}", value) for part, value in parts[name].items())
                continue
            if name not in names:
                yield name, tensor
                continue
            try:
                yield from scheme.quantize(name, tensor)
            except QuantizationError as error:
                raise CheckpointError(f"{source}: {error}") from error

    settings = quantization_config(
        scheme.form, candidates - names, [e for e in ignored if any(is_ignored(n, [e]) for n in candidates)]
    )
    config = {**model.config, "quantization_config": settings}
    converted = _write(model, target, lambda file: quantized(_of_file(source / file)), config, len(names))
    return dataclasses.replace(converted, num_calibrated=len(parts))


def _calibrated(model: StoredModel, scheme: QuantizationScheme, calibration: Calibration) -> dict[str, Parts]:
    try:
        for name in scheme.names:
            scheme.parts(name, tuple(model.tensors[name].shape))
    except QuantizationError as error:
        raise CheckpointError(f"{model.folder}: {error}") from error
    return calibrated_parts(model.folder, scheme, calibration)


def dequantize_folder(source: Path, target: Path) -> Converted:
    """Write a copy of the quantized folder `source` with whole weights into the existing folder `target`."""
    check_folder(source)
    model = read_model(source)
    scheme = folder_scheme(source)
    if scheme is None:
        raise ConfigError(f"{source} is not quantized: config.json has no quantization_config")
    owners = {part: name for name in scheme.names for part in scheme.part_names(name)}
    first = {name: scheme.part_names(name)[0] for name in scheme.names}

    def whole(file: str) -> Iterator[NamedTensor]:
        with open_tensors(source) as tensors:  # the parts of a weight may be in several files
            for stored in (name for name, place in model.weight_map.items() if place == file):
                name = owners.get(stored, stored)
                if first.get(name, stored) == stored:
                    yield name, tensors.read(name)

    config = {key: value for key, value in model.config.items() if key != "quantization_config"}
    return _write(model, target, whole, config, len(scheme.names))


def _in_dtype(form: WeightFormat, dtype: torch.dtype) -> WeightFormat:
    """Return the format for weights in `dtype`: INT4 and FP8 per channel have scales in it."""
    if isinstance(form, Int4Groups):
        return dataclasses.replace(form, scale_dtype=dtype)
    return Fp8Scaled(form.per, dtype) if isinstance(form, Fp8Scaled) and form.per == "channel" else form


def _write(
    model: StoredModel,
    target: Path,
    tensors_of: Callable[[str], Iterator[NamedTensor]],
    config: dict[str, Any],
    num_quantized: int,
) -> Converted:
    written: dict[str, tuple[str, int]] = {}
    sums: dict[str, str] = {}
    files = list(dict.fromkeys(model.weight_map.values()))
    for file in files:
        batch: dict[str, torch.Tensor] = {}
        for name, tensor in tensors_of(file):
            if sum(each.nbytes for each in batch.values()) + tensor.nbytes > MAX_FILE_BYTES and batch:
                _save(target, batch, written)
                batch = {}
            batch[name] = tensor.contiguous()
            sums[name] = checksum(tensor)
        if batch:
            _save(target, batch, written)
    write_index(target, written)
    for path in sorted(model.folder.iterdir()):
        is_index = path.name.endswith(".index.json")
        is_own = is_index or path.name == "config.json"
        if path.is_file() and path.suffix in COPIED and not is_own:
            shutil.copyfile(path, target / path.name)
    _verify(target, sums)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    source_bytes = sum(tensor.num_bytes for tensor in model.tensors.values())
    return Converted(len(written), num_quantized, source_bytes, sum(size for _, size in written.values()))


def _save(target: Path, batch: dict[str, torch.Tensor], written: dict[str, tuple[str, int]]) -> None:
    number = len({file for file, _ in written.values()})
    try:
        save_file(batch, target / part_name(number), {"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write into {target}: {error}; free some space, or use another TARGET") from error
    written |= {name: (part_name(number), tensor.nbytes) for name, tensor in batch.items()}


def _of_file(path: Path) -> Iterator[NamedTensor]:
    try:
        yield from read_file(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; download it again") from error


def _verify(folder: Path, sums: dict[str, str]) -> None:
    files = sorted(folder.glob("*.safetensors"))
    wrong = [name for file in files for name, tensor in _of_file(file) if checksum(tensor) != sums.pop(name, "")]
    if wrong or sums:
        raise CheckpointError(
            f"{folder}: {len(wrong)} tensors differ from what was written and {len(sums)} are missing: "
            f"{abbreviate([*wrong, *sums])}; convert again, onto another disk"
        )


def quantization_config(form: WeightFormat, unquantized: Iterable[str], ignore: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a format, as SGLang and vLLM read it."""
    if isinstance(form, Fp8Blocks) or (isinstance(form, Fp8Scaled) and form.per == "tensor"):
        settings: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        if isinstance(form, Fp8Blocks):
            settings |= {"weight_block_size": list(form.block)} | (
                {"scale_fmt": "ue8m0"} if form.is_power_of_two else {}
            )
        return settings | {"modules_to_not_convert": sorted(map(module_of, unquantized))}
    is_int = isinstance(form, Int4Groups)
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    weights: dict[str, Any] = (
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": form.group_size}
        if is_int
        else {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}
    )
    weights |= {"symmetric": True, "dynamic": False, "actorder": None}
    weights["observer"] = form.observer if isinstance(form, Int4Groups) else "minmax"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None if is_int else activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if is_int else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "kv_cache_scheme": None,
        "ignore": list(ignore),
    }
