"""Inputs of the checks: the configuration, and its files, which are loaded on first use."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from pyarrow.lib import ArrowException

from furlong.catalogue import Problem
from furlong.config.args_view import Args
from furlong.config.checks.value_checks import prompt_file_problem, unreadable_file
from furlong.config.evaluation import used_eval_specs
from furlong.config.hooks import Hooks, load_hooks
from furlong.config.sections import Config
from furlong.data.dataset import open_rows
from furlong.data.prompt import Prompt, PromptFormat, RejectedRow, can_render
from furlong.data.prompt_path import PromptDataPath
from furlong.data.row_readers import Cursor, JsonLines, RawRow, RowReader, read_slice
from furlong.data.tokenized import read_tokenizer_settings
from furlong.errors import CheckpointError, ConfigError, DataError
from furlong.models.hf_folder import check_folder
from furlong.models.tokenizer import load_tokenizer, read_template
from furlong.tools.model_folder import StoredModel, read_model

FIRST_ROWS = 128
SAMPLED_PLACES = 8  # in a JSON Lines file, after its first rows
ROWS_AT_A_PLACE = 8
SAMPLED_BYTES = 64 << 20  # of a JSON Lines file: numbering a line needs all lines before it


@dataclass(frozen=True)
class SampledRows:
    """The first rows of a file and a sample of the rest, as the run would read them."""

    prompts: list[Prompt]
    refused: list[RejectedRow]

    @property
    def num_rows(self) -> int:
        """The number of rows read."""
        return len(self.prompts) + len(self.refused)


@dataclass(frozen=True)
class PromptFile:
    """A prompt file: the flag or evaluation set that names it, its path, and its rows or why it cannot be read."""

    name: str
    path: str
    rows: SampledRows | None
    problem: str = ""

    @staticmethod
    def read(name: str, path: str, prompt_format: PromptFormat, tokenizer: Any, *, whole: bool = False) -> PromptFile:
        """Read the first rows, or the whole file."""
        try:
            return PromptFile(name, path, read_rows(path, prompt_format, tokenizer, whole=whole))
        except (ConfigError, DataError, ArrowException, OSError) as error:
            return PromptFile(name, path, None, str(error))


@dataclass(frozen=True)
class PreflightContext:
    """A configuration, the problems and sources of its flags, and its files. What cannot be read is None.

    A file that cannot be read is reported by its own check only. `reads_all`: read prompt files completely, not only
    their first rows.
    """

    config: Config
    problems: tuple[Problem, ...] = ()
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    reads_all: bool = False

    @cached_property
    def model_dir(self) -> Path | None:
        """The folder of --hf-checkpoint, if it exists and is readable."""
        folder = self.config.rollout.hf_checkpoint
        if folder is None or not os.path.isdir(folder) or unreadable_file(Path(folder)) is not None:
            return None
        return Path(folder)

    @cached_property
    def model(self) -> StoredModel | None:
        """Headers and config.json of the model."""
        if self.model_dir is None:
            return None
        try:
            check_folder(self.model_dir, weights=True)
            return read_model(self.model_dir)
        except (ConfigError, CheckpointError):  # reported by model.model_folder
            return None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, with the template of --chat-template-path."""
        if self.model_dir is None:
            return None
        try:
            check_folder(self.model_dir, tokenizer=True)
            tokenizer = load_tokenizer(self.model_dir)
            if self.config.data.chat_template_path is not None:
                tokenizer.chat_template = read_template(self.config.data.chat_template_path)
        except ConfigError:  # reported by model.model_folder and flags.chat_template
            return None
        return tokenizer

    @cached_property
    def hooks(self) -> tuple[Hooks, list[str]]:
        """The custom functions, and the problems of loading them."""
        return load_hooks(self.config)

    @cached_property
    def args(self) -> Args:
        """The `args` of custom functions."""
        return Args(self.config)

    @property
    def context_len(self) -> int | None:
        """Limit of prompt + response in tokens: from the flag, or else the model."""
        limit = self.config.rollout.rollout_max_context_len
        if limit is not None or self.model is None:
            return limit
        length = self.model.text_config.get("max_position_embeddings")
        return length if isinstance(length, int) else None

    @property
    def serves_another_length(self) -> bool:
        """Whether SGLang serves a longer context than `max_position_embeddings`: by its flag, or a scaled RoPE."""
        if self.config.cluster.engine != "sglang" or self.model is None:
            return False
        text = self.model.text_config
        scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
        return "context_length" in self.config.engines.sglang_options or "factor" in scaling

    @property
    def reads_prompts(self) -> bool:
        """Whether the run reads --prompt-data."""
        config = self.config
        has_custom_source = config.data.data_source_path is not None or not config.data.rollout_global_dataset
        is_replay = config.debug.load_debug_rollout_data is not None
        return config.data.prompt_data is not None and not has_custom_source and not is_replay

    @property
    def generates(self) -> bool:
        """Whether the run generates responses itself: no replay, no SFT, no custom rollout function."""
        config = self.config
        is_replay = config.debug.load_debug_rollout_data is not None
        has_custom_rollout = config.rollout.rollout_function_path is not None
        return not is_replay and not has_custom_rollout and config.algo.loss_type != "sft_loss"

    @cached_property
    def files(self) -> list[PromptFile]:
        """The prompt files that the run reads. [] if prompts cannot be rendered."""
        config, sources = self.config, list[tuple[str, str, PromptFormat]]()
        if self.reads_prompts:
            sources.append(("--prompt-data", str(config.data.prompt_data), PromptFormat.of(config)))
        try:
            specs = used_eval_specs(config)
        except ConfigError:  # reported by flags.evaluation_sets
            specs = []
        sources += [(f"evaluation set {s.name}", s.path, PromptFormat.of(s.config, evaluation=True)) for s in specs]
        if self.tokenizer is None or (config.data.apply_chat_template and not can_render(self.tokenizer)):
            return []
        is_checked = config.eval.eval_config is None  # flags that name the files were checked before
        return [
            PromptFile.read(name, path, prompt_format, self.tokenizer, whole=self.reads_all)
            for name, path, prompt_format in sources
            if not is_checked or prompt_file_problem(name, path) is None
        ]

    @property
    def rows(self) -> SampledRows | None:
        """Rows of --prompt-data; None if the run does not read it or it cannot be read."""
        return next((file.rows for file in self.files if file.name == "--prompt-data"), None)

    @cached_property
    def prompts_as_written(self) -> list[str | list[dict[str, Any]]]:
        """The first prompts as they are in the file, text or messages; [] if the file contains tokens."""
        if (
            self.rows is None
            or read_tokenizer_settings(PromptDataPath.parse(str(self.config.data.prompt_data))) is not None
        ):
            return []
        unrendered = dataclasses.replace(
            PromptFormat.of(self.config), apply_chat_template=False, keep_messages=True, max_prompt_len=None
        )
        return [prompt.text for prompt in read_rows(str(self.config.data.prompt_data), unrendered, None).prompts]


def read_rows(path: str, prompt_format: PromptFormat, tokenizer: Any, *, whole: bool = False) -> SampledRows:
    """Read and render the first rows of a file and a sample of the rest, or all. Raises ConfigError or DataError."""
    location = PromptDataPath.parse(path)
    reader, renderer = open_rows(location, tokenizer=tokenizer, prompt_format=prompt_format)
    start, stop = location.start or 0, location.stop
    if whole or start < 0 or (stop is not None and stop < 0):
        raw = list(read_slice(reader, location))[: None if whole else FIRST_ROWS]
    else:
        last = start + FIRST_ROWS if stop is None else min(stop, start + FIRST_ROWS)
        raw = list(islice(reader.read(Cursor(0)), start, last))
        if location.start is None and location.stop is None and len(raw) == FIRST_ROWS:
            raw += _rows_from_elsewhere(reader, after=raw[-1])
    results = renderer.render(raw)
    prompts = [result for result in results if isinstance(result, Prompt)]
    return SampledRows(prompts, [result for result in results if isinstance(result, RejectedRow)])


def _rows_from_elsewhere(reader: RowReader, *, after: RawRow) -> list[RawRow]:
    """Sample rows from the rest of a file, at random but the same in every run."""
    draw = random.Random(0)
    if not isinstance(reader, JsonLines):
        num_rows = reader.num_rows or 0
        if num_rows <= FIRST_ROWS:
            return []
        place = draw.randrange(FIRST_ROWS, num_rows)  # a single place: Parquet decodes whole row groups
        return list(islice(reader.read(Cursor(place)), ROWS_AT_A_PLACE))
    sampled: list[RawRow] = []
    row, line, offset = after.after
    end = max(offset, min(reader.path.stat().st_size, SAMPLED_BYTES))
    with reader.path.open("rb") as file:
        for place in sorted(draw.randint(offset, end) for _ in range(SAMPLED_PLACES)):
            if place < offset:
                continue
            file.seek(offset)
            passed = file.read(place - offset) + file.readline()
            num_lines = passed.count(b"\n")
            here = Cursor(row + num_lines, line + num_lines, offset + len(passed))
            for raw in islice(reader.read(here), ROWS_AT_A_PLACE):
                sampled.append(raw)
                row, line, offset = raw.after
    return sampled
