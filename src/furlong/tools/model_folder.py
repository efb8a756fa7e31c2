"""Checks a Hugging Face model folder by its index and the headers of its shards, without reading weights."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.model_config import read_json
from furlong.core.text import abbreviate
from furlong.errors import CheckpointError, ConfigError
from furlong.files.tensor_file import Shard, StoredTensor, read_header
from furlong.models.hf_folder import read_weight_map
from furlong.quantization.ignore_list import NEVER_QUANTIZED, checked_ignore, is_ignored, module_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHOWN = 5
COMPARED = 256  # rows of two tensors that are compared
_LAYER = re.compile(r"(?P<stack>.*?\b(?:layers|h|blocks)\.)(?P<number>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True)
class StoredModel:
    """The index, headers and config.json of a model folder.

    `weight_map`: tensor -> file name, from the index, or else from the only file. `shards`: files with a readable
    header. `damaged`: file name -> its problem. `config`: {} without a config.json.
    """

    folder: Path
    config: Mapping[str, Any]
    weight_map: Mapping[str, str]
    shards: Mapping[str, Shard]
    damaged: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors in readable headers."""
        return {name: tensor for shard in self.shards.values() for name, tensor in shard.tensors.items()}

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of the config, which multimodal models nest."""
        return cast("Mapping[str, Any]", self.config.get("text_config") or self.config)

    @property
    def num_parameters(self) -> int:
        """Number of elements in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def read_model(folder: Path) -> StoredModel:
    """Read a folder's index, headers and config. Raises CheckpointError or ConfigError for damaged JSON."""
    index_path = folder / INDEX
    names: Iterable[str]
    weight_map: dict[str, str] = {}
    if index_path.is_file():
        weight_map = read_weight_map(index_path)
        names = sorted(set(weight_map.values()))
    else:
        names = [SINGLE]
    shards: dict[str, Shard] = {}
    damaged: dict[str, str] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        try:
            shards[name] = read_header(path)
        except CheckpointError as error:
            damaged[name] = str(error)
    if not weight_map:
        weight_map = {tensor: name for name, shard in shards.items() for tensor in shard.tensors}
    return StoredModel(folder, read_json(folder / "config.json"), weight_map, shards, damaged)


def has_same_values(model: StoredModel, one: str, other: str) -> bool:
    """Compare two stored matrices: dtype, shape, and `COMPARED` rows, spread evenly over them."""
    tensors = model.tensors[one], model.tensors[other]
    if tensors[0] != tensors[1]:
        return False
    import torch  # imported here, as most folders need no comparison

    from furlong.files.tensor_file import TensorFile

    holders = [next(s.path for s in model.shards.values() if name in s.tensors) for name in (one, other)]
    rows = slice(None, None, -(-tensors[0].shape[0] // COMPARED))
    with TensorFile(holders[0]) as first, TensorFile(holders[1]) as second:
        parts = [file.mapped(name)[rows].contiguous() for file, name in ((first, one), (second, other))]
        return torch.equal(*(part.view(torch.uint8) for part in parts))


def check_model(folder: Path | str, *, id: str = "CKPT04") -> list[Diagnosis]:
    """Return the diagnoses of a folder's weights.

    Missing files and layers are reported under row `id`: QNT02 after a quantizing conversion.
    """
    folder = Path(folder)
    try:
        model = read_model(folder)
    except (CheckpointError, ConfigError) as error:
        finding, _, remedy = str(error).rpartition("; ")
        if not finding:
            finding, remedy = remedy, _again(folder)
        return [diagnosis(id, finding, remedy=remedy, evidence={"folder": str(folder), "unread": str(error)})]
    return [*completeness(model, id=id), *quantization(model)]


def completeness(model: StoredModel, *, id: str = "CKPT04") -> list[Diagnosis]:
    """Find missing or damaged shards, entries without a tensor, and missing or incomplete layers."""
    again = _again(model.folder)
    problems: list[Diagnosis] = []

    def add(finding: str, evidence: Mapping[str, Any], **details: Any) -> None:
        seen = {"folder": str(model.folder), **evidence}
        details.setdefault("remedy", again)
        problems.append(diagnosis(id, f"{model.folder}: {finding}", evidence=seen, **details))

    named = sorted(set(model.weight_map.values()))
    if missing := [name for name in named if name not in model.shards and name not in model.damaged]:
        lost = sum(name in missing for name in model.weight_map.values())
        which = abbreviate(missing, SHOWN)
        finding = f"{len(missing)} of {len(named)} shards of {INDEX} missing: {which}; {lost} tensors lost"
        add(finding, {"missing": missing, "num_shards": len(named), "num_tensors_lost": lost})
    for name, why in model.damaged.items():
        if "LFS" in why:
            cause = "The repository was cloned without Git LFS."
            add(why, {"shard": name}, cause=cause, remedy=f"`git lfs pull` in {model.folder}, or {again}")
        else:
            add(why, {"shard": name})
    stored = model.tensors
    elsewhere = {
        t: name for t, name in model.weight_map.items() if name in model.shards and t not in model.shards[name].tensors
    }
    if moved := [t for t in elsewhere if t in stored]:
        holder = next(name for name, shard in model.shards.items() if moved[0] in shard.tensors)
        finding = (
            f"{INDEX} names the wrong shard for {len(moved)} tensors: {moved[0]} is in {holder}, not in "
            f"{elsewhere[moved[0]]}"
        )
        cause = "Shards were renamed, or the index and the shards are of two saves."
        add(finding, {"tensors": moved[:SHOWN], "num_tensors": len(moved)}, cause=cause)
    lacking = [t for t in elsewhere if t not in stored]
    if lacking:
        finding = f"{INDEX} lists {len(lacking)} tensors that no shard contains: {abbreviate(lacking, SHOWN)}"
        add(finding, {"tensors": lacking[:SHOWN], "num_tensors": len(lacking)})
    if absent := missing_layers(model.weight_map, model.text_config):
        count = model.text_config["num_hidden_layers"]
        add(f"no tensors for layers {_ranges(absent)} of {count}", {"layers": absent, "num_hidden_layers": count})
    return problems


def missing_layers(names: Iterable[str], config: Mapping[str, Any]) -> list[int]:
    """Return the layers below num_hidden_layers without tensors. [] for models without numbered layers."""
    count = config.get("num_hidden_layers")
    stacks = _stacks(names)
    if not isinstance(count, int) or not stacks:
        return []
    longest = max(stacks.values(), key=len)
    if len(longest) < count / 2 and 0 not in longest:
        return []  # the numbered layers belong to another part
    return [number for number in range(count) if number not in longest]


def _stacks(names: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """Group tensor names: prefix such as `model.layers.` -> layer number -> rest of the names."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        if match := _LAYER.fullmatch(name):
            stacks[match["stack"]][int(match["number"])].add(match["rest"])
    return stacks


# ---- quantization

_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")
_FLOATS = ("F16", "BF16", "F32")
# Matrices that engines never load quantized, whatever the ignore list says; compressed-tensors must list some of them.
_NEVER_LINEAR = re.compile(
    r"(^|\.)(lm_head|embed_tokens|wte|wpe|word_embeddings|gate|router|shared_expert_gate|eh_proj)\.weight"
)


def quantization(model: StoredModel) -> list[Diagnosis]:
    """Check a model with a quantization_config (QNT01, QNT02); [] for others."""
    settings = cast("Mapping[str, Any]", model.config.get("quantization_config") or {})
    if not settings:
        return []
    key = "ignore" if settings.get("quant_method") == "compressed-tensors" else "modules_to_not_convert"
    entries = settings.get(key) or ()
    ignore = [str(entry) for entry in entries] if isinstance(entries, (list, tuple)) else []
    place = f"{model.folder}/config.json: quantization_config.{key}"
    try:
        checked_ignore(ignore)
    except ConfigError as error:
        remedy = f"correct the pattern in quantization_config.{key}"
        return [diagnosis("QNT01", f"{place}: {error}", remedy=remedy)]
    found = [*_unprotected(model, settings, ignore, key), *_wrongly_quantized(model, ignore, key)]
    return [*found, *_without_companions(model, settings)]


def _unprotected(model: StoredModel, settings: Mapping[str, Any], ignore: list[str], key: str) -> Iterator[Diagnosis]:
    """QNT01: two-dimensional weights that are stored unquantized, but not covered by the ignore list."""
    open_weights = [
        name
        for name, tensor in model.tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and tensor.dtype in _FLOATS
        if not is_ignored(name, ignore)
    ]
    is_compressed = settings.get("quant_method") == "compressed-tensors"
    if not _quantized_weights(model):  # not quantized yet: report only what must never be
        open_weights = [name for name in open_weights if is_compressed and _NEVER_LINEAR.search(name)]
    elif not is_compressed:  # engines know routers and embeddings of FP8 models
        open_weights = [name for name in open_weights if not is_ignored(name, NEVER_QUANTIZED)]
    if not open_weights or settings.get("quant_method") not in ("compressed-tensors", "fp8"):
        return
    patterns = sorted({_pattern_of(name) if is_compressed else module_of(name) for name in open_weights})
    yield diagnosis(
        "QNT01",
        f"{model.folder}/config.json: quantization_config.{key} does not cover {len(open_weights)} two-dimensional "
        f"weights that are stored unquantized: {abbreviate(sorted(open_weights), SHOWN)}",
        remedy=f"add to quantization_config.{key}: " + ", ".join(json.dumps(pattern) for pattern in patterns),
        evidence={"folder": str(model.folder), "weights": sorted(open_weights)[:SHOWN], "patterns": patterns},
    )


def _quantized_weights(model: StoredModel) -> list[str]:
    packed = [name for name in model.tensors if name.endswith(".weight_packed")]
    eight = [n for n, tensor in model.tensors.items() if n.endswith(".weight") and tensor.dtype in _EIGHT_BITS]
    return sorted([*(name.removesuffix("_packed") for name in packed), *eight])


def _wrongly_quantized(model: StoredModel, ignore: list[str], key: str) -> Iterator[Diagnosis]:
    """QNT01: weights that are stored quantized, but that the ignore list covers or engines load unquantized."""
    weights = _quantized_weights(model)
    never = [name for name in weights if _NEVER_LINEAR.search(name)]
    if never:
        yield diagnosis(
            "QNT01",
            f"{model.folder}: {len(never)} weights are stored quantized that engines load unquantized (routers, "
            f"embeddings, output layers): {abbreviate(never, SHOWN)}",
            cause="The conversion quantized every matrix, or its ignore list was incomplete.",
            remedy="convert the bfloat16 model again with `furlong convert hf-to-fp8` or `hf-to-int4`",
            evidence={"folder": str(model.folder), "weights": never[:SHOWN]},
        )
    covered = [name for name in weights if name not in never and is_ignored(name, ignore)]
    if covered:
        entries = [entry for entry in ignore if any(is_ignored(name, [entry]) for name in covered)]
        yield diagnosis(
            "QNT01",
            f"{model.folder}/config.json: quantization_config.{key} covers {len(covered)} weights that are stored "
            f"quantized: {abbreviate(covered, SHOWN)}",
            cause="The list is of another conversion. Engines build these layers unquantized and skip what is stored.",
            remedy=f"remove from quantization_config.{key}, or narrow: {', '.join(json.dumps(e) for e in entries)}",
            evidence={"folder": str(model.folder), "weights": covered[:SHOWN], "entries": entries},
        )


def _pattern_of(name: str) -> str:
    module = name.removesuffix(".weight")
    if match := _LAYER.fullmatch(module):
        rest = re.sub(r"\b\d+\b", "#", match["rest"])
        return "re:.*" + re.escape(rest).replace(r"\#", r"\d+") + r"(\.weight)?$"
    return module


def _without_companions(model: StoredModel, settings: Mapping[str, Any]) -> Iterator[Diagnosis]:
    """QNT02: quantized weights without their scale, shape or zero point."""
    tensors = model.tensors
    needed = ["weight_scale", "weight_shape"]
    groups = cast("Mapping[str, Any]", settings.get("config_groups") or {})
    if any((group.get("weights") or {}).get("symmetric") is False for group in groups.values()):
        needed.append("weight_zero_point")
    lacking: list[str] = []
    for name, tensor in tensors.items():
        if name.endswith(".weight_packed"):
            base = name.removesuffix("weight_packed")
            lacking += [base + part for part in needed if base + part not in tensors]
        elif name.endswith(".qweight"):
            base = name.removesuffix("qweight")
            others = ("qzeros", "scales", "g_idx") if settings.get("quant_method") == "gptq" else ("qzeros", "scales")
            lacking += [base + part for part in others if base + part not in tensors]
        elif name.endswith(".weight") and tensor.dtype in _EIGHT_BITS:
            scales = [f"{name}_scale", f"{name}_scale_inv"]
            lacking += [] if any(scale in tensors for scale in scales) else scales[:1]
    if lacking:
        yield diagnosis(
            "QNT02",
            f"{model.folder}: {len(lacking)} tensors of quantized weights are missing: "
            f"{abbreviate(sorted(lacking), SHOWN)}",
            remedy=_again(model.folder),
            evidence={"folder": str(model.folder), "tensors": sorted(lacking)[:SHOWN], "num_tensors": len(lacking)},
        )


# ---- formatting


def _again(folder: Path) -> str:
    return f"download or convert {folder} again, then run `furlong check {folder}`"


def _ranges(numbers: list[int]) -> str:
    """Format numbers as ranges: [3, 4, 5, 9] is "3-5, 9"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
