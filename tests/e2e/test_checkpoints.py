"""Checkpoints as a user meets them: through flags, files and messages."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from furlong.data.audit import audit
from furlong.errors import ConfigError
from furlong.models.tokenizer import write_template
from runs import flags, reproducible, rows, train, trainer_bytes


@pytest.fixture(scope="module")
def trained(model, data, tmp_path_factory):
    """A finished run of four rollouts with a checkpoint after each second one, and exports."""
    folder = tmp_path_factory.mktemp("trained")
    train(
        flags(model, data, folder / "run", num_rollout=4, save=folder / "save", save_interval=2,
              save_hf=f"{folder}/hf_{{rollout_id}}")
    )  # fmt: skip
    return folder


def test_folders_have_the_names_that_scripts_know(trained):
    assert {p.name for p in (trained / "save").iterdir()} == {
        "iter_0000002",
        "iter_0000004",
        "latest_checkpointed_iteration.txt",
    }
    assert (trained / "save" / "latest_checkpointed_iteration.txt").read_text() == "4\n"


def test_export_loads_in_transformers_with_the_trained_weights_and_the_tokenizer(trained, model):
    exported = AutoModelForCausalLM.from_pretrained(trained / "hf_4", local_files_only=True)
    saved = load_file(trained / "save" / "iter_0000004" / "trainer" / "trainer_weights.safetensors")
    original = AutoModelForCausalLM.from_pretrained(model, local_files_only=True)
    parameters = dict(exported.named_parameters())
    assert all(torch.equal(saved[name], parameter) for name, parameter in parameters.items())
    assert any(not torch.equal(p, parameters[name]) for name, p in original.named_parameters())
    tokenizer = AutoTokenizer.from_pretrained(trained / "hf_4", local_files_only=True)
    assert tokenizer.encode("1+2=") == AutoTokenizer.from_pretrained(model, local_files_only=True).encode("1+2=")


def test_the_trained_model_is_kept_with_a_card(model, data, tmp_path):
    train(flags(model, data, tmp_path / "run", eval_prompt_data=data, save=tmp_path / "save"))
    saved = load_file(tmp_path / "save" / "iter_0000002" / "trainer" / "trainer_weights.safetensors")
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", local_files_only=True)
    assert all(torch.equal(saved[name], parameter) for name, parameter in kept.named_parameters())
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    evaluated = {row["step"]: row[f"eval/{data.stem}"] for row in rows(tmp_path / "run") if f"eval/{data.stem}" in row}
    assert list(evaluated) == [0, 2]
    for words in (f"--hf-checkpoint={model}", str(data), "(curve.svg)", f"| 2 | {evaluated[2]:.4g} |"):
        assert words in card
    assert "<polyline" in (tmp_path / "run" / "model" / "curve.svg").read_text()


def test_the_trained_model_is_where_flags_say(model, data, tmp_path):
    train(flags(model, data, tmp_path / "a", num_rollout=1, save_hf=tmp_path / "own"))
    assert (tmp_path / "own" / "model.safetensors").exists()
    train(flags(model, data, tmp_path / "b", num_rollout=1, no_save_model=True))
    assert not [folder for name in "ab" if (folder := tmp_path / name / "model").exists()]
    with pytest.raises(ConfigError, match="the trained model replaces"):
        train(flags(tmp_path / "own", data, tmp_path / "c", save_hf=tmp_path / "own"))


def test_a_run_that_was_ended_while_it_wrote_its_model_writes_it_when_repeated(model, data, tmp_path):
    command = flags(model, data, tmp_path / "run", num_rollout=1, save=tmp_path / "save", load=tmp_path / "save")
    kept = tmp_path / "run" / "model"
    train(command)
    weights = (kept / "model.safetensors").read_bytes()
    kept.rename(kept.with_name("model.partial"))
    train(command)
    assert (kept / "model.safetensors").read_bytes() == weights
    (kept / "README.md").unlink()
    train(command)
    assert not (kept / "README.md").exists()  # it was complete
    os.utime(kept, (0, 0))  # the model of an earlier step
    train(command)
    assert (kept / "README.md").exists()


def test_export_has_the_chat_template_that_was_trained_with(model, data, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    settings = {
        "apply_chat_template": True,
        "chat_template_path": own,
        "num_rollout": 1,
        "save_hf": tmp_path / "hf_{rollout_id}",
    }
    train(flags(model, data, tmp_path / "run", save=tmp_path / "save", save_interval=1, **settings))
    assert AutoTokenizer.from_pretrained(tmp_path / "hf_1", local_files_only=True).chat_template == own.read_text()
    write_template(tmp_path / "hf_1", "other")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf_1", local_files_only=True).chat_template == "other"


def test_ckpt_step_selects_an_earlier_checkpoint_to_resume_from(trained, model, data, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    save = tmp_path / "save"
    before = trainer_bytes(save, 4)
    train(flags(model, data, tmp_path / "run", num_rollout=4, save=save, load=save, save_interval=2, ckpt_step=2))
    assert trainer_bytes(save, 4) == before
    assert [reproducible(r) for r in rows(tmp_path / "run")] == [reproducible(r) for r in rows(trained / "run")]
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok


def test_more_rollouts_can_be_added_to_a_finished_run(trained, model, data, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    assert train(flags(model, data, tmp_path / "run", num_rollout=5, load=tmp_path / "save")) == 5
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok


def test_finished_run_that_is_started_again_does_nothing_and_exits_well(trained, model, data, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    save = tmp_path / "save"
    assert train(flags(model, data, tmp_path / "run", num_rollout=4, load=save, save=save)) == 4
    assert rows(tmp_path / "run") == rows(trained / "run")
    assert "nothing to train: 4 of 4 rollouts are done" in (tmp_path / "run" / "run.log").read_text()
    assert audit(tmp_path / "run" / "ledger.jsonl", finished=True).ok


def test_branch_in_a_new_folder_begins_a_partial_ledger(trained, model, data, tmp_path):
    assert train(flags(model, data, tmp_path / "branch", num_rollout=5, load=trained / "save", ckpt_step=2)) == 5
    assert [row["step"] for row in rows(tmp_path / "branch")] == [3, 4, 5]
    assert audit(tmp_path / "branch" / "ledger.jsonl", finished=True).ok


def test_only_the_newest_checkpoints_are_kept(model, data, tmp_path):
    train(
        flags(model, data, tmp_path / "run", num_rollout=5, save=tmp_path / "save", save_interval=1, keep_checkpoints=2)
    )
    assert sorted(p.name for p in (tmp_path / "save").glob("iter_*")) == ["iter_0000004", "iter_0000005"]


def test_checkpoint_without_optimizer_is_smaller_and_loads(model, data, tmp_path):
    save = tmp_path / "save"
    train(flags(model, data, tmp_path / "run", save=save, no_save_optim=True))
    assert "trainer_optimizer.safetensors" not in trainer_bytes(save, 2)
    assert train(flags(model, data, tmp_path / "run", num_rollout=3, load=save, no_save_optim=True)) == 3


def test_finetuning_starts_with_the_weights_of_a_checkpoint_or_of_a_folder_alone(trained, model, data, tmp_path):
    start = {"num_rollout": 1, "lr": 1e-9}
    train(flags(model, data, tmp_path / "a", load=trained / "save", finetune=True, save=tmp_path / "a-save", **start))
    train(flags(model, data, tmp_path / "b", load=trained / "hf_4", save=tmp_path / "b-save", **start))
    names = ("trainer_weights.safetensors", "trainer_optimizer.safetensors")
    for name in names:
        a, b = (load_file(tmp_path / f"{run}-save" / "iter_0000001" / "trainer" / name) for run in "ab")
        assert a.keys() == b.keys()
        assert all(torch.allclose(a[key], b[key], atol=1e-6) for key in a)
    assert len(rows(tmp_path / "a")) == 1


def test_reference_can_be_a_checkpoint_and_equals_its_export(trained, model, data, tmp_path):
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, "num_rollout": 1}
    train(flags(model, data, tmp_path / "a", ref_load=trained / "save", **kl))
    train(flags(model, data, tmp_path / "b", ref_load=trained / "hf_4", **kl))
    train(flags(model, data, tmp_path / "c", ref_load=trained / "save", ref_ckpt_step=2, **kl))
    train(flags(model, data, tmp_path / "d", ref_load=trained / "hf_2", **kl))
    a, b, c, d = (reproducible(rows(tmp_path / name)[0]) for name in "abcd")
    assert a == b
    assert c == d
    assert a["train/kl_loss"] != c["train/kl_loss"]


def test_step_of_a_hugging_face_model_is_refused(trained, model, data, tmp_path):
    folder = trained / "hf_4"
    for flag, others in (
        ("ref", {"ref_load": folder, "ref_ckpt_step": 2, "use_kl_loss": True, "kl_loss_coef": 0.1}),
        ("", {"load": folder, "ckpt_step": 2}),
    ):
        with pytest.raises(ConfigError, match="ckpt-step 2 has no effect"):
            train(flags(model, data, tmp_path / f"run{flag}", **others))


def test_start_rollout_id_numbers_the_first_rollout(model, data, tmp_path):
    assert train(flags(model, data, tmp_path / "run", num_rollout=7, start_rollout_id=5)) == 7
    assert [row["step"] for row in rows(tmp_path / "run")] == [6, 7]
