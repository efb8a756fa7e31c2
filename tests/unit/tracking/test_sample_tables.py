"""Tables of samples: which samples they have, when trackers get them, and what TensorBoard reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from furlong.core.sample import Sample, Status
from furlong.tracking.trackers import COLUMNS, MAX_CHARS, SampleTable, SampleTables, TensorBoardTracker, Trackers


def samples(count: int, **more: Any) -> list[Sample]:
    return [Sample(group_index=0, index=i, prompt="1+1=", tokens=[1], **more) for i in range(count)]


class Shown:
    """A tracker that keeps its tables, and fails for one of them."""

    def __init__(self, fails_at: int = -1) -> None:
        self.tables: list[SampleTable] = []
        self.fails_at = fails_at

    def log(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def log_samples(self, table: SampleTable) -> None:
        if table.step == self.fails_at:
            raise OSError("full")
        self.tables.append(table)

    def close(self) -> None:
        pass


class Plain:
    """A tracker without tables."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


def test_trackers_get_the_first_samples_of_each_step_when_it_is_recorded():
    tables, shown = SampleTables(2), Shown(fails_at=2)
    trackers = Trackers({"plain": Plain(), "shown": shown}, tables)
    tables.add(0, "held_out", samples(1))
    for step in (1, 2, 3):  # rollouts ahead of training
        tables.add(step, "rollout", samples(3))
    for step in (0, 1, 2, 3):
        trackers.log(step, {})
        assert all(table.step <= step for table in shown.tables)
    assert [(table.key, table.step, len(table.rows)) for table in shown.tables] == [
        ("samples/held_out", 0, 1), ("samples/rollout", 1, 2), ("samples/rollout", 3, 2)
    ]  # fmt: skip
    assert trackers.failures == {"shown": 1}


def test_without_the_flag_nothing_is_kept():
    tables = SampleTables(None)
    tables.add(1, "rollout", samples(3))
    assert tables.take(1) == []


def test_rows_are_plain_values():
    tables = SampleTables(1)
    (sample,) = samples(1, label={"answer": 2})
    sample.append_response_tokens(tokens=[4, 5], log_probs=[-0.5, -2.0], text="x" * (MAX_CHARS + 1))
    sample.reward, sample.status = {"right": 1.0}, Status.TRUNCATED
    tables.add(1, "rollout", [sample])
    (table,) = tables.take(1)
    expected = [1, 0, 0, '{"right": 1.0}', "truncated", 2, "1+1=", "x" * MAX_CHARS, '{"answer": 2}']
    assert dict(zip(COLUMNS, expected, strict=True)) == {name: values[0] for name, values in table.columns().items()}


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer")  # of TensorBoard's own copy
def test_tensorboard_reads_a_table_whose_texts_are_no_markup(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util.tensor_util import make_ndarray

    tables = SampleTables(2)
    tables.add(3, "rollout", samples(2, response="# head\n| <b>bold</b> |"))
    tracker = TensorBoardTracker(tmp_path)
    for table in tables.take(3):
        tracker.log_samples(table)
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("samples/rollout")
    cells = make_ndarray(event.tensor_proto)
    assert (event.step, cells.shape, cells[0].tolist()) == (3, (3, len(COLUMNS)), [name.encode() for name in COLUMNS])
    html = text_array_to_html(cells, True)
    assert html.count("# head\n| &lt;b&gt;bold&lt;/b&gt; |") == 2
