from __future__ import annotations

import pytest
import torch

from furlong.config.sections import CheckpointFlags
from furlong.machine import Threads
from furlong.run import process_setup as process


@pytest.fixture(autouse=True)
def _same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("several_s", "count"), [(0.5, 2), (0.9, 1), (2.0, 1)])
def test_several_threads_have_to_pay(monkeypatch, several_s, count):
    monkeypatch.setattr(process, "_small_products_s", lambda threads: 1.0 if threads == 1 else several_s)
    chosen = process.set_threads(Threads(2, "2 CPUs"))
    assert chosen.count == torch.get_num_threads() == count
    assert ("of the time of one" in chosen.reason) == (count == 1)


def test_explicit_thread_count_is_not_tuned(monkeypatch):
    monkeypatch.setattr(process, "_small_products_s", lambda _: pytest.fail("tried"))
    assert process.set_threads(Threads(2, "--num-threads", is_given=True)).count == 2


def test_resumed_run_uses_thread_count_of_checkpoint_unless_overridden(tmp_path):
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    (folder / "state.json").write_text('{"num_threads": 3}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    flags = CheckpointFlags(load=str(tmp_path))
    chosen, asked = Threads(2, "2 CPUs"), Threads(2, "--num-threads", is_given=True)
    assert process.resume_thread_count(chosen, flags) == Threads(
        3, f"as in {tmp_path}, which is resumed", is_given=True
    )
    assert process.resume_thread_count(asked, flags) is asked
    assert process.resume_thread_count(chosen, CheckpointFlags()) is chosen


def test_the_trial_measures_time():
    assert 0 < process._small_products_s(1) < 10
