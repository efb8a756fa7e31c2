from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_zoo import chat_tokenizer, numbered_rows, write_jsonl
from furlong.core.sample import Group, Sample
from furlong.data.custom_source import CustomDataSource
from furlong.data.dataset import open_prompts
from furlong.data.prompt import PromptFormat
from furlong.data.source import RolloutDataSource, sample_seed, shuffled
from furlong.errors import CheckpointError, ConfigError, DataError

TOKENIZER = chat_tokenizer()
GOLDEN_ORDER = [7, 1, 6, 4, 3, 5, 0, 2]
GOLDEN_SEED = 1063512344


def source(
    path: Path | str, *, streaming: bool = False, prompt_format: PromptFormat | None = None, **options: Any
) -> RolloutDataSource:
    prompts = open_prompts(
        str(path),
        tokenizer=TOKENIZER,
        prompt_format=prompt_format or PromptFormat(label_key="label"),
        streaming=streaming,
        shuffle_buffer_size=options.pop("shuffle_buffer_size", 4),
    )
    return RolloutDataSource(prompts, **options)


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", numbered_rows(10))


def test_a_stream_without_shuffle_is_in_file_order_and_learns_its_length(ten: Path) -> None:
    data = source(ten, streaming=True)
    assert data.groups_per_epoch is None
    assert [g.row for g in data.next_groups(12)] == [*range(10), 0, 1]
    assert data.groups_per_epoch == 10


def test_streamed_rows_stay_in_their_block(ten: Path) -> None:
    rows = [g.row for g in source(ten, streaming=True, shuffle=True).next_groups(10)]
    assert [sorted(rows[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert rows != list(range(10))


def test_the_order_is_fixed_for_all_platforms() -> None:
    assert shuffled(8, key=42).tolist() == GOLDEN_ORDER
    assert shuffled(8, key=43).tolist() != GOLDEN_ORDER
    assert shuffled(8, key=42, block=1).tolist() != GOLDEN_ORDER
    assert sorted(shuffled(1000, key=-1).tolist()) == list(range(1000))
    assert sample_seed(42, 7) == GOLDEN_SEED


def test_samples_of_a_group_are_numbered_seeded_and_share_nothing(ten: Path) -> None:
    data = source(ten, n_samples_per_prompt=3, rollout_seed=5)
    first, second = data.next_groups(2)
    assert [s.index for g in (first, second) for s in g] == list(range(6))
    assert [s.rollout_id for s in second] == [3, 4, 5]
    assert {s.group_index for s in second} == {1}
    assert [s.seed for s in second] == [sample_seed(5, i) for i in (3, 4, 5)]
    assert TOKENIZER.decode(second.samples[0].tokens) == second.samples[0].prompt == "x1"
    second.samples[0].metadata["n"].append(9)
    second.samples[0].tokens.append(9)
    assert second.samples[1].metadata == {"n": [1]}
    assert len(second.samples[1].tokens) == 2
    again = [g for g in data.next_groups(10) if g.row == 1]
    assert again[0].samples[0].metadata == {"n": [1]}


def test_returned_groups_are_issued_after_the_last_epoch(ten: Path) -> None:
    data = source(ten, num_epoch=1)
    groups = data.next_groups(11)
    assert data.next_groups(1) == []
    data.return_groups(groups[:1])
    assert data.next_groups(5) == groups[:1]


def test_a_group_returned_twice_or_never_issued_is_rejected(ten: Path) -> None:
    data = source(ten)
    (group,) = data.next_groups(1)
    data.return_groups([group])
    with pytest.raises(DataError, match="group 0 was returned twice"):
        data.return_groups([group])
    with pytest.raises(DataError, match=r"group 5 .*never issued"):
        data.return_groups([Group(5, [Sample()])])


def test_a_state_is_a_snapshot(ten: Path) -> None:
    data = source(ten)
    groups = data.next_groups(1)
    data.return_groups(groups)
    state = data.state()
    before = json.dumps(state)
    groups[0].samples[0].tokens.append(5)
    assert json.dumps(state) == before
    resumed = source(ten)
    resumed.restore(state)
    resumed.next_groups(1)[0].samples[0].metadata["n"].append(1)
    assert json.dumps(state) == before


def test_a_value_that_json_cannot_represent_is_an_error(ten: Path) -> None:
    data = source(ten)
    groups = data.next_groups(1)
    groups[0].samples[0].metadata["bad"] = object()
    data.return_groups(groups)
    with pytest.raises(CheckpointError, match=r"group 0 .*: Object of type object"):
        data.state()


def _other(path: Path, **changes: Any) -> RolloutDataSource:
    return source(path, **{"shuffle": True, **changes})


def test_another_order_is_rejected_by_name(ten: Path) -> None:
    for difference, changes in [
        ("shuffle was True, is False", {"shuffle": False}),
        ("rollout_seed was 42, is 1", {"rollout_seed": 1}),
        ("streaming was False, is True", {"streaming": True}),
        ("label_key was 'label', is None", {"prompt_format": PromptFormat()}),
        ("max_prompt_len was None, is 3", {"prompt_format": PromptFormat(label_key="label", max_prompt_len=3)}),
    ]:
        state = _other(ten).state()
        with pytest.raises(CheckpointError, match=difference):
            _other(ten, **changes).restore(state)


def test_other_data_is_rejected_by_name(ten: Path, tmp_path: Path) -> None:
    state = _other(ten).state()
    longer = write_jsonl(tmp_path / "b.jsonl", numbered_rows(11))
    with pytest.raises(CheckpointError, match=r"num_prompts was 10, is 11; size was \d+, is \d+; its last MiB differs"):
        _other(longer).restore(state)
    with pytest.raises(CheckpointError, match=r"slice was '\[:\]', is '\[1:\]'"):
        source(f"{ten}@[1:]", shuffle=True).restore(state)
    with pytest.raises(CheckpointError, match="version 99"):
        _other(ten).restore({**state, "version": 99})


def test_more_samples_per_prompt_after_a_resume_keep_indices_unique(ten: Path) -> None:
    data = source(ten, n_samples_per_prompt=2)
    data.next_groups(3)
    resumed = source(ten, n_samples_per_prompt=5)
    resumed.restore(data.state())
    assert [s.index for s in resumed.next_groups(1)[0]] == [6, 7, 8, 9, 10]


def test_returned_groups_are_resized_after_a_resume(ten: Path) -> None:
    for number in [1, 2, 5]:
        data = source(ten, n_samples_per_prompt=3)
        taken = data.next_groups(2)
        taken[1].samples[0].append_response_tokens(tokens=[7], log_probs=[-0.5])
        data.return_groups(taken[1:])
        resumed = source(ten, n_samples_per_prompt=number)
        resumed.restore(json.loads(json.dumps(data.state())))
        old, new = resumed.next_groups(2)
        kept = taken[1].samples[:number]
        assert (old.index, old.row, old.samples[: len(kept)]) == (1, 1, kept)
        assert len(old.samples) == len(new.samples) == number
        assert [s.index for s in [*old.samples[len(kept) :], *new]] == list(range(6, 6 + 2 * number - len(kept)))
        for sample in old.samples[1:]:
            assert sample.seed == sample_seed(42, sample.index)
            assert (sample.tokens, sample.response_length, sample.label) == (kept[0].tokens[:-1], 0, kept[0].label)
            assert (sample.group_index, sample.rollout_id, sample.prompt) == (1, sample.index, kept[0].prompt)


def test_invalid_counts_are_rejected(ten: Path) -> None:
    with pytest.raises(ConfigError, match="--n-samples-per-prompt is 0"):
        source(ten, n_samples_per_prompt=0)
    with pytest.raises(ConfigError, match="shuffle buffer size is 0"):
        source(ten, streaming=True, shuffle_buffer_size=0)


# --- the buffer filter ------------------------------------------------------------------------------------------------


def _newest(args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    assert rollout_id is None
    assert args == "args"
    picked = buffer[-num_samples:]
    del buffer[-num_samples:]
    return picked


def test_a_buffer_filter_selects_groups(ten: Path) -> None:
    data = source(ten, buffer_filter=_newest, args="args")
    data.return_groups(data.next_groups(3))
    assert [g.index for g in data.next_groups(2)] == [1, 2]
    assert [g.index for g in data.next_groups(2)] == [0, 3]


def test_a_group_removed_by_the_filter_is_reported_as_dropped(ten: Path) -> None:
    def stale(args: Any, rollout_id: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
        buffer.pop(0)
        return [buffer.pop(0)]

    dropped: list[tuple[int, str]] = []
    data = source(ten, buffer_filter=stale, on_drop=lambda g, why: dropped.append((g.index, why)))
    data.return_groups(data.next_groups(3))
    assert [g.index for g in data.next_groups(1)] == [1]
    assert dropped == [(0, "buffer_filter")]
    assert len(data.state()["returned"]) == 1


def test_a_buffer_filter_that_duplicates_or_invents_groups_is_rejected(ten: Path) -> None:
    for fault in [
        lambda args, rollout_id, buffer, n: buffer[:1],  # left in the buffer too
        lambda args, rollout_id, buffer, n: [buffer.pop(), buffer.pop()],  # more than asked
        lambda args, rollout_id, buffer, n: [list(buffer.pop())],  # a copy
        lambda args, rollout_id, buffer, n: None,
    ]:
        data = source(ten, buffer_filter=fault)
        data.return_groups(data.next_groups(3))
        with pytest.raises(DataError, match="--buffer-filter-path"):
            data.next_groups(1)


# --- custom sources ---------------------------------------------------------------------------------------------------


class Countdown:
    """A data source in slime's form."""

    def __init__(self, left: int = 6) -> None:
        self.left, self.returned, self.saved = left, [], {}

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = [self.returned.pop(0) for _ in range(min(num_samples, len(self.returned)))]
        while self.left and len(groups) < num_samples:
            groups.append([Sample(prompt=f"x{self.left}", label=str(self.left)) for _ in range(2)])
            self.left -= 1
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.returned += samples

    def save(self, rollout_id: int) -> None:
        self.saved[rollout_id] = self.left

    def load(self, rollout_id: int) -> None:
        self.left = self.saved[rollout_id]

    def __len__(self) -> int:
        return 6


def test_a_custom_source_is_numbered_tokenized_and_seeded() -> None:
    data = CustomDataSource(Countdown(), tokenizer=TOKENIZER, rollout_seed=3)
    first, second = data.next_groups(2)
    assert (first.index, second.index) == (0, 1)
    assert [s.index for s in second] == [2, 3]
    assert second.samples[0].seed == sample_seed(3, 2)
    assert TOKENIZER.decode(second.samples[0].tokens) == "x5"
    data.return_groups([first])
    again, third = data.next_groups(2)
    assert again.samples is first.samples
    assert (again.index, third.index) == (0, 2)
    assert len(data.next_groups(9)) == 3
    assert data.next_groups(9) == []
    assert data.groups_per_epoch == 6


def test_a_custom_source_saves_and_loads_itself() -> None:
    instance = Countdown()
    data = CustomDataSource(instance)
    data.next_groups(2)
    state = json.loads(json.dumps(data.state()))
    data.next_groups(2)
    data.restore(state)
    (group,) = data.next_groups(1)
    assert (group.index, group.samples[0].label, group.samples[0].index) == (2, "4", 4)
    with pytest.raises(CheckpointError, match="Countdown"):
        data.restore({**state, "class": "Other"})


def test_a_custom_source_without_a_method_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"\['get_samples', 'add_samples', 'save', 'load', '__len__'\]"):
        CustomDataSource(object())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "list of non-empty lists"),
        ([Sample()], "list of non-empty lists"),
        ([[]], "list of non-empty lists"),
        ([[Sample(group_index=1), Sample(group_index=2)]], "group_index"),
        ([[Sample(group_index=1)], [Sample(group_index=1)]], "distinct values"),
        ([[Sample()], [Sample()], [Sample()]], "returned 3 groups"),
    ],
)
def test_an_invalid_answer_of_a_custom_source_is_rejected(answer: Any, message: str) -> None:
    class Wrong(Countdown):
        def get_samples(self, num_samples: int) -> Any:
            return answer

    with pytest.raises(DataError, match=message):
        CustomDataSource(Wrong()).next_groups(2)
