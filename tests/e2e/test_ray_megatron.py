"""Runs whose model is cut over processes by Megatron-core, on a local Ray cluster of five slots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diagnosed_runs import told
from forked_ray import RayWorkers
from furlong.cluster.ray_session import open_session
from furlong.models import hf_model as hf
from furlong.quickstart.quickstart import quickstart_flags
from runs import flags, rows, train, write_model, write_prompts

pytestmark = pytest.mark.nightly

pytest.importorskip("megatron", reason="megatron-core is not installed")

LOSS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "num_steps_per_rollout": 2}
TWO_PROCESSES = {"train_backend": "megatron", "actor_num_gpus_per_node": 2}


@pytest.fixture(scope="module")
def cluster(ray_workers: RayWorkers) -> Iterator[None]:
    session = open_session("local", num_slots=5)
    try:
        yield
    finally:
        session.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of --train-backend fsdp in this process, whose rollouts are kept."""
    folder = tmp_path_factory.mktemp("recorded")
    model = write_model(folder / "model", num_key_value_heads=2)
    data = write_prompts(folder / "prompts.jsonl")
    dump = folder / "rollout_{rollout_id}.safetensors"
    train(flags(model, data, folder / "run", save_debug_rollout_data=dump, num_rollout=3, **LOSS))
    return folder


def replay(recorded: Path, output: Path, **changes: Any) -> list[str]:
    dump = recorded / "rollout_{rollout_id}.safetensors"
    settings = {**TWO_PROCESSES, **LOSS, **changes}
    return flags(recorded / "model", None, output, load_debug_rollout_data=dump, rm_type=None, **settings)


def assert_equal(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for there, here in zip(found, wanted, strict=True):
        for name in ("train/loss", "train/pg_loss", "train/kl_loss", "rollout/log_probs", "rollout/ref_log_probs"):
            assert there[name] == pytest.approx(here[name], abs=1e-4), name
        assert there["train/grad_norm"] == pytest.approx(here["train/grad_norm"], rel=1e-4)


def test_two_processes_that_share_each_layer_train_as_one_and_resume(cluster, recorded, tmp_path):
    wanted = rows(recorded / "run")
    shared = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "save": tmp_path / "save", "async_save": True}
    hf_folder = tmp_path / "hf_{rollout_id}"
    assert train(replay(recorded, tmp_path / "first", num_rollout=2, save_hf=hf_folder, **shared)) == 2
    assert_equal(rows(tmp_path / "first"), wanted[:2])
    assert train(replay(recorded, tmp_path / "second", num_rollout=3, load=tmp_path / "save", **shared)) == 3
    assert_equal(rows(tmp_path / "second"), wanted[2:])
    (saved,) = tmp_path.glob("hf_*")
    before, after = (dict(hf.load_model(path).named_parameters()) for path in (recorded / "model", saved))
    assert before.keys() == after.keys()
    moved = [float((after[name] - before[name]).detach().abs().max()) for name in before]
    assert all(0 < largest < 0.2 for largest in moved)  # four steps of Adam at 1e-2


def test_four_processes_with_tp_and_pp_learn_the_quickstart_task(cluster, tmp_path):
    words = quickstart_flags(tmp_path, seed=1, num_rollout=3, is_async=False)
    words += ["--train-backend", "megatron", "--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "1"]
    words += ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    words += ["--decoder-first-pipeline-num-layers", "3"]
    train([*words, "--skip-eval-before-train", "--eval-interval", "9"])
    rewards = [row["rollout/raw_reward"] for row in rows(tmp_path)]
    assert rewards[2] > rewards[0] + 0.12  # of 64 prompts, whose mean has a standard error of 0.04
    assert told(tmp_path) == {}


def test_two_processes_in_a_row_train_as_one(cluster, ray_workers, recorded, tmp_path):
    assert train(replay(recorded, tmp_path / "run", pipeline_model_parallel_size=2)) == 2
    assert_equal(rows(tmp_path / "run"), rows(recorded / "run")[:2])
    printed = [path.read_text() for path in (tmp_path / "run" / "logs").glob("trainer-rank-*.log")]
    assert len(printed) == 2
    printed.append(ray_workers.log.read_text())  # what the imports have printed
    assert not any("Warning" in text for text in printed), printed
    assert set(told(tmp_path / "run")) <= {"TPL03", "STOP02"}  # a random model finds any text unlikely, and goes on
