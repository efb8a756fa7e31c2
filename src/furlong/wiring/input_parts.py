"""Lists the inputs of a run, so that a resume can compare it with the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson
import xxhash

from furlong.core.model_config import read_json
from furlong.data.byte_places import rows_at
from furlong.data.prompt_path import PromptDataPath
from furlong.errors import CheckpointError, ConfigError
from furlong.files.checkpoint_folder import MANIFEST, find_checkpoint, find_foreign_weights, find_resume_folder
from furlong.files.run_inputs import InputFile, RunInput, RunInputs, flat_settings
from furlong.files.safetensors_header import read_header
from furlong.models.hf_folder import WEIGHT_FILES, read_weight_map
from furlong.wiring.rollout_parts import prompt_paths
from furlong.wiring.run_context import RunContext

IGNORED_KEYS = ("transformers_version", "_name_or_path")  # of the tool that wrote the file
SMALL_BYTES = 256  # of a part of tokenizer.json that is recorded as it is
SLOW_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
SHOWN_TENSORS = 2


def build_inputs(context: RunContext) -> RunInputs | None:
    """Begin to read the inputs of a run that saves or resumes; None for any other run."""
    flags = context.config.checkpoint
    resumed = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if flags.save is None and resumed is None:
        return None
    inputs = RunInputs(list(_inputs(context)), accepted=flags.allow_changed_inputs)
    inputs.start()
    return inputs


def _inputs(context: RunContext) -> Iterator[RunInput]:
    folder, config = context.model_dir, context.config
    source = f"--hf-checkpoint {folder}"
    if context.reads_prompt_file:
        yield prompt_files(prompt_paths(config))
    slow = () if (folder / "tokenizer.json").is_file() else SLOW_TOKENIZER_FILES
    files = [InputFile(folder / name, name) for name in slow if (folder / name).is_file()]
    yield RunInput("tokenizer", source, files, partial(_tokenizer_settings, folder))
    path = config.data.chat_template_path
    template = getattr(context.tokenizer, "chat_template", None)
    template_source = (
        f"{source} (chat_template.jinja or tokenizer_config.json)" if path is None else f"--chat-template-path {path}"
    )
    yield RunInput("chat-template", template_source, settings=lambda: {"chat template": template})
    yield RunInput("config", source, settings=partial(_config_settings, folder))
    yield RunInput("weights", source, _weight_files(folder))
    if config.checkpoint.ref_load is not None:
        yield _reference(context, Path(config.checkpoint.ref_load))


def prompt_files(paths: Iterable[str]) -> RunInput:
    """The files of --prompt-data, or those of several environments, by their place in the list."""
    named: list[InputFile] = []
    different = list(dict.fromkeys(paths))
    for number, path in enumerate(different):
        files = PromptDataPath.parse(path).files()
        prefix = f"{number}/" if len(different) > 1 else ""
        named += [InputFile(file, prefix + (file.name if len(files) > 1 else ""), rows_at) for file in files]
    return RunInput("data", f"--prompt-data {' '.join(different)}", named)


def _reference(context: RunContext, folder: Path) -> RunInput:
    """The reference model: weights and config of a Hugging Face folder, or the manifest of a checkpoint."""
    source, step = f"--ref-load {folder}", context.config.checkpoint.ref_ckpt_step
    foreign = find_foreign_weights(folder, step=step)
    if foreign is None:
        checkpoint = find_checkpoint(folder, step=step, save_dir=None, flag="--ref-load")
        assert checkpoint is not None  # without save_dir a missing checkpoint raises
        return RunInput("reference", source, [InputFile(checkpoint / MANIFEST)], follows_path=True)
    if (foreign / "config.json").is_file():
        settings = partial(_config_settings, foreign)
        return RunInput("reference", source, _weight_files(foreign), settings, follows_path=True)
    files = [InputFile(path, path.name) for path in sorted(foreign.iterdir()) if path.is_file()]
    return RunInput("reference", source, files, follows_path=True)


def _weight_files(folder: Path) -> list[InputFile]:
    """Return the safetensors files that this machine has; those of a cluster's machines may be elsewhere."""
    single, index = WEIGHT_FILES
    names = sorted(set(read_weight_map(folder / index).values())) if (folder / index).is_file() else [single]
    return [InputFile(folder / name, name, _tensors_at) for name in names if (folder / name).is_file()]


def _config_settings(folder: Path) -> dict[str, Any]:
    """Return the values of config.json and generation_config.json."""
    return {
        f"{name} {key}": value
        for name in ("config.json", "generation_config.json")
        for key, value in flat_settings(read_json(folder / name))
        if key not in IGNORED_KEYS
    }


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return the values of a tokenizer's files, large ones as checksums; the chat template is an input by itself."""
    values: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        settings = {key: value for key, value in read_json(folder / name).items() if key != "chat_template"}
        values |= {f"{name} {key}": value for key, value in flat_settings(settings) if key not in IGNORED_KEYS}
    return values | dict(_tokenizer_parts(folder / "tokenizer.json"))


def _tokenizer_parts(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the parts of tokenizer.json that text is tokenized with; padding and truncation are not used."""
    if not path.is_file():
        return
    try:
        content: Any = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; download the tokenizer again") from error
    parts = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    model: Mapping[str, Any] = parts.pop("model", None) or {}
    for key, value in [*parts.items(), *((f"model.{key}", value) for key, value in model.items())]:
        if key in ("padding", "truncation"):
            continue
        text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        size = f", {len(value)} entries" if isinstance(value, (dict, list)) else ""
        checksum = f"checksum {xxhash.xxh3_128_hexdigest(text)}{size}"
        yield f"tokenizer.json {key}", value if len(text) <= SMALL_BYTES else checksum


def _tensors_at(path: Path, first: int, last: int) -> str:
    """Return the tensors of a safetensors file that have bytes from `first` to `last`."""
    try:
        tensors = read_header(path).tensors
    except CheckpointError as error:
        return str(error)
    inside = [name for name, each in tensors.items() if each.offset <= last and each.offset + each.num_bytes > first]
    return f"tensors {', '.join(inside[:SHOWN_TENSORS])}" if inside else "the header"
