"""One sample for the page: its conversation, its group, and what is known of each token."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from furlong.core.sample import Group, Sample
from furlong.errors import CheckpointError, DataError
from furlong.files.sample_file import SampleDump, load_samples
from furlong.view.sample_index import MESSAGES, SampleFile, batch_file, mask_of, reward_number, start_folder
from furlong.view.turns import prompt_turns, response_turns, text_of, turns_of_messages

if TYPE_CHECKING:
    from furlong.core.batch import RolloutBatch

TOKENIZER_FILE = "tokenizer.json"
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 4  # earlier tokens that decide about spaces
KEPT_FILES = 4
MAX_TOKENS = 20_000  # of one sample; the page shows no more


class Decoder(Protocol):
    """Decodes token ids, special tokens included."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids."""
        ...


def load_decoder(folder: Path, flags: Mapping[str, Any]) -> Decoder | None:
    """Return the tokenizer of a run's model; None if there is no `tokenizer.json`, for example on another machine.

    `transformers` is not imported, which takes seconds.
    """
    model = flags.get("hf_checkpoint")
    path = start_folder(folder, flags) / str(model) / TOKENIZER_FILE
    if not model or not path.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(path))
    return tokenizer


def token_pieces(decoder: Decoder, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds. The pieces of a character of several tokens are with the last of them.

    >>> token_pieces(decoder, [5, 6])  # doctest: +SKIP
    ['Hel', 'lo']
    """
    pieces: list[str] = []
    start = done = 0  # tokens before `done` have their text; `start` is where decoding begins
    for end in range(1, len(ids) + 1):
        before = decoder.decode(ids[start:done], skip_special_tokens=False)
        now = decoder.decode(ids[start:end], skip_special_tokens=False)
        if now.endswith(INCOMPLETE) and end < len(ids) and end - done < CONTEXT:
            pieces.append("")
            continue
        pieces.append(now[len(before) :])
        done = end
        start = max(0, end - CONTEXT)
    return pieces


class SamplePages:
    """Single samples of one run, read from its dumps. Thread-safe; the last `KEPT_FILES` dumps stay in memory."""

    def __init__(self, folder: Path, flags: dict[str, Any]) -> None:
        self._folder, self._flags = folder, flags
        self._dumps: OrderedDict[tuple[Path, int], SampleDump] = OrderedDict()
        self._decoder: Decoder | None = None
        self._is_loaded = False
        self._lock = threading.Lock()

    def sample(self, file: SampleFile, position: int) -> dict[str, Any]:
        """Return the sample at a position of a dump. Raises DataError if the dump is damaged or has no such sample."""
        with self._lock:
            dump = self._dump(file.path)
            places = [(group, sample) for group in dump.groups for sample in group.samples]
            if not 0 <= position < len(places):
                raise DataError(f"{file.path} has {len(places)} samples, none at position {position}; reload the page")
            group, sample = places[position]
            tokens = self._tokens(sample)
            pieces = tokens["pieces"] and tokens["pieces"][sample.prompt_length :]
            first = next(i for i, (other, _) in enumerate(places) if other is group)
            return {
                "step": file.step,
                "is_eval": file.is_eval,
                "group": group.index,
                "index": sample.index,
                "epoch": group.epoch,
                "row": group.row,
                "status": sample.status.value,
                "reward": _plain(sample.reward),
                "label": text_of(sample.label),
                "outcome": None if sample.outcome is None else asdict(sample.outcome),
                "turns": _plain(prompt_turns(sample.prompt) + response_turns(sample.response, pieces, tokens["mask"])),
                "metadata": {k: v for k, v in sample.metadata.items() if k != MESSAGES},
                "tokens": tokens,
                "members": self._members(group, first),
                "leaves": _leaves(group, sample, first),
                "batch": self._batch_facts(file, sample),
            }

    def _dump(self, path: Path) -> SampleDump:
        key = (path, path.stat().st_mtime_ns)
        if key not in self._dumps:
            self._dumps[key] = load_samples(path)
            while len(self._dumps) > KEPT_FILES:
                self._dumps.popitem(last=False)
        self._dumps.move_to_end(key)
        return self._dumps[key]

    def _members(self, group: Group, first: int) -> list[dict[str, Any]]:
        key = self._flags.get("reward_key")
        return [
            {
                "pos": first + i,
                "index": sample.index,
                "reward": reward_number(sample, key),
                "status": sample.status.value,
                "response_len": sample.response_length,
            }
            for i, sample in enumerate(group.samples)
        ]

    def _tokens(self, sample: Sample) -> dict[str, Any]:
        if not self._is_loaded:
            self._decoder, self._is_loaded = load_decoder(self._folder, self._flags), True
        ids = sample.tokens[:MAX_TOKENS]
        num_prompt = sample.prompt_length
        return {
            "ids": ids,
            "pieces": None if self._decoder is None else token_pieces(self._decoder, ids),
            "num_prompt": num_prompt,
            "num_cut": len(sample.tokens) - len(ids),
            "mask": mask_of(sample),
            "engine": _rounded(sample.rollout_log_probs),
            "teacher": _rounded(sample.teacher_log_probs),
            "versions": sample.token_versions,
        }

    def _batch_facts(self, file: SampleFile, sample: Sample) -> dict[str, Any]:
        path = None if file.is_eval else batch_file(self._folder, self._flags, file.rollout_id)
        if path is None:
            return {}
        try:
            from furlong.files.batch_file import load_batch  # imports torch, which takes seconds

            batch = load_batch(path)
        except CheckpointError as error:
            return {"problem": str(error)}
        row = _row_of(batch, sample)
        if row is None:
            return {"problem": "the training batch does not contain this sample: it was dropped or filtered"}
        start, end = batch.response_starts[row], batch.response_starts[row + 1]
        flat = {name: column for name, column in batch.columns.items() if column.ndim == 1}
        columns = {name: _rounded(column[start:end].tolist()) for name, column in flat.items()}
        return {"normalized_reward": float(batch.rewards[row]), "columns": columns}


def _row_of(batch: RolloutBatch, sample: Sample) -> int | None:
    """Return the row of a batch with the tokens of a sample; samples of one completion share their id."""
    for row in np.flatnonzero(batch.sample_ids == (-1 if sample.index is None else sample.index)).tolist():
        if batch.tokens[batch.starts[row] : batch.starts[row + 1]].tolist() == sample.tokens:
            return row
    return None


def _leaves(group: Group, sample: Sample, first: int) -> list[dict[str, Any]]:
    if sample.rollout_id is None or MESSAGES not in sample.metadata:
        own = sample.metadata.get(MESSAGES)
        return [{"pos": -1, "messages": _plain(turns_of_messages(own))}] if own else []
    return [
        {"pos": first + i, "messages": _plain(turns_of_messages(other.metadata[MESSAGES]))}
        for i, other in enumerate(group.samples)
        if other.rollout_id == sample.rollout_id and MESSAGES in other.metadata
    ]


def _rounded(values: Sequence[float] | None) -> list[float | None] | None:
    if values is None:
        return None
    return [round(value, 5) if math.isfinite(value) else None for value in values]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
