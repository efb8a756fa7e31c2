"""A data source that is saved and restored at any point continues the same stream."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_zoo import chat_tokenizer, write_jsonl
from furlong.core.sample import Group
from furlong.data.dataset import open_prompts
from furlong.data.prompt import PromptFormat
from furlong.data.source import RolloutDataSource

TOKENIZER = chat_tokenizer()
MAX_ROWS = 23


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files of every length, with some rows over the length limit and some blank lines."""
    path = tmp_path_factory.mktemp("data")
    for n in range(1, MAX_ROWS + 1):
        rows = [{"input": "x" * (1 + i * 5 % 9), "label": str(i)} for i in range(n)]
        write_jsonl(path / f"{n}.jsonl", [line for i, row in enumerate(rows) for line in ["", row][i % 3 > 0 :]])
        pq.write_table(pa.Table.from_pylist(rows), path / f"{n}.parquet", row_group_size=1 + n // 4)
    return path


CONFIGS = st.fixed_dictionaries(
    {
        "rows": st.integers(1, MAX_ROWS),
        "suffix": st.sampled_from(["jsonl", "parquet"]),
        "start": st.integers(0, 3),
        "stop": st.none() | st.integers(0, MAX_ROWS),
        "streaming": st.booleans(),
        "block": st.integers(1, 30),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**40),
        "limit": st.none() | st.integers(6, 9),
        "num_epoch": st.none() | st.integers(0, 3),
        "samples": st.integers(1, 3),
        "workers": st.sampled_from([0, 0, 0, 2]),
    }
)
# Each step: take n groups, return some unfinished groups, and optionally save and restore into a new source.
STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(0, 20), max_size=3), st.booleans()), min_size=3, max_size=10
)


def open_source(folder: Path, config: dict[str, Any]) -> RolloutDataSource | None:
    """Open the source that a configuration describes; return None if its slice has no usable row."""
    stop = config["rows"] if config["stop"] is None else min(config["stop"], config["rows"])
    if not any(config["limit"] is None or 1 + i * 5 % 9 <= config["limit"] for i in range(config["start"], stop)):
        return None
    bounds = f"[{config['start']}:{'' if config['stop'] is None else config['stop']}]"
    prompts = open_prompts(
        f"{folder}/{config['rows']}.{config['suffix']}@{bounds}",
        tokenizer=TOKENIZER,
        prompt_format=PromptFormat(label_key="label", max_prompt_len=config["limit"]),
        streaming=config["streaming"],
        num_workers=config["workers"],
        shuffle_buffer_size=config["block"],
    )
    return RolloutDataSource(
        prompts,
        n_samples_per_prompt=config["samples"],
        shuffle=config["shuffle"],
        rollout_seed=config["seed"],
        num_epoch=config["num_epoch"],
    )


def run(folder: Path, config: dict[str, Any], steps: list[Any], *, restoring: bool) -> list[Any]:
    """Return what the source yields; with `restoring`, restore into a new source after each save."""
    data = open_source(folder, config)
    if data is None:
        return []
    log: list[Any] = []
    out: list[Group] = []
    for n, returns, save in steps:
        groups = data.next_groups(n)
        out += groups
        log.append(json.dumps([g.to_dict() for g in groups]))
        back = [out.pop(i % len(out)) for i in returns if out]
        for group in back:
            group.samples[0].append_response_tokens(tokens=[len(log)], log_probs=[-0.5], text="r", version=1)
        data.return_groups(back)
        if save and restoring:
            state = json.loads(json.dumps(data.state()))
            data.close()
            data = open_source(folder, config)
            assert data is not None
            data.restore(state)
        state = data.state()
        log.append((state["epoch"], data.groups_per_epoch, len(state["returned"])))
    data.close()
    return log


@settings(max_examples=250, deadline=None)
@given(config=CONFIGS, steps=STEPS)
def test_a_restored_source_continues_the_same_stream(folder: Path, config: dict[str, Any], steps: list[Any]) -> None:
    assert run(folder, config, steps, restoring=True) == run(folder, config, steps, restoring=False)


@settings(max_examples=80, deadline=None)
@given(config=CONFIGS, takes=st.lists(st.integers(1, 9), min_size=40, max_size=40), hold=st.integers(0, 3))
def test_every_row_is_issued_once_per_epoch_and_again_only_if_returned(
    folder: Path, config: dict[str, Any], takes: list[int], hold: int
) -> None:
    config = {**config, "num_epoch": 2}
    data = open_source(folder, config)
    if data is None:
        return
    done: list[Group] = []
    indices: list[int] = []
    for n in takes:
        groups = data.next_groups(n)
        data.return_groups(groups[:hold][: len(groups) // 2])
        done += groups[:hold][len(groups) // 2 :] + groups[hold:]
        indices += [g.index for g in groups if g.index not in indices]
    while groups := data.next_groups(5):
        done += groups
    data.close()
    counts = Counter((g.epoch, g.row) for g in done)
    assert set(counts.values()) == {1}
    rows = {row for epoch, row in counts if epoch == 0}
    assert {row for epoch, row in counts if epoch == 1} == rows
    assert data.groups_per_epoch == len(rows)
    assert indices == sorted(indices)
    samples = sorted(s.index for g in done for s in g if s.index is not None)
    assert samples == list(range(len(rows) * 2 * config["samples"]))


@settings(max_examples=20, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=1, max_size=300),
    workers=st.integers(1, 4),
    streaming=st.booleans(),
)
def test_workers_change_neither_prompts_nor_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], workers: int, streaming: bool
) -> None:
    path = tmp_path_factory.mktemp("w") / "a.jsonl"
    write_jsonl(path, [{"input": text} for text in ["first", *texts]])
    results = []
    for num_workers in (0, workers):
        prompts = open_prompts(
            str(path),
            tokenizer=TOKENIZER,
            prompt_format=PromptFormat(apply_chat_template=True, max_prompt_len=60),
            streaming=streaming,
            num_workers=num_workers,
            skip_bad_rows=True,
            shuffle_buffer_size=100,
        )
        prompts.begin(3)
        results.append(prompts.take(400))
        prompts.close()
    assert results[0] == results[1]
