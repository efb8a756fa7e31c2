from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from furlong.core.sample import Group
from furlong.data.dataset import open_prompts
from furlong.data.mixture import MixturePart, PromptMixture
from furlong.data.prompt import PromptFormat
from furlong.data.source import RolloutDataSource
from furlong.errors import CheckpointError
from furlong.models.tokenizer import build_tokenizer

SIZES, WEIGHTS = {"calc": 4, "search": 6, "rare": 5}, {"calc": 2.0, "search": 1.0, "rare": 0.5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        rows = [{"input": f"{len(name)}+{i}=", "metadata": {"row": i}} for i in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def mixture(folder: Path, *, seed: int | None = 7, weights: dict[str, float] | None = None) -> PromptMixture:
    parts = [
        MixturePart(
            name,
            weight,
            open_prompts(str(folder / f"{name}.jsonl"), tokenizer=build_tokenizer(), prompt_format=PromptFormat()),
        )
        for name, weight in (weights or WEIGHTS).items()
    ]
    return PromptMixture(parts, key="environment", seed=seed)


def source(prompts: PromptMixture) -> RolloutDataSource:
    return RolloutDataSource(prompts, n_samples_per_prompt=2, shuffle=True, rollout_seed=7)


def drawn(groups: list[Group]) -> list[tuple[str, int]]:
    return [(g.samples[0].metadata["environment"], g.samples[0].metadata["row"]) for g in groups]


def test_prompts_are_drawn_by_weight_in_every_stretch(folder: Path):
    names = [name for name, _ in drawn(source(mixture(folder)).next_groups(70))]
    assert Counter(names) == {"calc": 40, "search": 20, "rare": 10}
    for start in range(0, 63, 7):
        assert 3 <= names[start : start + 7].count("calc") <= 5


def test_each_part_goes_through_its_data_before_it_repeats(folder: Path):
    rows = drawn(source(mixture(folder)).next_groups(70))
    for name, size in SIZES.items():
        own = [row for part, row in rows if part == name]
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))
    assert [row for part, row in rows if part == "calc"][:4] != [row for part, row in rows if part == "calc"][4:8]


def test_without_shuffling_each_part_keeps_the_order_of_its_file(folder: Path):
    rows = drawn(source(mixture(folder, seed=None)).next_groups(30))
    own = [row for part, row in rows if part == "search"]
    assert own == [number % 6 for number in range(len(own))]


def test_a_resumed_mixture_continues_the_same_order(folder: Path):
    for taken in [0, 1, 7, 14, 15, 16, 40]:
        whole = source(mixture(folder))
        whole.next_groups(taken)
        state = json.loads(json.dumps(whole.state()))
        resumed = source(mixture(folder))
        resumed.restore(state)
        assert drawn(resumed.next_groups(40)) == drawn(whole.next_groups(40))


def test_a_mixture_with_other_weights_or_data_is_not_resumed(folder: Path):
    state = source(mixture(folder)).state()
    with pytest.raises(CheckpointError, match="weight"):
        source(mixture(folder, weights={"calc": 1.0, "search": 1.0, "rare": 0.5})).restore(state)
    (folder / "rare.jsonl").write_text('{"input": "9+9="}\n')
    with pytest.raises(CheckpointError, match="MiB"):
        source(mixture(folder)).restore(state)


def test_an_epoch_has_as_many_prompts_as_the_parts_together(folder: Path):
    prompts = mixture(folder)
    assert prompts.size == 15
    prompts.begin(0)
    assert [len(prompts.take(10)), len(prompts.take(10)), len(prompts.take(10))] == [10, 5, 0]
