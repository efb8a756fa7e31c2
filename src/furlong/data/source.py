"""The data source: prompts become groups of samples, each prompt once an epoch, in an order that can be continued."""

from __future__ import annotations

import copy
import json
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import xxhash

from furlong.core.sample import Group, Sample
from furlong.data.dataset import Prompts
from furlong.data.prompt import Prompt
from furlong.errors import CheckpointError, ConfigError, DataError

logger = logging.getLogger(__name__)

BufferFilter = Callable[[Any, int | None, list[list[Sample]], int], list[list[Sample]]]

STATE_VERSION = 1
PARTS = {"head": "its first MiB is another", "tail": "its last MiB is another"}  # hashes say nothing to a reader


def sample_seed(rollout_seed: int, sample_index: int) -> int:
    """The sampling seed of a sample: the low 31 bits of XXH64 over the two integers as little-endian int64.

    It depends on nothing else, so a sample that is issued again, or after a resume, has the same seed.
    """
    return xxhash.xxh64_intdigest(struct.pack("<qq", rollout_seed, sample_index)) & 0x7FFFFFFF


def group_from_prompt(
    prompt: Prompt, *, index: int, first_sample: int, n_samples: int, rollout_seed: int, epoch: int = 0
) -> Group:
    """Make the samples of one prompt. They share nothing mutable but `tools`, which is not to be edited."""
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


class RolloutDataSource:
    """Hands out the prompts of a table or stream, `n_samples_per_prompt` samples each, epoch after epoch.

    With `shuffle`, epoch e has the order of the key `rollout_seed + e`. Groups given back come first, in the order in
    which they came back, with the tokens they have. `num_epoch` None never ends. For one thread.

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
        prompts.begin(self._key(0))

    @property
    def groups_per_epoch(self) -> int | None:
        """Number of groups in one epoch; None while a streamed file has not been read through."""
        return self._prompts.size

    def next_groups(self, n: int) -> list[Group]:
        """Up to `n` groups, those given back first; fewer only at the end of the last epoch, [] after it."""
        groups = self._returned.take(n)
        while len(groups) < n and (self._num_epoch is None or self._epoch < self._num_epoch):
            wanted = n - len(groups)
            prompts = self._prompts.take(wanted)
            groups += [self._group(prompt) for prompt in prompts]
            if len(prompts) < wanted:
                self._epoch += 1
                self._prompts.begin(self._key(self._epoch))
        return groups

    def return_groups(self, groups: Sequence[Group]) -> None:
        """Take unfinished groups back. Raises DataError for a group twice, or one that this source never issued."""
        for group in groups:
            if group.index >= self._next_group:
                raise DataError(
                    f"group {group.index} was given back but never issued: the next new group is {self._next_group}; "
                    "give back the groups that next_groups returned"
                )
        self._returned.put(groups)

    def state(self) -> dict[str, Any]:
        """JSON-able snapshot: settings, epoch, position, counters, and the groups given back.

        Groups that are with the rollout are not in it: the caller saves those and gives them back after `restore`.
        """
        return {
            "version": STATE_VERSION,
            "settings": self._settings(),
            "epoch": self._epoch,
            "position": self._prompts.position(),
            "next_group": self._next_group,
            "next_sample": self._next_sample,
            "returned": [json_group(group) for group in self._returned],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the stream. Raises CheckpointError naming each setting in which the data is another one.

        Groups that were given back get as many samples as new ones have: the first of theirs, or more.
        """
        if state.get("version") != STATE_VERSION:
            raise CheckpointError(
                f"the data state has version {state.get('version')!r}, this furlong reads {STATE_VERSION}; "
                "resume with the furlong that wrote the checkpoint"
            )
        saved, now = state["settings"], self._settings()
        differing = sorted(key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key))
        if differing:
            changes = "; ".join(
                PARTS[key] if key in PARTS else f"{key} was {saved.get(key)!r}, is {now.get(key)!r}"
                for key in differing
            )
            raise CheckpointError(
                f"the checkpoint was made with other data or another order ({changes}), so its position means nothing "
                "here; use the same data and settings, or start a new run from the checkpoint's weights (--finetune)"
            )
        self._epoch = state["epoch"]
        self._next_group, self._next_sample = state["next_group"], state["next_sample"]
        self._prompts.seek(self._key(self._epoch), state["position"])
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
        """Leave out samples beyond `n_samples_per_prompt`, or add some of which nothing is generated."""
        had, first = len(group.samples), group.samples[0]
        if had == self._n_samples:
            return
        logger.info("group %d, given back with %d samples, has %d now", group.index, had, self._n_samples)
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
            n_samples=max(0, self._n_samples - had),
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
    """A queue of groups, first in first out unless a `--buffer-filter-path` function picks.

    The function is called as slime calls it: `fn(args, rollout_id, buffer, num_samples)` with `rollout_id` None and
    the buffer as lists of samples. It returns at most `num_samples` of them and removes these from `buffer`. A group
    that it removes and does not return is dropped, which `on_drop(group, reason)` is told.
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

    def put(self, groups: Iterable[Group]) -> None:
        """Add groups at the end. Raises DataError for one that is already there."""
        for group in groups:
            if group.index in self._groups:
                raise DataError(
                    f"group {group.index} was given back twice; give a group back once each time it was handed out"
                )
            self._groups[group.index] = group

    def clear(self) -> None:
        """Forget all groups."""
        self._groups.clear()

    def take(self, n: int) -> list[Group]:
        """Remove and return up to `n` groups."""
        if n < 1 or not self._groups:
            return []
        if self._filter is None:
            return [self._groups.pop(index) for index in list(self._groups)[:n]]
        return self._picked(self._filter, n)

    def _picked(self, pick: BufferFilter, n: int) -> list[Group]:
        """Let the user's function pick, and check that every group is either picked, left, or dropped."""
        buffer = [group.samples for group in self._groups.values()]
        index_of = {id(group.samples): index for index, group in self._groups.items()}
        answer = cast(Any, pick(self._args, None, buffer, n))
        if not isinstance(answer, list):
            raise DataError(f"--buffer-filter-path returned {type(answer).__name__}; it must return a list of groups")
        picked = cast("list[list[Sample]]", answer)
        strange = sum(id(samples) not in index_of for samples in [*picked, *buffer])
        picked_ids = [index_of[id(samples)] for samples in picked if id(samples) in index_of]
        left_ids = {index_of[id(samples)] for samples in buffer if id(samples) in index_of}
        both = left_ids.intersection(picked_ids)
        if strange or both or len(picked) > n or len(set(picked_ids)) < len(picked):
            raise DataError(
                f"--buffer-filter-path returned {len(picked)} groups for {n} asked: {strange} not of the buffer, "
                f"{len(both)} were left in the buffer too; return its own lists, each once, and remove them from it"
            )
        groups = [self._groups.pop(index) for index in picked_ids]
        for index in [index for index in self._groups if index not in left_ids]:
            group = self._groups.pop(index)
            if self._on_drop is not None:
                self._on_drop(group, "buffer_filter")
        return groups


def json_group(group: Group) -> dict[str, Any]:
    """A snapshot of a group as JSON data. Raises CheckpointError for a value that JSON cannot hold."""
    try:
        return json.loads(json.dumps(group.to_dict()))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"group {group.index} cannot go into a checkpoint: {error}; a custom function put a value that is not "
            "JSON into a sample's metadata, label or reward: store plain numbers, strings, lists and dicts there"
        ) from error
