"""Faults of checkpoints and model folders that are found before a run starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.world import names, only
from faults_marker import fault
from furlong.files.checkpoint_folder import TRACKER, folder_name
from furlong.files.manifest import MANIFEST, write_manifest
from stored_models import expert_layer, write_stored_model


def write_checkpoint(save: Path, step: int, *, optimizer: bool = True) -> Path:
    """The files of a checkpoint; their content is not read here."""
    folder = save / folder_name(step)
    (folder / "trainer").mkdir(parents=True)
    names = ["trainer_weights.safetensors", "trainer_rng.safetensors"]
    for name in [*names, *(["trainer_optimizer.safetensors"] if optimizer else [])]:
        (folder / "trainer" / name).write_bytes(b"12345678")
    (folder / "state.json").write_text(json.dumps({"ahead": [], "ledger": {}, "source": {}}))
    write_manifest(folder, step)
    (save / TRACKER).write_text(f"{step}\n")
    return folder


def _noise(tracker: Path) -> None:
    tracker.unlink(missing_ok=True)
    tracker.write_bytes(bytes(range(128, 256)))


# Each leaves a tracker that names no step; the last restores a file that can be written.
TRACKER_DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": lambda tracker: tracker.unlink(),
    "noise": _noise,
    "a word": lambda tracker: tracker.write_text("newest"),
    "empty": lambda tracker: tracker.write_bytes(b""),
}


def test_a_first_start_with_load_equal_to_save_is_healthy(world):
    assert world.look(save=world.folder / "save", load=world.folder / "save") == []
    (world.folder / "save").mkdir()
    assert world.look(save=world.folder / "save", load=world.folder / "save") == []


@fault("CKPT01")
def test_a_damaged_manifest_gets_another_step_only_if_there_is_one(world):
    save = world.folder / "save"
    manifest = write_checkpoint(save, 2) / MANIFEST
    manifest.write_text("{,")
    found = [each for each in world.look(load=save, save=save) if each.id == "CKPT01"]
    assert names(found[0].finding, manifest, "damaged")
    assert (found[0].cause, found[0].remedy) == ("", "restore it from a copy, or start a new run")
    write_checkpoint(save, 1)
    (save / TRACKER).write_text("2\n")
    found = [each for each in world.look(load=save, save=save) if each.id == "CKPT01"]
    assert found[0].remedy == "use --ckpt-step 1"
    given = [each for each in world.look(hf_checkpoint=save) if each.id == "CKPT07"]
    assert "give it to --load" in given[0].remedy


@fault("CKPT01")
def test_folder_without_a_checkpoint_is_refused(world):
    other = world.folder / "runs"
    other.mkdir()
    (other / "metrics.jsonl").touch()
    found = only(world.look(load=other), "CKPT01")
    assert names(found.finding, f"--load {other}", "latest_checkpointed_iteration.txt", "metrics.jsonl")
    assert "--save" in found.remedy
    begins = only(world.look(load=world.model), "CKPT06", "info")
    assert begins.evidence == {"step": 0}
    assert world.look(hf_checkpoint=world.model) == []


@fault("CKPT01")
def test_a_checkpoint_that_lost_bytes_names_another(world):
    save = world.folder / "save"
    write_checkpoint(save, 2)
    (write_checkpoint(save, 4) / "trainer" / "trainer_weights.safetensors").write_bytes(b"1")
    found = only(world.look(load=save, num_rollout=9), "CKPT01")
    assert names(found.finding, "trainer_weights.safetensors", "1 bytes", "8")
    assert found.remedy.endswith("use --ckpt-step 2")
    only(world.look(load=save, ckpt_step=2, num_rollout=9), "CKPT06", "info")


@fault("CKPT02")
def test_a_step_that_was_not_saved_gets_the_nearest(world):
    save = world.folder / "save"
    for step in (2, 4, 8):
        write_checkpoint(save, step)
    found = only(world.look(load=save, ckpt_step=7, num_rollout=9), "CKPT02")
    assert names(found.finding, "--ckpt-step 7", "2, 4, 8")
    assert (found.evidence["steps"], found.evidence["nearest"]) == ([2, 4, 8], 8)
    assert found.remedy == "use --ckpt-step 8"
    only(world.look(load=save, ckpt_step=8, num_rollout=9), "CKPT06", "info")


@fault("CKPT01")
def test_the_folder_of_a_run_and_one_checkpoint_name_what_to_load(world):
    run, save = world.folder / "run", world.folder / "save"
    run.mkdir()
    (run / "ledger.jsonl").touch()
    config = {"config": {"checkpoint": {"save": str(save)}}}
    (run / "config.json").write_text(json.dumps(config))
    found = only(world.look(load=run), "CKPT01")
    assert f"--load {run}" in found.finding
    assert found.remedy == f"use --load {save}"
    found = of_row("CKPT07", world.look(hf_checkpoint=run))[0]
    assert "--save-hf" in found.remedy
    one = write_checkpoint(save, 2)
    found = only(world.look(load=one, num_rollout=9), "CKPT01")
    assert f"--load {one}" in found.finding
    assert found.remedy == f"use --load {save} --ckpt-step 2"
    only(world.look(load=save, ckpt_step=2, num_rollout=9), "CKPT06", "info")


@fault("CKPT08")
def test_a_run_that_begins_anew_writes_over_no_checkpoints(world):
    save, other = world.folder / "save", world.folder / "other"
    for step in (2, 4):
        write_checkpoint(save, step)
    found = only(world.look(save=save, num_rollout=9), "CKPT08")
    assert names(found.finding, f"--save {save}", "rollouts 2 to 4")
    assert (found.evidence["steps"], found.evidence["first"]) == ([2, 4], 0)
    assert names(found.remedy, f"--load {save}", "--save")
    assert "--finetune" not in found.remedy
    only(world.look(save=save, load=save, num_rollout=9), "CKPT06", "info")
    only(world.look(save=save, load=save, ckpt_step=2, num_rollout=9), "CKPT06", "info")  # goes back on purpose
    assert world.look(save=other, num_rollout=9) == []

    begun = world.folder / "begun"
    write_checkpoint(begun, 2)
    (begun / TRACKER).unlink()  # as if it had been killed within its first commit
    assert [each.id for each in world.look(save=begun, load=begun, num_rollout=9)] == ["CKPT01", "CKPT06"]

    write_checkpoint(other, 3)
    found = of_row("CKPT08", world.look(save=save, load=other, num_rollout=9))[0]
    assert (found.evidence["steps"], found.evidence["first"]) == ([4], 3)
    assert "rollout 4" in found.finding
    found = of_row("CKPT08", world.look(save=save, load=save, finetune=True, num_rollout=9))[0]
    assert found.evidence["first"] == 0  # from weights alone
    assert f"--load {save} without --finetune" in found.remedy


@fault("CKPT06")
def test_the_start_of_a_resumed_run_is_reported(world):
    save = world.folder / "save"
    write_checkpoint(save, 3, optimizer=False)
    found = only(world.look(load=save, num_rollout=9), "CKPT06")
    assert "rollout 3 of 9" in found.finding
    assert found.evidence["step"] == 3
    assert found.evidence["missing"] == ["optimizer"]
    write_checkpoint(save, 4)
    healthy = only(world.look(load=save, num_rollout=9), "CKPT06", "info")
    assert healthy.evidence["restored"][-2:] == ["optimizer", "random state"]


@fault("CKPT05")
def test_checkpoint_from_another_number_of_ranks_is_accepted(world):
    save = world.folder / "save"
    folder = write_checkpoint(save, 3)
    (folder / "trainer" / "trainer_rng_1.safetensors").write_bytes(b"12345678")
    found = {each.id: each for each in world.look(load=save, num_rollout=9)}
    assert set(found) == {"CKPT05", "CKPT06"}
    assert found["CKPT05"].severity == "info"
    assert (found["CKPT05"].evidence["saved_by"], found["CKPT05"].evidence["ranks"]) == (2, 1)
    (folder / "trainer" / "trainer_rng_1.safetensors").unlink()
    only(world.look(load=save, num_rollout=9), "CKPT06", "info")


@fault("CKPT05")
def test_checkpoint_from_another_backend_is_accepted(world):
    save = world.folder / "save"
    folder = write_checkpoint(save, 3)
    (folder / "trainer" / "trainer.json").write_text('{"layout": {"tensor": 2, "expert": 1}}')
    found = only([each for each in world.look(load=save, num_rollout=9) if each.id != "CKPT06"], "CKPT05", "info")
    assert names(found.finding, "megatron (tensor 2)", "--train-backend fsdp")


@fault("CKPT07")
def test_folder_that_is_not_a_model(world):
    (world.model / "tokenizer.json").rename(world.folder / "tokenizer.json")
    (world.model / "tokenizer_config.json").rename(world.folder / "tokenizer_config.json")
    found = only(world.look(), "CKPT07")
    assert "tokenizer.json" in found.finding
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (world.folder / name).rename(world.model / name)
    assert world.look() == []
    missing = only(world.look(hf_checkpoint=world.folder / "modell"), "CKPT07")
    assert "modell: no such directory" in missing.text()


@fault("CKPT07")
def test_pickled_weights_are_refused_with_the_advice_to_convert_them(world):
    for shard in world.model.glob("model*.safetensors*"):
        shard.rename(world.model / "pytorch_model.bin")
    found = only(world.look(), "CKPT07")
    assert "model.safetensors" in found.finding
    assert f".save_pretrained('{world.model}')" in found.remedy


@fault("CKPT04")
def test_a_truncated_shard_ends_a_run_before_it_starts(world):
    shard = next(world.model.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    assert shard.name in only(world.look(), "CKPT04").finding
    shard.write_bytes(content)
    assert world.look() == []


@fault("SYNC03")
def test_a_router_that_sglang_would_not_renew(world):
    write_stored_model(world.model, [expert_layer(n) for n in range(2)], num_hidden_layers=2, model_type="glm4_moe")
    command = {"engine": "sglang", "rollout_num_gpus": 1, "colocate": True}
    found = of_row("SYNC03", world.look(**command))
    assert found[0].evidence == {"model_type": "glm4_moe", "routers": 2}
    assert "model.layers.0.mlp.gate.weight" in found[0].finding
    frozen = found[0].remedy.split("'")[1]
    assert not of_row("SYNC03", world.look(**command, freeze_params_name_list=[frozen]))
    assert not of_row("SYNC03", world.look(**command, only_train_params_name_list=["experts"]))
    assert not of_row("SYNC03", world.look())
    write_stored_model(world.model, [expert_layer(n) for n in range(2)], num_hidden_layers=2, model_type="qwen3_moe")
    assert not of_row("SYNC03", world.look(**command))


@fault("SYNC04")
def test_an_output_layer_that_sglang_would_not_tie(world):
    layers = [expert_layer(n) for n in range(2)]
    moe = {"num_hidden_layers": 2, "model_type": "qwen3_moe"}
    command = {"engine": "sglang", "rollout_num_gpus": 1, "colocate": True}
    write_stored_model(world.model, layers, **moe, tie_word_embeddings=True)
    found = of_row("SYNC04", world.look(**command))
    assert found[0].evidence == {"model_type": "qwen3_moe", "tie_word_embeddings": True}
    assert not of_row("SYNC04", world.look())
    for healthy in (
        moe,
        moe | {"tie_word_embeddings": False},
        {**moe, "model_type": "qwen3", "tie_word_embeddings": True},
    ):
        write_stored_model(world.model, layers, **healthy)
        assert not of_row("SYNC04", world.look(**command))


def of_row(row, found):
    return [each for each in found if each.id == row]


@fault("CKPT01")
def test_checkpoints_whose_newest_is_not_named(world):
    save = world.folder / "save"
    own = {"save": save, "load": save, "num_rollout": 9}
    for step in (2, 4):
        newest = write_checkpoint(save, step)
        for damage in TRACKER_DAMAGE.values():
            damage(save / TRACKER)
            found, start = world.look(**own)
            assert (found.id, found.severity, start.id) == ("CKPT01", "warning", "CKPT06")
            assert names(found.finding, f"--load {save}", str(save / TRACKER), f"{newest}, which is loaded")
            assert f"rollout {step}" in start.finding
    assert names(found.remedy, "2, 4", "--ckpt-step")
    only(world.look(**own, ckpt_step=4), "CKPT06", "info")
    assert [each.id for each in world.look(load=save, num_rollout=9)] == ["CKPT01", "CKPT06"]


@fault("CKPT01")
@pytest.mark.parametrize("damage", ["noise", "a word"])
def test_an_unusable_tracker_without_checkpoints_is_refused(world, damage):
    save = world.folder / "save"
    save.mkdir()
    TRACKER_DAMAGE[damage](save / TRACKER)
    found = only(of_row("CKPT01", world.look(save=save, load=save)), "CKPT01")
    assert str(save / TRACKER) in found.finding


@fault("CKPT01")
def test_a_folder_with_incomplete_checkpoints_alone_is_not_a_first_start(world):
    save = world.folder / "save"
    (write_checkpoint(save, 2) / MANIFEST).unlink()
    (save / TRACKER).unlink()
    found = only(world.look(save=save, load=save), "CKPT01")
    assert names(found.finding, TRACKER, "no complete checkpoint", folder_name(2))
    (save / folder_name(2)).rename(save / f"{folder_name(2)}.partial")
    assert world.look(save=save, load=save) == []


@fault("CKPT01")
def test_one_checkpoint_in_place_of_their_folder(world):
    save = world.folder / "save"
    write_checkpoint(save, 2)
    write_checkpoint(save, 4)
    found = only(world.look(load=save / folder_name(2), num_rollout=9), "CKPT01")
    assert found.remedy == f"use --load {save} --ckpt-step 2"
    only(world.look(load=save, ckpt_step=2, num_rollout=9), "CKPT06", "info")


def copy_with_sizes(world, **sizes):
    folder = world.folder / "copy"
    shutil.copytree(world.model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return folder


@fault("OPD01")
def test_a_teacher_that_cannot_be_compared(world):
    own = {"use_opd": True, "opd_type": "trainer", "opd_teacher_load": copy_with_sizes(world, hidden_size=96)}
    found = [each for each in world.look(**own, train_backend="megatron") if each.id == "OPD01"]
    assert "hidden_size 96 and not " in found[0].finding
    assert "--opd-teacher-urls" in found[0].remedy
    shutil.copytree(copy_with_sizes(world, vocab_size=8), world.folder / "smaller")
    own = {"use_opd": True, "opd_loss": "full", "opd_teacher_load": world.folder / "smaller"}
    own["hf_checkpoint"] = copy_with_sizes(world, vocab_size=99)
    found = [each for each in world.look(**own) if each.id == "OPD01"]
    assert found[0].evidence == {"teacher": 8, "policy": 99}
    assert "OPD01" not in {each.id for each in world.look(**own | {"opd_teacher_load": own["hf_checkpoint"]})}


@fault("NUM01", "NUM07", "OPD01")
@pytest.mark.parametrize(
    ("row", "flag", "given"),
    [
        ("NUM01", "ref_load", {"use_kl_loss": True}),
        ("OPD01", "opd_teacher_load", {"use_opd": True, "opd_type": "trainer"}),
        ("NUM07", "critic_load", {"advantage_estimator": "ppo"}),
    ],
)
def test_a_further_model_with_other_tokens(world, row, flag, given):
    own = {**given, flag: world.folder / "other"}
    shutil.copytree(world.model, own[flag])
    assert world.look(**own) == []
    path = own[flag] / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocab, [*list(vocab.values())[1:], vocab[next(iter(vocab))]], strict=True))
    path.write_text(json.dumps(tokenizer))
    found = only(world.look(**own), row)
    assert found.evidence["moved"] == found.evidence["tokens"] == len(vocab)
    assert f"--{flag.replace('_', '-')}" in found.remedy
    assert world.look(**own | {flag: world.model}) == []
