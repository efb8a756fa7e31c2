"""The data source: prompts in memory, made into groups of samples, each prompt once per epoch, in a resumable order."""

from __future__ import annotations

import copy
import json
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from furlong.core.sample import MADE_BY_FUNCTION, Group, Sample
from furlong.data.prompt import Prompt, PromptFormat, PromptRenderer, RowFilter
from furlong.data.prompt_path import PromptDataPath
from furlong.data.row_readers import RowReader, read_slice
from furlong.data.tokenized import TokenizedRenderer
from furlong.errors import CheckpointError, ConfigError, DataError

logger = logging.getLogger(__name__)

BufferFilter = Callable[[Any, int | None, list[list[Sample]], int], list[list[Sample]]]

STATE_VERSION = 1
READ_ROWS = 4096
_U64 = (1 << 64) - 1
HASHED_PARTS = {"head": "its first MiB differs", "tail": "its last MiB differs"}  # shown instead of the hashes
CONTENT = (*HASHED_PARTS, "size", "num_prompts")  # settings that other data changes


class Prompts(Protocol):
    """The prompts that a data source draws from. Call `begin` or `seek` before `take`."""

    @property
    def size(self) -> int | None:
        """Prompts in one epoch; None while unknown."""
        ...

    @property
    def num_long(self) -> int:
        """Rows read so far that were dropped because their prompt is too long."""
        ...

    def begin(self, key: int | None) -> None:
        """Start an epoch, shuffled by `key`, or in file order if it is None."""
        ...

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts of the epoch; fewer at its end, [] after it."""
        ...

    def position(self) -> dict[str, Any]:
        """Return a JSON-able position in the epoch, for `seek`."""
        ...

    def seek(self, key: int | None, position: dict[str, Any], *, by_row: bool = False) -> None:
        """Continue an epoch from a `position`; `by_row`: of other data, in which the same rows are elsewhere."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return what must be equal for a position to be valid: the data's fingerprint and the prompt format."""
        ...

    def close(self) -> None:
        """Stop workers and close files."""
        ...


def shuffled(n: int, *, key: int, block: int = 0) -> NDArray[np.int64]:
    """Return a permutation of range(n): the stable order of n raw Philox words under the key (`key`, `block`).

    Raw words of a bit generator are the same on every platform and numpy version; `Generator.permutation` is not.
    """
    philox = np.random.Philox(key=np.array([key & _U64, block & _U64], dtype=np.uint64))
    return np.argsort(philox.random_raw(n), kind="stable")


def prompt_settings(location: PromptDataPath, prompt_format: PromptFormat, *, skip_bad_rows: bool) -> dict[str, Any]:
    """Return the fingerprint of a prompt file and the settings that its prompts depend on."""
    return {
        **location.fingerprint(),
        "input_key": prompt_format.input_key,
        "label_key": prompt_format.label_key,
        "metadata_key": prompt_format.metadata_key,
        "tool_key": prompt_format.tool_key,
        "apply_chat_template": prompt_format.apply_chat_template,
        "max_prompt_len": prompt_format.max_prompt_len,
        "skip_bad_rows": skip_bad_rows,
    }


def check_same_settings(saved: Mapping[str, Any], now: Mapping[str, Any], *, data_changed: bool = False) -> None:
    """Compare the settings of a data state with those of a run, but not the content if `data_changed`.

    Raises CheckpointError naming what differs.
    """
    differing = sorted(key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key))
    if data_changed:
        differing = [key for key in differing if key not in CONTENT]
    if differing:
        changes = "; ".join(
            HASHED_PARTS[key] if key in HASHED_PARTS else f"{key} was {saved.get(key)!r}, is {now.get(key)!r}"
            for key in differing
        )
        raise CheckpointError(
            f"the checkpoint has other data or another order ({changes}), so its data position is not valid; "
            "use the same data and settings, or start a new run from the checkpoint's weights (--finetune)"
        )


class PromptTable(Sequence[Prompt]):
    """All prompts in memory, in file order. Implements `Prompts` with known size."""

    def __init__(
        self,
        location: PromptDataPath,
        reader: RowReader,
        renderer: PromptRenderer | TokenizedRenderer,
        check: RowFilter,
    ) -> None:
        rows = read_slice(reader, location)
        self._prompts: list[Prompt] = []
        try:
            while chunk := list(islice(rows, READ_ROWS)):
                self._prompts += [cast(Prompt, result) for result in renderer.render(chunk) if check.admits(result)]
        finally:
            renderer.close()
        check.log_summary()
        check.require_some()
        self.num_long = check.num_long
        self._settings = prompt_settings(location, renderer.format, skip_bad_rows=check.skip_bad_rows)
        self._settings |= {"streaming": False, "num_prompts": len(self._prompts)}
        self._order: NDArray[np.int64] | None = None
        self._next = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        return self._prompts[index]

    @property
    def size(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    def begin(self, key: int | None) -> None:
        """Start an epoch."""
        self._order = None if key is None else shuffled(len(self._prompts), key=key)
        self._next = 0

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts of the epoch."""
        start, self._next = self._next, min(self._next + n, len(self._prompts))
        if self._order is None:
            return self._prompts[start : self._next]
        return [self._prompts[i] for i in self._order[start : self._next]]

    def position(self) -> dict[str, Any]:
        """Return how many prompts of the epoch were taken."""
        return {"taken": self._next}

    def seek(self, key: int | None, position: dict[str, Any], *, by_row: bool = False) -> None:  # noqa: ARG002
        """Continue an epoch."""
        self.begin(key)
        self._next = int(position["taken"])

    def settings(self) -> dict[str, Any]:
        """Return the fingerprint, the keys, and the number of prompts."""
        return dict(self._settings)

    def close(self) -> None:
        """Do nothing: files and workers are closed after reading."""


def sample_seed(rollout_seed: int, sample_index: int) -> int:
    """Return the sampling seed of a sample: the low 31 bits of XXH64 over the two integers as little-endian int64.

    It depends on nothing else, so a sample has the same seed when it is issued again or after a resume.
    """
    return xxhash.xxh64_intdigest(struct.pack("<qq", rollout_seed, sample_index)) & 0x7FFFFFFF


def group_from_prompt(
    prompt: Prompt, *, index: int, first_sample: int, n_samples: int, rollout_seed: int, epoch: int = 0
) -> Group:
    """Make the samples of one prompt. They share no mutable state except `tools`, which must not be modified."""
    samples = [
        Sample(
            group_index=index,
            index=i,
            rollout_id=i,
            prompt=prompt.text if isinstance(prompt.text, str) else copy.deepcopy(prompt.text),
            tokens=list(prompt.tokens),
            label=copy.deepcopy(prompt.label),
            metadata=copy.deepcopy(prompt.metadata),
            apply_chat_template_kwargs=dict(prompt.apply_chat_template_kwargs),
            tools=prompt.tools,
            seed=sample_seed(rollout_seed, i),
        )
        for i in range(first_sample, first_sample + n_samples)
    ]
    return Group(index, samples, epoch, prompt.row)


def adopted(samples: list[Sample], index: int, first_sample: int, *, seed: int) -> Group:
    """Return samples that user code made as group `index`, numbered from `first_sample`.

    Samples with the same `rollout_id` remain parts of one completion.
    """
    completions: dict[Any, int] = {}
    for number, sample in enumerate(samples, first_sample):
        completion = ("made", number) if sample.rollout_id is None else sample.rollout_id
        sample.group_index, sample.index = index, number
        sample.rollout_id = completions.setdefault(completion, number)
        if sample.seed is None:
            sample.seed = sample_seed(seed, number)
    return Group(index, samples, epoch=MADE_BY_FUNCTION, row=index)


class RolloutDataSource:
    """Issues the prompts of a table or stream, `n_samples_per_prompt` samples each, epoch after epoch.

    With `shuffle`, epoch e has the order of the key `rollout_seed + e`. Returned groups are issued first, in the order
    of their return, with the tokens they have. `num_epoch` None means endless. For one thread.

    >>> source = RolloutDataSource(prompts, n_samples_per_prompt=8, shuffle=True, rollout_seed=42)  # doctest: +SKIP
    >>> groups = source.next_groups(32)                                                             # doctest: +SKIP
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        n_samples_per_prompt: int = 1,
        shuffle: bool = False,
        rollout_seed: int = 42,
        num_epoch: int | None = None,
        buffer_filter: BufferFilter | None = None,
        args: Any = None,
        on_drop: Callable[[Group, str], None] | None = None,
    ) -> None:
        if n_samples_per_prompt < 1:
            raise ConfigError(f"--n-samples-per-prompt is {n_samples_per_prompt}; it must be at least 1")
        self._prompts = prompts
        self._n_samples = n_samples_per_prompt
        self._shuffle, self._seed, self._num_epoch = shuffle, rollout_seed, num_epoch
        self._returned = GroupBuffer(buffer_filter=buffer_filter, args=args, on_drop=on_drop)
        self._epoch = self._next_group = self._next_sample = 0
        self._metadata: dict[str, Any] = {}
        prompts.begin(self._key(0))

    @property
    def groups_per_epoch(self) -> int | None:
        """Groups in one epoch; None until a streamed file was read once."""
        return self._prompts.size

    @property
    def num_long_prompts(self) -> int:
        """Rows read so far that were dropped because their prompt is too long."""
        return self._prompts.num_long

    def next_groups(self, n: int) -> list[Group]:
        """Return up to `n` groups, returned ones first; fewer only at the end of the last epoch, [] after it."""
        groups = self._returned.take(n)
        while len(groups) < n and (self._num_epoch is None or self._epoch < self._num_epoch):
            missing = n - len(groups)
            prompts = self._prompts.take(missing)
            groups += [self._group(prompt) for prompt in prompts]
            if len(prompts) < missing:
                self._epoch += 1
                self._prompts.begin(self._key(self._epoch))
        return groups

    def return_groups(self, groups: Sequence[Group]) -> None:
        """Take back unfinished groups. Raises DataError for a group returned twice, or never issued."""
        for group in groups:
            if group.index >= self._next_group:
                raise DataError(
                    f"group {group.index} was returned but never issued: the next new group is {self._next_group}; "
                    "return only groups from next_groups"
                )
        self._returned.put(groups)

    def adopt(self, samples: list[Sample]) -> Group:
        """Return a group of samples that user code made, with the next numbers."""
        group = adopted(samples, self._next_group, self._next_sample, seed=self._seed)
        self._next_group += 1
        self._next_sample += len(samples)
        return group

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata of `update_metadata`, which checkpoints contain. For rollout functions, as in slime."""
        return self._metadata

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add metadata, which must be JSON values."""
        self._metadata.update(metadata)

    def get_buffer_length(self) -> int:
        """Return the number of returned groups that wait to be issued again."""
        return len(self._returned)

    def state(self) -> dict[str, Any]:
        """Return a JSON-able snapshot: settings, epoch, position, counters, and the returned groups.

        Groups that are with the rollout are not included: the caller saves them and returns them after `restore`.
        """
        return {
            "version": STATE_VERSION,
            "settings": self._settings(),
            "epoch": self._epoch,
            "position": self._prompts.position(),
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "returned": [json_group(group) for group in self._returned],
            "metadata": _json(self._metadata, "the metadata of update_metadata"),
        }

    def restore(self, state: dict[str, Any], *, data_changed: bool = False) -> None:
        """Continue from a state. Raises CheckpointError naming each setting that differs.

        Returned groups are adjusted to the current number of samples per prompt. With `data_changed`, the content of
        the data may differ, and the epoch continues at the same number of prompts.
        """
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the data state has version {state.get('version')!r}, expected {STATE_VERSION}; "
                "resume with the furlong version that wrote the checkpoint"
            )
        check_same_settings(state["settings"], self._settings(), data_changed=data_changed)
        self._epoch = state["epoch"]
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        self._prompts.seek(self._key(self._epoch), state["position"], by_row=data_changed)
        self._metadata = copy.deepcopy(state.get("metadata", {}))
        self._returned.clear()
        returned = [Group.from_dict(group) for group in copy.deepcopy(state["returned"])]
        for group in returned:
            self._resize(group)
        self._returned.put(returned)

    def close(self) -> None:
        """Stop data workers and close files."""
        self._prompts.close()

    def _key(self, epoch: int) -> int | None:
        return self._seed + epoch if self._shuffle else None

    def _settings(self) -> dict[str, Any]:
        order = {"shuffle": self._shuffle, "rollout_seed": self._seed}
        return {**self._prompts.settings(), **order}

    def _resize(self, group: Group) -> None:
        num_samples, first = len(group.samples), group.samples[0]
        if num_samples == self._n_samples or group.epoch == MADE_BY_FUNCTION:
            return
        logger.info("group %d, returned with %d samples, now has %d", group.index, num_samples, self._n_samples)
        prompt = Prompt(
            text=first.prompt,
            tokens=first.tokens[: first.prompt_length],
            label=first.label,
            metadata=first.metadata,
            apply_chat_template_kwargs=first.apply_chat_template_kwargs,
            tools=first.tools,
            row=group.row,
        )
        more = group_from_prompt(
            prompt,
            index=group.index,
            first_sample=self._next_sample,
            n_samples=max(0, self._n_samples - num_samples),
            rollout_seed=self._seed,
        ).samples
        self._next_sample += len(more)
        group.samples = [*group.samples[: self._n_samples], *more]

    def _group(self, prompt: Prompt) -> Group:
        group = group_from_prompt(
            prompt,
            index=self._next_group,
            first_sample=self._next_sample,
            n_samples=self._n_samples,
            rollout_seed=self._seed,
            epoch=self._epoch,
        )
        self._next_group += 1
        self._next_sample += self._n_samples
        return group


class GroupBuffer:
    """Returned groups, issued again first in, first out, or as selected by a `--buffer-filter-path` function.

    The function has slime's signature: `fn(args, rollout_id, buffer, num_samples)` with `rollout_id` None and the
    buffer as lists of samples. It returns at most `num_samples` of them and removes these from `buffer`. A group that
    it removes and does not return is dropped and reported to `on_drop(group, reason)`.
    """

    def __init__(
        self,
        *,
        buffer_filter: BufferFilter | None = None,
        args: Any = None,
        on_drop: Callable[[Group, str], None] | None = None,
    ) -> None:
        self._filter, self._args, self._on_drop = buffer_filter, args, on_drop
        self._groups: dict[int, Group] = {}

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, groups: Iterable[Group]) -> None:
        """Append groups. Raises DataError for one that is already in the buffer."""
        for group in groups:
            if group.index in self._groups:
                raise DataError(f"group {group.index} was returned twice; return a group once each time it is issued")
            self._groups[group.index] = group

    def clear(self) -> None:
        """Remove all groups."""
        self._groups.clear()

    def take(self, n: int) -> list[Group]:
        """Remove and return up to `n` groups."""
        if n < 1 or not self._groups:
            return []
        if self._filter is None:
            return [self._groups.pop(index) for index in list(self._groups)[:n]]
        return self._select(self._filter, n)

    def _select(self, select: BufferFilter, n: int) -> list[Group]:
        """Call the user's function, and check that every group is returned, kept in the buffer, or dropped."""
        buffer = [group.samples for group in self._groups.values()]
        index_of = {id(group.samples): index for index, group in self._groups.items()}
        answer = cast(Any, select(self._args, None, buffer, n))
        if not isinstance(answer, list):
            raise DataError(f"--buffer-filter-path returned {type(answer).__name__}; it must return a list of groups")
        selected = cast("list[list[Sample]]", answer)
        unknown = sum(id(samples) not in index_of for samples in [*selected, *buffer])
        selected_ids = [index_of[id(samples)] for samples in selected if id(samples) in index_of]
        kept_ids = {index_of[id(samples)] for samples in buffer if id(samples) in index_of}
        both = kept_ids.intersection(selected_ids)
        if unknown or both or len(selected) > n or len(set(selected_ids)) < len(selected):
            raise DataError(
                f"--buffer-filter-path returned {len(selected)} groups for {n} requested: {unknown} not from the "
                f"buffer, {len(both)} still in it; return lists of the buffer, each once, and remove them from it"
            )
        groups = [self._groups.pop(index) for index in selected_ids]
        for index in [index for index in self._groups if index not in kept_ids]:
            group = self._groups.pop(index)
            if self._on_drop is not None:
                self._on_drop(group, "buffer_filter")
        return groups


def json_group(group: Group) -> dict[str, Any]:
    """Return a snapshot of a group as JSON data. Raises CheckpointError for a value that JSON cannot represent."""
    return _json(group.to_dict(), f"a sample's metadata, label or reward in group {group.index}")


def _json(value: dict[str, Any], what: str) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what} cannot be saved in a checkpoint: {error}; a custom function set a value that is not JSON: use "
            "plain numbers, strings, lists and dicts"
        ) from error
