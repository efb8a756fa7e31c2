"""Contract of data sources, run over all implementations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_zoo import chat_tokenizer, numbered_rows, write_jsonl
from furlong.core.sample import Group, Sample
from furlong.data.custom_source import CustomDataSource
from furlong.data.dataset import open_prompts
from furlong.data.prompt import PromptFormat
from furlong.data.source import RolloutDataSource
from furlong.errors import CheckpointError
from furlong.interfaces import DataSource

NUM_ROWS = 9
NUM_EPOCH = 2
TOKENIZER = chat_tokenizer()
Make = Callable[[], DataSource]


class SavedList:
    """A user-defined data source: two epochs of the rows, with state saved as JSON files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.next, self.returned = folder, 0, []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = [self.returned.pop(0) for _ in range(min(num_samples, len(self.returned)))]
        while len(groups) < num_samples and self.next < NUM_ROWS * NUM_EPOCH:
            row = numbered_rows(NUM_ROWS)[self.next % NUM_ROWS]
            groups.append([Sample(prompt=row["input"], label=row["label"]) for _ in range(2)])
            self.next += 1
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.returned += samples

    def save(self, rollout_id: int) -> None:
        returned = [[s.to_dict() for s in samples] for samples in self.returned]
        (self.folder / f"{rollout_id}.json").write_text(json.dumps([self.next, returned]))

    def load(self, rollout_id: int) -> None:
        self.next, returned = json.loads((self.folder / f"{rollout_id}.json").read_text())
        self.returned = [[Sample.from_dict(s) for s in samples] for samples in returned]

    def __len__(self) -> int:
        return NUM_ROWS


@pytest.fixture(params=["table", "stream", "shuffled table", "shuffled stream", "parquet stream", "custom"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Return a function that reopens the same source, as a resumed run does."""
    name: str = request.param
    path = write_jsonl(tmp_path / "a.jsonl", numbered_rows(NUM_ROWS))
    if "parquet" in name:
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(numbered_rows(NUM_ROWS)), path, row_group_size=4)

    def open_source() -> DataSource:
        if name == "custom":
            return CustomDataSource(SavedList(tmp_path), tokenizer=TOKENIZER)
        prompts = open_prompts(
            str(path),
            tokenizer=TOKENIZER,
            prompt_format=PromptFormat(label_key="label"),
            streaming="stream" in name,
            shuffle_buffer_size=4,
        )
        return RolloutDataSource(prompts, n_samples_per_prompt=2, shuffle="shuffled" in name, num_epoch=NUM_EPOCH)

    return open_source


def drain(source: DataSource, n: int = 4) -> list[Group]:
    groups: list[Group] = []
    while batch := source.next_groups(n):
        groups += batch
    return groups


def plain(groups: list[Group]) -> list[dict[str, Any]]:
    return json.loads(json.dumps([group.to_dict() for group in groups]))


def test_each_prompt_is_issued_once_per_epoch(make: Make) -> None:
    source = make()
    groups = drain(source)
    labels = [group.samples[0].label for group in groups]
    for epoch in range(NUM_EPOCH):
        assert sorted(labels[epoch * NUM_ROWS :][:NUM_ROWS]) == [str(i) for i in range(NUM_ROWS)]
    assert len(groups) == NUM_ROWS * NUM_EPOCH
    assert source.next_groups(3) == []
    assert source.groups_per_epoch == NUM_ROWS


def test_fewer_groups_than_requested_only_at_the_end(make: Make) -> None:
    source = make()
    assert source.next_groups(0) == []
    assert [len(source.next_groups(7)) for _ in range(4)] == [7, 7, 4, 0]


def test_groups_and_samples_are_numbered_upwards_without_repeats(make: Make) -> None:
    groups = drain(make())
    assert [group.index for group in groups] == list(range(len(groups)))
    assert [sample.index for group in groups for sample in group] == list(range(2 * len(groups)))
    assert all(sample.group_index == group.index for group in groups for sample in group)
    assert len({sample.seed for group in groups for sample in group}) == 2 * len(groups)


def test_prompts_are_tokenized(make: Make) -> None:
    for sample in make().next_groups(1)[0]:
        assert TOKENIZER.decode(sample.tokens) == sample.prompt
        assert sample.response_length == 0


def test_returned_groups_are_issued_first_with_their_tokens(make: Make) -> None:
    source = make()
    first, second, _ = source.next_groups(3)
    second.samples[1].append_response_tokens(tokens=[5], log_probs=[-0.5], text="x", version=2)
    kept = plain([second, first])
    source.return_groups([second])
    source.return_groups([first])
    again = source.next_groups(3)
    assert plain(again[:2]) == kept
    assert again[2].index == 3


def test_a_state_continues_the_stream_in_a_new_source(make: Make) -> None:
    source = make()
    out = source.next_groups(11)
    source.return_groups(out[2:4])
    state = json.loads(json.dumps(source.state()))
    expected = plain(drain(source))
    resumed = make()
    resumed.restore(state)
    assert plain(drain(resumed)) == expected


def test_a_state_of_another_kind_is_rejected(make: Make) -> None:
    state = make().state()
    with pytest.raises(CheckpointError):
        make().restore({**state, "version": 99})
