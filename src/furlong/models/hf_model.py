"""Load, build and save Hugging Face models. Nothing is downloaded; no remote code runs."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from furlong.core.model_config import RANDOM
from furlong.core.text import abbreviate
from furlong.errors import CheckpointError, ConfigError
from furlong.models.hf_config import load_config, load_whole_config, register_model, unreadable_errors, without_dropout
from furlong.models.hf_folder import TOKENIZER_FILES, WEIGHT_FILES, check_folder
from furlong.models.model_facts import check_attention
from furlong.models.packed_attention import IMPLEMENTATION
from furlong.models.stored_tensors import StoredTensors, open_tensors
from furlong.models.untrained_tensors import is_untrained, is_with_vision, text_name

log = logging.getLogger(__name__)

# Files besides config and weights; copied unchanged when a trained model is saved.
COMPANIONS = (
    *TOKENIZER_FILES,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "tiktoken.model",
)
BUILD_ERRORS = (ValueError, LookupError, TypeError, RuntimeError, ArithmeticError, AttributeError, AssertionError)
_unsplit_names = WeakKeyDictionary[PreTrainedModel, dict[str, str]]()  # tensor name -> name in the checkpoint


def load_model(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    without_head: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in `dtype`, with packed attention and dropout off. Quantized weights become whole.

    without_head: the folder may lack the output head, which the caller replaces. Raises ConfigError if the folder is
    not a model, its weights are quantized in an unsupported format, or the family does not support packed attention,
    CheckpointError if weights are missing or of other shapes.
    """
    path = check_folder(folder, weights=True)
    config = without_dropout(load_config(path))
    model = load_network(path, config, dtype=dtype, attn_implementation=IMPLEMENTATION, without_head=without_head)
    check_attention(model)
    torch.nn.Module.to(model, device=device)
    return model


def load_network(
    path: Path, config: PretrainedConfig, *, dtype: torch.dtype, without_head: bool = False, **options: Any
) -> PreTrainedModel:
    """Load the model of a config with the weights of a folder; `options` are those of from_pretrained.

    Tensors are read into new memory. Raises as `load_model`.
    """
    transformers.utils.logging.disable_progress_bar()
    reporter = logging.getLogger("transformers.modeling_utils")  # of keys, which are judged below
    level = reporter.level
    reporter.setLevel(logging.ERROR)
    with open_tensors(path) as tensors:
        state = {name: _UnreadTensor(tensors, name) for name in sorted(tensors.names)}
        try:
            loader: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            model, info = cast(
                "tuple[PreTrainedModel, dict[str, Any]]",
                loader.from_pretrained(
                    None,
                    state_dict=state,
                    config=config,
                    dtype=dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported below with their names
                    **options,
                ),
            )
        except CheckpointError:
            raise
        except (KeyError, AssertionError) as error:
            raise _unbuildable(path, config, error) from error
        except (*unreadable_errors(), RuntimeError) as error:
            unread = next((each.error for each in state.values() if each.error is not None), None)
            raise unread or CheckpointError(
                f"cannot load the weights of {path}: {type(error).__name__}: {error}"
            ) from error
        finally:
            reporter.setLevel(level)
    head = model.get_output_embeddings() if without_head else None
    optional = {name for name, parameter in model.named_parameters() if head is not None and parameter is head.weight}
    bad = {kind: sorted({*map(str, info.get(kind) or ())} - optional) for kind in ("missing_keys", "mismatched_keys")}
    if any(bad.values()):
        files = abbreviate(sorted(file.name for file in path.glob("*.safetensors")), 3)
        if "score.weight" in (info.get("unexpected_keys") or ()):
            raise CheckpointError(
                f"{path} is a value model or a classifier, with a head named score; give a language model, or this one "
                "to --critic-load"
            )
        raise CheckpointError(
            f"the weights in {path} ({files}) do not fit its config.json: "
            + "; ".join(f"{kind} {len(keys)}, first {keys[:3]}" for kind, keys in bad.items() if keys)
            + ". Training would start from random values there; give a complete checkpoint"
            + (
                ", or set tie_word_embeddings to true if the model ties them"
                * (bad["missing_keys"] == ["lm_head.weight"])
            )
        )
    unexpected = sorted(name for name in info.get("unexpected_keys") or () if not is_untrained(name, config))
    if unexpected and not without_head:
        log.warning("%s contains %d tensors that the model does not use: %s", path, len(unexpected), unexpected[:5])
    return model


def build_model(config: PretrainedConfig, *, seed: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a model with random weights that depend only on `seed`; the global random state is unchanged."""
    register_model(type(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            without_dropout(config), attn_implementation=IMPLEMENTATION, dtype=torch.float32, trust_remote_code=False
        )
    torch.nn.Module.to(model, dtype=dtype)
    return model


def build_empty(folder: Path | str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build the model of a folder on the meta device. Raises ConfigError if config.json describes no such model."""
    config = without_dropout(load_config(folder))
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=IMPLEMENTATION, dtype=dtype, trust_remote_code=False
            )
    except BUILD_ERRORS as error:
        raise _unbuildable(Path(folder), config, error) from error


def _unbuildable(path: Path, config: PretrainedConfig, error: Exception) -> ConfigError:
    if error.args == (IMPLEMENTATION,):
        return ConfigError(
            f"{path}: {config.model_type} in transformers has its own attention, which cannot be replaced by packed "
            "attention; this model family cannot be trained, use another model"
        )
    return ConfigError(
        f"{path / 'config.json'} does not describe a model that transformers {transformers.__version__} can build "
        f"({type(error).__name__}: {error}); correct that value, or use the config.json that belongs to the weights"
    )


def misfits(
    folder: Path | str, stored: Mapping[str, tuple[int, ...]]
) -> tuple[list[str], dict[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Compare the stored tensors, by name and shape, with those that the model of a folder needs.

    Returns the missing names, and (stored, needed) shapes of those that differ. Fused experts may be stored whole or
    split, names with or without the prefix of the base model, and either of two tied tensors suffices. Raises
    ConfigError if config.json describes no model.
    """
    model = build_empty(folder)
    stored = {text_name(name): shape for name, shape in stored.items()}
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    optional = [*(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
    prefix = f"{model.base_model_prefix}."

    def shape_of(name: str) -> tuple[int, ...] | None:
        names = (name, name.removeprefix(prefix), *(other for pair in tied.items() for other in pair if name in pair))
        return next((stored[each] for each in names if each in stored), None)

    rest = {name: tensor for name, tensor in named_tensors(model) if shape_of(name) != tuple(tensor.shape)}
    missing: list[str] = []
    other: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, needed in shapes_on_disk(model, rest).items():
        actual = shape_of(name)
        if actual is None and not any(re.search(pattern, name) for pattern in optional):
            missing.append(name)
        elif actual is not None and actual != needed:
            other[name] = (actual, needed)
    return missing, other


def shapes_on_disk(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes with which a checkpoint stores these tensors of `model`."""
    return {name: tuple(tensor.shape) for name, tensor in _converted(model, tensors).items()}


def _converted(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # a language model from a folder with vision would get the names of that folder
    return {text_name(name): tensor for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}


def named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers under transformers' module names, tied ones once, in module order."""
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def on_disk(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's tensors of one tensor of `model`, usually itself.

    transformers fuses the experts of some families on loading; this splits them again. Looking up a name takes more
    than a millisecond, so the result is cached for tensors that are not split.
    """
    names = _unsplit_names.setdefault(model, {})
    if name not in names:
        converted = _converted(model, {name: tensor})
        if [id(each) for each in converted.values()] != [id(tensor)]:
            yield from converted.items()
            return
        [names[name]] = converted
    yield names[name], tensor


@dataclass(frozen=True)
class Rows:
    """Storage of a tensor row by row in a checkpoint: per row, the names of its pieces, concatenated along `axis`."""

    pieces: tuple[tuple[str, ...], ...]
    axis: int


def disk_rows(model: PreTrainedModel, name: str, tensor: Tensor) -> Rows:
    """Return how `on_disk` stores a tensor of `model`; one row with axis -1 is the tensor itself under another name.

    Determined by converting a small probe tensor. Raises CheckpointError if the pieces are not parts of rows.
    """
    whole = tuple(on_disk(model, name, torch.empty(tensor.shape, device="meta")))
    if len(whole) == 1 and whole[0][1].shape == tensor.shape:
        return Rows(((whole[0][0],),), -1)
    shape = len(tensor), *(4 * (tensor.ndim - axis) for axis in range(1, tensor.ndim))
    probe = torch.arange(math.prod(shape)).view(shape)
    parts = sorted(on_disk(model, name, probe), key=lambda part: int(part[1].min()))
    rows = [[part for part in parts if torch.isin(part[1], probe[i]).all()] for i in range(len(tensor))]
    for axis in range(tensor.ndim - 1):
        joined = [torch.cat([piece for _, piece in row], dim=axis) if row else probe[:0] for row in rows]
        if all(torch.equal(row, probe[i]) for i, row in enumerate(joined)):
            return Rows(tuple(tuple(piece for piece, _ in row) for row in rows), axis)
    raise CheckpointError(
        f"{name} is stored as {', '.join(part for part, _ in parts[:3])} ..., from which it cannot be reassembled; "
        "use a tested version of transformers, or report this family"
    )


def save_model(model: PreTrainedModel, folder: Path | str) -> None:
    """Write config and safetensors in the dtype of the first parameter; creates the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()
    stored = next(model.parameters()).dtype
    state = {k: v.to(stored) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    before = model.config.dtype
    model.config.dtype = stored
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        model.config.dtype = before


def write_config(model: PreTrainedModel, folder: Path, *, dtype: torch.dtype, companions: Path) -> None:
    """Write the files of a model folder other than weights, which are stored in `dtype`; creates the folder.

    Tokenizer and so on are copied from the folder `companions`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if is_with_vision(companions):
        config = load_whole_config(companions)
        config.dtype = config.get_text_config().dtype = dtype
    else:
        config = copy.deepcopy(model.config)
        config.dtype = dtype
        kind = "ForTokenClassification" if config.num_labels == 1 else "ForCausalLM"  # a value model has one label
        config.architectures = [type(model).__name__.replace("ForCausalLM", kind)]
    vars(config).pop(RANDOM, None)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    code = [path.name for path in companions.glob("*.py")]  # for engines that run a family's own code
    for name in (*COMPANIONS, *code):
        if (companions / name).is_file():
            shutil.copyfile(companions / name, folder / name)


def part_name(number: int) -> str:
    """Return the temporary name of a weight file, until the number of files is known."""
    return f"part-{number}.safetensors"


def write_index(folder: Path, written: Mapping[str, tuple[str, int]]) -> None:
    """Rename weight files to transformers' names and write the index. written: (file, bytes) of each tensor."""
    parts = list(dict.fromkeys(name for name, _ in written.values()))
    final = {
        part: WEIGHT_FILES[0] if len(parts) == 1 else f"model-{i:05}-of-{len(parts):05}.safetensors"
        for i, part in enumerate(parts, start=1)
    }
    for stale in (*folder.glob("model-*-of-*.safetensors"), *(folder / name for name in WEIGHT_FILES)):
        stale.unlink(missing_ok=True)
    for part, name in final.items():
        (folder / part).rename(folder / name)
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(size for _, size in written.values())},
            "weight_map": {name: final[part] for name, (part, _) in written.items()},
        }
        (folder / WEIGHT_FILES[1]).write_text(json.dumps(index, indent=2) + "\n")


class _UnreadTensor:
    """A tensor of a folder that transformers reads with `tensor[...]`, in threads, when it needs it."""

    def __init__(self, tensors: StoredTensors, name: str) -> None:
        self._tensors, self._name = tensors, name
        self.error: CheckpointError | None = None

    def __getitem__(self, index: Any) -> Tensor:
        try:
            return self._tensors.read(self._name)[index]
        except CheckpointError as error:
            self.error = error  # transformers reports some errors as text
            raise
