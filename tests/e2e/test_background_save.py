"""`--async-save`: the files are those of a run that waits for them, whatever is trained while they are written."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from furlong.files.atomic import PendingFiles
from furlong.files.batch_file import ARRAYS, load_batch
from furlong.training.worker import RoundWorker
from runs import flags, reproducible, rows, train, trainer_bytes, write_prompts

SETTINGS = {
    "one_ahead_with_an_old_actor": {"async_buffer_size": 1, "keep_old_actor": True, "global_batch_size": 8},
    "bfloat16_filtered": {
        "bf16": True,
        "dynamic_sampling_filter_path": "furlong.rollout.filters.check_reward_nonzero_std",
    },
}
NUM, EVERY = 5, 2


@pytest.mark.parametrize("name", SETTINGS)
def test_checkpoint_written_while_the_next_rollout_is_trained_equals_one_that_is_waited_for(
    name, model, tmp_path, monkeypatch
):
    data = write_prompts(tmp_path / "prompts.jsonl", 14)

    def run(folder, **more):
        save = folder / "save"
        argv = flags(model, data, folder / "run", num_rollout=NUM, save=save, save_interval=EVERY, **SETTINGS[name])
        assert train([*argv, *(f"--{flag}" for flag in more)]) == NUM

    plain, background = tmp_path / "plain", tmp_path / "background"
    run(plain)

    trained, late = threading.Event(), []
    train_part, write = RoundWorker.train_part, PendingFiles.write

    def train_and_tell(worker, part, **options):
        found = train_part(worker, part, **options)
        trained.set()
        return found

    def write_late(files):
        late.append(trained.wait(20))
        write(files)

    snapshot = RoundWorker.snapshot

    def snapshot_and_clear(worker, folder):
        found = snapshot(worker, folder)
        if not folder.parent.name.startswith(f"iter_{NUM:07d}"):
            trained.clear()
        return found

    monkeypatch.setattr(RoundWorker, "train_part", train_and_tell)
    monkeypatch.setattr(RoundWorker, "snapshot", snapshot_and_clear)
    monkeypatch.setattr(PendingFiles, "write", write_late)
    run(background, **{"async-save": True})

    assert late == [True] * 3  # before all but the last was written, another rollout was trained on
    assert [reproducible(row) for row in rows(background / "run")] == [reproducible(row) for row in rows(plain / "run")]
    for step in (2, 4, 5):
        assert trainer_bytes(background / "save", step) == trainer_bytes(plain / "save", step)
        folders = [of / "save" / f"iter_{step:07d}" for of in (plain, background)]
        want, got = (json.loads((folder / "state.json").read_text()) for folder in folders)
        assert all(got["ledger"].pop(key) != want["ledger"].pop(key) for key in ("id", "xxh3_128"))  # of another run
        assert got == want
        for ahead in got["ahead"]:
            waited, held = (load_batch(folder / ahead) for folder in folders)  # but for times in metadata and metrics
            for part in ARRAYS:
                assert np.array_equal(getattr(held, part), getattr(waited, part)), part
            assert held.columns.keys() == waited.columns.keys()
            assert all(np.array_equal(held.columns[column], waited.columns[column]) for column in held.columns)
