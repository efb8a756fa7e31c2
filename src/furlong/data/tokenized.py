"""Prompts that are tokenized once: a Parquet file that training reads instead of the original data.

Columns are those of the flags (the rendered prompt as text; label, metadata and tools as JSON) and `furlong_tokens`.
The schema's metadata has the tokenizer settings; a run with another tokenizer, template or columns is rejected.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from furlong.data.prompt import Prompt, PromptFormat, PromptRenderer, RejectedRow, RowFilter
from furlong.data.prompt_path import PromptDataPath, SourceFile
from furlong.data.row_readers import RawRow, RowReader, read_slice
from furlong.errors import ConfigError, DataError
from furlong.files.atomic import atomic_file

FORMAT = 1
TOKENS = "furlong_tokens"
TOKEN_TYPE = pa.list_(pa.int32())
CHUNK_ROWS = 4096
_KEY = b"furlong.tokenized"


@dataclass(frozen=True)
class TokenizeReport:
    """Counts of rows. `first_refused` describes the first bad rows."""

    num_prompts: int
    num_tokens: int
    num_bad: int
    first_refused: list[str]


class TokenizedRenderer:
    """Makes prompts from rows of a tokenized file; replaces `PromptRenderer` there."""

    def __init__(self, prompt_format: PromptFormat) -> None:
        self.format = prompt_format

    def render(self, rows: Sequence[RawRow]) -> list[Prompt | RejectedRow]:
        """Return one result per row, in order."""
        return [self._prompt(raw) for raw in rows]

    def close(self) -> None:
        """Do nothing."""

    def _prompt(self, raw: RawRow) -> Prompt | RejectedRow:
        fmt, values = self.format, cast("dict[str, Any]", raw.raw)
        tokens: list[int] = values[TOKENS]
        if fmt.max_prompt_len is not None and len(tokens) > fmt.max_prompt_len:
            return RejectedRow(raw.row, raw.where, f"{len(tokens)} tokens, limit {fmt.max_prompt_len}", len(tokens))
        label, metadata, tools = (
            None if key is None else json.loads(values[key]) for key in (fmt.label_key, fmt.metadata_key, fmt.tool_key)
        )
        text = values[fmt.input_key]
        return Prompt(raw.row, text, tokens, label, metadata or {}, tools, fmt.apply_chat_template_kwargs)


def write_tokenized(
    location: PromptDataPath,
    reader: RowReader,
    path: Path,
    *,
    tokenizer: Any,
    prompt_format: PromptFormat,
    num_workers: int = 0,
    skip_bad_rows: bool = False,
) -> TokenizeReport:
    """Write the prompts of `location` with their tokens. No length limit is applied: a run applies its own.

    Raises DataError for a bad row, unless `skip_bad_rows`, and for messages that only the run itself can render.
    """
    unlimited = dataclasses.replace(prompt_format, max_prompt_len=None)
    renderer = PromptRenderer(tokenizer, unlimited, num_workers=num_workers)
    check = RowFilter(str(location.path), max_prompt_len=None, skip_bad_rows=skip_bad_rows)
    num_tokens = 0
    settings = json.dumps(tokenizer_settings(tokenizer, prompt_format))
    schema = pa.schema(
        [*((name, pa.string()) for name in prompt_format.columns), (TOKENS, TOKEN_TYPE)],
        metadata={_KEY: settings.encode()},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_file(path) as draft:
            with pq.ParquetWriter(draft, schema, write_page_checksum=True) as writer:
                rows = read_slice(reader, location)
                while chunk := list(islice(rows, CHUNK_ROWS)):
                    kept = [_row(cast(Prompt, r), prompt_format) for r in renderer.render(chunk) if check.admits(r)]
                    num_tokens += sum(len(values[TOKENS]) for values in kept)
                    if kept:
                        writer.write_table(pa.Table.from_pylist(kept, schema))
            if not check.num_kept:
                hint = check.first_bad[0] if check.first_bad else "it has no rows"
                raise DataError(f"{location.path} has no usable prompts; {hint}")
    finally:
        renderer.close()
    return TokenizeReport(check.num_kept, num_tokens, check.num_bad, check.first_bad)


def read_tokenizer_settings(location: PromptDataPath) -> dict[str, Any] | None:
    """Return the settings with which a file was tokenized; None if it was not."""
    if location.kind != "parquet":
        return None
    with SourceFile(location.path).reading("its schema"):
        schema = pq.read_schema(location.path)
        text = (schema.metadata or {}).get(_KEY)
        return None if text is None else json.loads(text)


def check_settings(
    location: PromptDataPath, settings: dict[str, Any], tokenizer: Any, prompt_format: PromptFormat
) -> None:
    """Raise ConfigError naming every setting that differs between the run and the tokenized file.

    Without a tokenizer only the columns are compared.
    """
    current = tokenizer_settings(tokenizer, prompt_format)
    compared = [name for name in current.keys() | settings.keys() if tokenizer is not None or name.endswith("_key")]
    if different := sorted(name for name in compared if current.get(name) != settings.get(name)):
        shown = "; ".join(f"{name} was {settings.get(name)!r}, is {current.get(name)!r}" for name in different)
        raise ConfigError(
            f"{location.path} was tokenized with other settings ({shown}); tokenize the original data again with "
            "`furlong data tokenize` and this run's flags, or train on the original data"
        )


def tokenizer_settings(tokenizer: Any, prompt_format: PromptFormat) -> dict[str, Any]:
    """Return the settings that the tokens of a prompt depend on, as JSON data."""
    template = getattr(tokenizer, "chat_template", None) if prompt_format.apply_chat_template else None
    vocabulary = "" if tokenizer is None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return {
        "format": FORMAT,
        "vocabulary": xxhash.xxh3_64_hexdigest(vocabulary.encode()),
        "chat_template": None if template is None else xxhash.xxh3_64_hexdigest(str(template).encode()),
        "apply_chat_template_kwargs": prompt_format.apply_chat_template_kwargs,
        "input_key": prompt_format.input_key,
        "label_key": prompt_format.label_key,
        "metadata_key": prompt_format.metadata_key,
        "tool_key": prompt_format.tool_key,
    }


def _row(prompt: Prompt, prompt_format: PromptFormat) -> dict[str, Any]:
    if not isinstance(prompt.text, str):
        raise DataError(f"row {prompt.row} has messages, which only the run itself renders; add --apply-chat-template")
    values: dict[str, Any] = {prompt_format.input_key: prompt.text, TOKENS: prompt.tokens}
    more = ((prompt_format.label_key, prompt.label), (prompt_format.metadata_key, prompt.metadata))
    for key, value in (*more, (prompt_format.tool_key, prompt.tools)):
        if key is not None:
            values[key] = json.dumps(value)
    return values
