"""Parts of the loop on their own, dumps and replays."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from furlong.data.audit import audit
from furlong.errors import ConfigError
from furlong.files.batch_file import load_batch
from furlong.files.sample_file import load_samples
from runs import flags, reproducible, rows, train, trainer_bytes


@pytest.fixture(scope="module")
def recorded(model, data, tmp_path_factory):
    """A run of three rollouts with dumps of everything."""
    folder = tmp_path_factory.mktemp("recorded")
    train(
        flags(
            model,
            data,
            folder / "run",
            num_rollout=3,
            dump_details=folder / "dump",
            save=folder / "save",
            global_batch_size=8,
            eval_prompt_data=["held_out", data],
            eval_interval=3,
        )
    )
    return folder


def test_details_are_dumped_for_every_rollout_and_evaluation(recorded):
    rollouts = sorted(p.name for p in (recorded / "dump" / "rollout_data").iterdir())
    assert {name.split(".")[0] for name in rollouts} == {"0", "1", "2", "eval_0", "eval_3"}
    batches = sorted((recorded / "dump" / "train_data").iterdir())
    assert [load_batch(p).rollout_id for p in batches] == [0, 1, 2]
    columns = load_batch(batches[0]).columns
    assert {"advantages", "old_log_probs", "rollout_log_probs"} <= set(columns)
    moved = np.abs(columns["train_log_probs"] - columns["old_log_probs"])
    assert 0 < (moved > 1e-5).sum() < len(moved)  # half of the samples are in the second optimizer step
    assert (columns["train_entropy"] > 0).all()
    dump = load_samples(next(p for p in (recorded / "dump" / "rollout_data").iterdir() if p.name.startswith("1.")))
    assert [len(group) for group in dump.groups] == [4] * 4
    assert [s.token_versions[0] for group in dump.groups for s in group.samples] == [1] * 16


def test_training_on_a_dump_gives_the_same_bits(recorded, model, tmp_path):
    template = next((recorded / "dump" / "rollout_data").glob("0.*")).name.replace("0", "{rollout_id}", 1)
    argv = flags(
        model, None, tmp_path / "run", num_rollout=3, global_batch_size=8, save=tmp_path / "save", rm_type=None,
        load_debug_rollout_data=recorded / "dump" / "rollout_data" / template,
    )  # fmt: skip
    assert train(argv) == 3

    def shown(row):
        kinds = ("train/", "rollout/")
        return {k: v for k, v in row.items() if k.startswith(kinds)}

    original = [shown(row) for row in rows(recorded / "run") if row["step"]]
    replayed = [shown(row) for row in rows(tmp_path / "run")]
    assert replayed == original
    want, got = trainer_bytes(recorded / "save", 3), trainer_bytes(tmp_path / "save", 3)
    assert {name for name in want if want[name] != got[name]} == set()


@pytest.mark.parametrize("pause_mode", ["hold", "abort"])
def test_training_on_a_dump_takes_the_pause_mode_of_the_run_that_wrote_it(pause_mode, recorded, model, tmp_path):
    template = next((recorded / "dump" / "rollout_data").glob("0.*")).name.replace("0", "{rollout_id}", 1)
    argv = flags(
        model, None, tmp_path / "run", num_rollout=3, rm_type=None, async_buffer_size=1, pause_mode=pause_mode,
        load_debug_rollout_data=recorded / "dump" / "rollout_data" / template,
    )  # fmt: skip
    assert train(argv) == 3


def test_missing_dump_is_named(model, tmp_path):
    argv = flags(model, None, tmp_path / "run", rm_type=None, load_debug_rollout_data=tmp_path / "x_{rollout_id}.pt")
    with pytest.raises(ConfigError, match=r"\[CFG05\] --load-debug-rollout-data .*.*x_0\.pt"):
        train(argv)


def test_rollouts_only_generate_score_and_dump(recorded, model, data, tmp_path):
    argv = flags(
        model, data, tmp_path / "run", num_rollout=2, debug_rollout_only=True, debug_rollout_print_every=2,
        save_debug_rollout_data=tmp_path / "dump_{rollout_id}",
    )  # fmt: skip
    assert train(argv) == 2
    found = rows(tmp_path / "run")
    assert not [name for name in found[0] if name.startswith("train/")]
    assert found[0]["rollout/response_len/mean"] > 0
    first = load_samples(next((recorded / "dump" / "rollout_data").glob("0.*")))
    mine = load_samples(tmp_path / "dump_0")
    assert [s.tokens for g in mine.groups for s in g.samples] == [s.tokens for g in first.groups for s in g.samples]
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count("prompt '0+0='") == 1
    assert "rollout 1, sample" not in log
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok


def test_equal_commands_give_equal_runs_and_another_seed_another(model, data, tmp_path):
    def run(name, **changes):
        train(flags(model, data, tmp_path / name, **changes))
        return [reproducible(row) for row in rows(tmp_path / name)]

    assert run("a") == run("b")
    assert run("c", rollout_seed=7) != run("d")


def test_trace_shows_generation_rewards_training_and_weight_update_of_every_step(model, data, tmp_path):
    train(flags(model, data, tmp_path / "run", trace=True, save=tmp_path / "save"))
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    counts = Counter(event["name"] for event in trace if event["ph"] in "Xb")
    assert counts["rollout"] == counts["train"] == counts["actor_train"] == counts["optimizer step"] == 2
    assert counts["generate"] == 2 * 4 * 4
    assert counts["reward"] == 2 * 4
    assert counts["update weights"] == 2
    assert counts["engine busy"] >= 2
    named = {event["args"]["name"] for event in trace if event["ph"] == "M" and event["name"].endswith("_name")}
    assert {"driver", "furlong-engine"} <= named
    begun = {e["id"]: e["ts"] for e in trace if e["ph"] == "b"}
    ended = {e["id"]: e["ts"] for e in trace if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert all(ended[key] >= begun[key] for key in begun)


def test_the_profiler_records_the_selected_part_of_the_selected_rollouts(model, data, tmp_path):
    train(flags(model, data, tmp_path / "run", "--profile-target", "train_actor", use_pytorch_profiler=True))
    (profile,) = (tmp_path / "run" / "profile").iterdir()
    assert profile.name == "train_actor-actor_train-rank0-rollout1.json"
    assert any(event["name"] == "aten::mm" for event in json.loads(profile.read_text())["traceEvents"])
