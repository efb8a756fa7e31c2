"""Faults that are found before a run starts. Each is made, found with its values, mended as told, and gone."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_zoo import chat_tokenizer
from faults_marker import fault, typed
from furlong.cli import main
from furlong.config.flags import examine
from furlong.core.checkpoint_folder import MANIFEST, TRACKER, folder_name
from furlong.core.diagnosis import Diagnosis
from furlong.doctor.catalogue import CATALOGUE
from furlong.doctor.ports import taken_port
from furlong.doctor.preflight import CHECKS, machine, preflight
from furlong.engines.launch import words_of
from runs import flags, write_prompts
from stored_models import dense_layer, write_stored_model

Row = dict[str, Any]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "model"
    write_stored_model(folder, [dense_layer(0), dense_layer(1)], num_hidden_layers=2, max_position_embeddings=128)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def world(pristine, tmp_path) -> SimpleNamespace:
    """A model, prompts, and `look(**changes)`: the diagnoses of a command."""
    shutil.copytree(pristine, tmp_path / "model")
    data = write_prompts(tmp_path / "prompts.jsonl", 24)

    def look(**changes: Any) -> list[Diagnosis]:
        typed("furlong doctor ...", *words_of(changes))
        resolved, problems = examine(flags(tmp_path / "model", data, tmp_path / "run", **changes))
        return preflight(resolved.config, problems)

    def write(*rows: Row | str) -> None:
        data.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))

    return SimpleNamespace(look=look, write=write, folder=tmp_path, model=tmp_path / "model", data=data)


def only(found: list[Diagnosis], id: str, severity: str | None = None) -> Diagnosis:
    assert [each.id for each in found] == [id], "\n".join(each.text() for each in found)
    assert found[0].severity == (severity or CATALOGUE[id].severity)
    return found[0]


def write_checkpoint(save: Path, step: int, *, optimizer: bool = True) -> Path:
    """A checkpoint as files: what it holds is not read here."""
    folder = save / folder_name(step)
    (folder / "trainer").mkdir(parents=True)
    names = ["trainer_weights.safetensors", "trainer_rng.safetensors"]
    for name in [*names, *(["trainer_optimizer.safetensors"] if optimizer else [])]:
        (folder / "trainer" / name).write_bytes(b"12345678")
    (folder / "state.json").write_text(json.dumps({"ahead": [], "ledger": {}, "source": {}}))
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "step": step, "files": sizes}))
    (save / TRACKER).write_text(f"{step}\n")
    return folder


# ---- healthy commands

HEALTHY: dict[str, Row] = {
    "plain": {},
    "chat": {"apply_chat_template": True, "rm_type": "math"},
    "limits": {"rollout_max_prompt_len": 64, "rollout_max_context_len": 96},
    "async": {"async_buffer_size": 2, "update_weights_interval": 2},
    "steps": {"global_batch_size": 8, "micro_batch_size": 4},
    "fixed": {"debug_determinism": True},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.01},
    "demonstrations": {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_command_has_no_diagnosis(world, name):
    assert [found.text() for found in world.look(**HEALTHY[name])] == []


def test_a_first_start_that_is_to_resume_itself_is_healthy(world):
    assert world.look(save=world.folder / "save", load=world.folder / "save") == []
    (world.folder / "save").mkdir()
    assert world.look(save=world.folder / "save", load=world.folder / "save") == []


def test_a_check_that_raises_is_reported_and_the_others_are_made(world):
    def broken(context):
        raise ZeroDivisionError("in a check")

    resolved, _ = examine(flags(world.model, world.data, world.folder / "run", num_threads=999))
    ids = {found.id: found for found in preflight(resolved.config, checks=[broken, *CHECKS])}
    assert set(ids) == {"CHECK01", "ENV02"}
    assert "test_preflight.broken raised ZeroDivisionError: in a check" in ids["CHECK01"].finding


# ---- checkpoints


@fault("CKPT01")
def test_a_folder_of_something_else_is_no_checkpoint(world):
    other = world.folder / "runs"
    other.mkdir()
    (other / "metrics.jsonl").touch()
    found = only(world.look(load=other), "CKPT01")
    assert f"--load {other}: no latest_checkpointed_iteration.txt in that folder (it holds: metrics" in found.finding
    assert "to resume use the folder given to --save" in found.remedy
    assert world.look(load=world.model) == []  # weights to start with
    ignored = only(world.look(load=world.model, ckpt_step=3), "CFG02")
    assert f"--ckpt-step 3 has no effect: --load {world.model} is a Hugging Face folder" in ignored.finding
    assert world.look(hf_checkpoint=world.model) == []


@fault("CKPT01")
def test_a_checkpoint_that_lost_bytes_names_another(world):
    save = world.folder / "save"
    write_checkpoint(save, 2)
    (write_checkpoint(save, 4) / "trainer" / "trainer_weights.safetensors").write_bytes(b"1")
    found = only(world.look(load=save, num_rollout=9), "CKPT01")
    assert "has 1 bytes, the manifest says 8" in found.finding
    assert found.remedy == "--ckpt-step 2"
    only(world.look(load=save, ckpt_step=2, num_rollout=9), "CKPT06", "info")


@fault("CKPT02")
def test_a_step_that_was_not_saved_gets_the_nearest(world):
    save = world.folder / "save"
    for step in (2, 4, 8):
        write_checkpoint(save, step)
    found = only(world.look(load=save, ckpt_step=7, num_rollout=9), "CKPT02")
    assert "--ckpt-step 7" in found.finding
    assert "it holds 2, 4, 8" in found.finding
    assert found.remedy == "--ckpt-step 8"
    only(world.look(load=save, ckpt_step=8, num_rollout=9), "CKPT06", "info")


@fault("CKPT06")
def test_what_a_resumed_run_starts_from_is_said(world):
    save = world.folder / "save"
    write_checkpoint(save, 3, optimizer=False)
    found = only(world.look(load=save, num_rollout=9), "CKPT06")
    assert "continues at rollout 3 of 9" in found.finding
    assert "not in the checkpoint: optimizer" in found.finding
    assert found.evidence["missing"] == ["optimizer"]
    write_checkpoint(save, 4)
    healthy = only(world.look(load=save, num_rollout=9), "CKPT06", "info")
    assert healthy.evidence["restored"][-2:] == ["optimizer", "random state"]


@fault("CKPT05")
def test_a_checkpoint_of_another_number_of_ranks_is_no_error(world):
    save = world.folder / "save"
    folder = write_checkpoint(save, 3)
    (folder / "trainer" / "trainer_rng_1.safetensors").write_bytes(b"12345678")
    found = {each.id: each for each in world.look(load=save, num_rollout=9)}
    assert set(found) == {"CKPT05", "CKPT06"}
    assert found["CKPT05"].severity == "info"
    assert "saved by 2 training ranks with --train-backend fsdp, this run has 1 with" in found["CKPT05"].finding
    (folder / "trainer" / "trainer_rng_1.safetensors").unlink()
    only(world.look(load=save, num_rollout=9), "CKPT06", "info")


@fault("CKPT05")
def test_a_checkpoint_of_another_backend_is_no_error(world):
    save = world.folder / "save"
    folder = write_checkpoint(save, 3)
    (folder / "trainer" / "trainer.json").write_text('{"layout": {"tensor": 2, "expert": 1}}')
    found = only([each for each in world.look(load=save, num_rollout=9) if each.id != "CKPT06"], "CKPT05", "info")
    assert "megatron (tensor 2), this run has 1 with --train-backend fsdp: each reads its part" in found.finding


@fault("CFG05")
def test_a_model_that_megatron_cannot_cut(world):
    config = json.loads((world.model / "config.json").read_text())
    path = world.model / "config.json"
    path.write_text(json.dumps(config | {"mlp_bias": True, "num_key_value_heads": 1}))
    ranks = {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 1}
    flags = {"train_backend": "megatron", **ranks}
    found = [each.finding for each in world.look(**flags) if each.id == "CFG05"]
    assert any("mlp_bias" in finding for finding in found)
    assert any("does not divide the 1 key/value heads" in finding for finding in found)
    path.write_text(json.dumps(config))
    assert not [each for each in world.look(train_backend="megatron") if each.id == "CFG05"]


@fault("CKPT07")
def test_a_folder_that_is_no_model(world):
    (world.model / "tokenizer.json").rename(world.folder / "tokenizer.json")
    (world.model / "tokenizer_config.json").rename(world.folder / "tokenizer_config.json")
    found = only(world.look(), "CKPT07")
    assert "has no tokenizer.json" in found.finding
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (world.folder / name).rename(world.model / name)
    assert world.look() == []
    assert "no such folder" in only(world.look(hf_checkpoint=world.folder / "modell"), "CKPT07").finding
    config = json.loads((world.model / "config.json").read_text())
    (world.model / "config.json").write_text(json.dumps(config | {"model_type": "qwen99"}))
    assert "model_type 'qwen99'" in only(world.look(), "CKPT07").finding


@fault("CKPT04")
def test_a_truncated_shard_ends_a_run_before_it_starts(world):
    shard = next(world.model.glob("*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    assert shard.name in only(world.look(), "CKPT04").finding
    shard.write_bytes(content)
    assert world.look() == []


# ---- flags


@fault("CFG01")
def test_batch_sizes_that_do_not_fit_get_three_that_do(world):
    found = only(world.look(global_batch_size=6, num_steps_per_rollout=2), "CFG01")
    assert "--rollout-batch-size 4 x --n-samples-per-prompt 4 = 16 samples" in found.finding
    assert found.evidence["global_batch_size"] == 6
    settings = found.remedy.removeprefix("nearest settings that fit: ").split("; ")
    assert len(settings) == 3
    for words in settings:
        pairs = words.split()
        changes = {name[2:].replace("-", "_"): value for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
        asked = {"global_batch_size": 6, "num_steps_per_rollout": 2} | changes
        assert world.look(**asked) == [], words


@fault("CFG02")
def test_a_misspelt_flag_gets_its_name_and_one_without_effect_what_it_needs(world):
    found = only(world.look(rollout_batchsize=4), "CFG02")
    assert found.remedy == "did you mean --rollout-batch-size?"
    found = only(world.look(opsm_delta=0.1), "CFG02")
    assert found.remedy == "add --use-opsm or remove --opsm-delta"
    assert world.look(opsm_delta=0.1, use_opsm=True) == []


@fault("CFG03")
def test_an_engine_cannot_run_ahead_on_the_trainers_gpus(world):
    found = only(world.look(colocate=True, async_buffer_size=2), "CFG03")
    assert found.finding.startswith("--colocate with --async-buffer-size 2: engines cannot generate while")
    assert found.remedy == "use --rollout-num-gpus N instead of --colocate, or --async-buffer-size 0"
    assert world.look(colocate=True) == []


@fault("CFG04")
def test_a_token_limit_that_would_be_ignored(world):
    found = only(world.look(max_tokens_per_gpu=64, micro_batch_size=2), "CFG04")
    assert "--use-dynamic-batch-size" in found.finding
    assert "rollout_max_response_len / context_parallel_size" in found.remedy
    assert world.look(max_tokens_per_gpu=64, use_dynamic_batch_size=True) == []


@fault("CFG05")
def test_every_problem_of_a_command_is_found_at_once(world):
    found = world.look(lr="fast", min_lr=2.0, over_sampling_batch_size=2, num_threads=999, opsm_delta=0.1)
    assert sorted(each.id for each in found) == ["CFG02", "CFG05", "CFG05", "ENV02"]
    assert found[-1].severity == "warning"


@fault("HOOK01")
def test_a_function_that_cannot_be_imported(world):
    (world.folder / "mine.py").write_text("import not_there_7261\n")
    found = only(
        world.look(custom_loss_function_path=f"{world.folder}/mine.py:loss", loss_type="custom_loss"), "HOOK01"
    )
    assert "not_there_7261" in found.finding
    (world.folder / "mended.py").write_text("def loss(args, batch, logits, sum_of_sample_mean): ...\n")
    mended = f"{world.folder}/mended.py:loss"
    assert world.look(custom_loss_function_path=mended, loss_type="custom_loss") == []


@fault("TOOL01")
def test_a_generate_function_that_trains_on_what_tools_say(world):
    text = """
async def generate(args, sample, sampling_params):
    for turn in range(2):
        sample.tokens += [1, 2, 3]
    return sample
"""
    (world.folder / "agent.py").write_text(text)
    found = only(world.look(custom_generate_function_path=f"{world.folder}/agent.py:generate"), "TOOL01", "warning")
    assert "(line 4)" in found.finding
    (world.folder / "masked.py").write_text(text.replace("    return", "    sample.loss_mask = [0, 0, 0]\n    return"))
    assert world.look(custom_generate_function_path=f"{world.folder}/masked.py:generate") == []


# ---- templates and stopping


@fault("TPL01")
def test_prompts_that_are_templated_already(world):
    world.write(*({"input": f"<|im_start|>user\n{i}+1=<|im_end|>\n", "label": str(i)} for i in range(8)))
    found = only(world.look(apply_chat_template=True), "TPL01")
    assert "'<|im_start|>'" in found.finding
    assert "--apply-chat-template" in found.remedy
    assert world.look() == []


def test_a_function_of_slime_that_posts_to_a_router_that_is_not_there(world):
    agent = world.folder / "agent.py"
    agent.write_text(
        "def url(args):\n    return args.sglang_router_ip\n"
        "async def generate(args, sample, sampling_params):\n    return post(url(args), sample)\n"
        "async def asks_the_policy(args, sample, sampling_params):\n    return sample\n"
    )
    assert world.look(custom_generate_function_path=f"{agent}:asks_the_policy") == []
    changes = {"custom_generate_function_path": f"{agent}:generate"}
    found = only(world.look(**changes), "HOOK01", "warning")
    assert "reads args.sglang_router_ip, and this run has no router" in found.finding
    assert world.look(**changes, rollout_num_gpus=1, sglang_router_strategy="cache_aware") == []
    imports = world.folder / "imports.py"
    imports.write_text("from slime.utils.types import Sample\n")
    found = only(world.look(custom_generate_function_path=f"{imports}:generate"), "HOOK01")
    assert "needs the module slime" in found.finding
    assert "write `from furlong import Sample`" in found.remedy


def test_files_that_this_user_may_not_read_or_write(world, monkeypatch):
    locked = {world.model / "config.json"}
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) not in locked)  # tests may run as root
    assert f"{world.model}/config.json may not be read" in only(world.look(), "CKPT07").finding
    locked = {world.data}
    assert "prompts.jsonl may not be read" in only(world.look(), "CFG05").finding
    (world.folder / "run").mkdir()
    (world.folder / "run" / "run.log").touch()
    locked = {world.folder / "run" / "run.log"}
    assert "run.log in it is not writable" in only(world.look(), "DISK01").finding


def test_a_tracker_without_its_package(world, monkeypatch):
    monkeypatch.setattr("furlong.doctor.preflight.machine.find_spec", lambda _: None)
    assert "the package wandb is not installed" in only(world.look(use_wandb=True), "CFG05").finding


def test_a_rollout_of_more_prompts_than_there_are_is_worth_knowing(world):
    world.write({"input": "1+1=", "label": "2"})
    found = only(world.look(), "CFG01", "info")
    assert "--rollout-batch-size 4 is more than the 1 prompts of" in found.finding


def test_rows_that_are_no_utf_8_or_no_objects(world):
    world.data.write_bytes('{"input": "Größe", "label": "1"}\n'.encode("latin-1") * 4)
    found = only(world.look(), "DATA01")
    assert "byte 14 of the line is no UTF-8" in found.finding
    assert found.remedy == "save the file as UTF-8 (iconv does it)"
    world.write("[1, 2]")
    assert "write one object a line" in only(world.look(), "DATA01").remedy


@fault("TPL01")
def test_messages_without_a_template(world):
    world.write(*({"input": [{"role": "user", "content": f"{i}"}], "label": "1"} for i in range(8)))
    found = only(world.look(), "TPL01")
    assert "8 of 8 rows" in found.finding
    assert found.remedy == "add --apply-chat-template"
    assert world.look(apply_chat_template=True) == []
    broken = world.folder / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m.content }")
    found = only(world.look(apply_chat_template=True, chat_template_path=broken), "TPL01")
    assert f"{broken} cannot be read: line 2" in found.finding


FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if not loop.last and m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@fault("TPL02")
def test_a_template_that_forgets_thoughts_of_the_datas_conversations(world):
    template = world.model / "chat_template.jinja"
    kept = template.read_text()
    template.write_text(FORGETFUL)
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "<think>easy</think>2"},
        {"role": "user", "content": "and 2+2?"},
    ]
    world.write(*({"input": messages, "label": "4"} for _ in range(4)))
    several_turns = {"apply_chat_template": True, "loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None}
    found = only(world.look(**several_turns), "TPL02", "warning")
    assert "row 0" in found.finding
    assert "message 1 (assistant)" in found.finding
    template.write_text(kept)
    assert world.look(**several_turns) == []


@fault("STOP01")
def test_an_end_of_turn_that_does_not_end_generation(world):
    path = world.model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"eos_token": "<|im_start|>"}))
    found = only(world.look(apply_chat_template=True), "STOP01")
    assert "<|im_end|> (1)" in found.finding
    assert found.remedy.startswith("--rollout-stop-token-ids 1")
    assert world.look(apply_chat_template=True, rollout_stop_token_ids=1) == []


# ---- data and rewards


@fault("DATA01")
def test_a_row_without_the_label_names_its_line_and_keys(world):
    rows: list[Row | str] = [{"input": str(i), "label": str(i)} for i in range(20)]
    world.write(*rows[:6], {"input": "6", "answer": "6"}, *rows[7:])
    found = only(world.look(), "DATA01")
    assert "1 of 20 rows" in found.finding
    assert "line 7: no key 'label'; the row has ['answer', 'input']" in found.finding
    assert "--label-key" in found.remedy
    only(world.look(skip_bad_rows=True), "DATA01", "info")
    world.write(*rows)
    assert world.look() == []
    assert "'label' (--label-key label)" in only(world.look(label_key="labels"), "DATA01").remedy


def test_bad_rows_far_behind_the_first_are_found_with_their_line(world):
    rows: list[Row | str] = [{"input": str(i), "label": str(i)} for i in range(2000)]
    world.write(*rows[:1000], *("{broken" for _ in range(1000)))
    first = only(world.look(), "DATA01").evidence["first"][0]["where"]
    line = int(first.rpartition(" ")[2])
    assert line > 1000
    assert world.data.read_text().splitlines()[line - 1] == "{broken"


@fault("DATA02")
def test_empty_labels_are_counted_with_their_lines(world):
    world.write({"input": "1", "label": ""}, {"input": " ", "label": "2"}, {"input": "3", "label": "3"})
    found = only(world.look(rollout_batch_size=1), "DATA02")
    assert found.evidence["num_bad"] == 2
    assert "line 1: the label 'label' is empty" in found.finding
    assert only(world.look(skip_bad_rows=True), "DATA02", "warning")
    world.write({"input": "3", "label": "3"})
    assert world.look(rollout_batch_size=1) == []


@fault("DATA04")
def test_prompts_beyond_the_limit_are_measured(world):
    world.write(*({"input": "x" * (10 + i), "label": "1"} for i in range(20)))
    found = only(world.look(rollout_max_prompt_len=15), "DATA04", "warning")
    assert "leaves out 14 of 20 prompts" in found.finding
    assert found.remedy.startswith("--rollout-max-prompt-len 29")
    assert world.look(rollout_max_prompt_len=29) == []
    world.write(*({"input": "x" * length, "label": "1"} for length in (200, 200, 200, 20)))
    assert (
        "3 of 4 prompts looked at leave no room for a response in the context of 128"
        in only(world.look(), "DATA04").finding
    )


@fault("REW01")
def test_a_reward_that_raises(world):
    (world.folder / "raises.py").write_text("def reward(args, sample, **kw):\n    return float(sample.label['x'])\n")
    found = only(world.look(rm_type=None, custom_rm_path=f"{world.folder}/raises.py:reward"), "REW01")
    assert "failed in 2 of 2 calls" in found.finding
    assert "TypeError" in found.finding
    assert "raises.py:2 in reward" in found.finding
    (world.folder / "works.py").write_text("def reward(args, sample, **kw):\n    return float(sample.label == '3')\n")
    assert world.look(rm_type=None, custom_rm_path=f"{world.folder}/works.py:reward") == []


@fault("REW01")
def test_labels_that_the_verifier_cannot_read(world):
    world.write(*({"input": str(i), "label": "n/a because \\frac{", "other": str(i)} for i in range(8)))
    found = only(world.look(rm_type="math"), "REW01", "warning")
    assert "takes none of the first 8 labels" in found.finding
    assert world.look(rm_type="math", label_key="other") == []


# ---- the machine


@fault("ENV01")
def test_a_version_outside_the_tested_range(world, monkeypatch):
    """Another distribution comes first on the path, as one does that pip put into another site folder."""
    folder = world.folder / "site" / "transformers-4.51.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.51.0\n")
    monkeypatch.syspath_prepend(folder.parent)
    found = only(world.look(), "ENV01")
    assert "transformers 4.51.0 (tested >=5.0,<6)" in found.finding
    assert found.remedy == "pip install 'transformers>=5.0,<6'"
    shutil.rmtree(folder)
    assert world.look() == []


@fault("ENV02")
def test_more_threads_than_processors(world):
    found = only(world.look(num_threads=999), "ENV02")
    assert "--num-threads 999: this process may use" in found.finding
    count = found.remedy.split()[1].rstrip(",")
    assert world.look(num_threads=count) == []


@fault("DET01")
def test_settings_that_let_two_runs_differ(world):
    found = only(world.look(debug_determinism=True, async_buffer_size=1), "DET01")
    assert "--async-buffer-size 1: timing decides" in found.finding
    assert found.remedy == "--async-buffer-size 0"
    assert world.look(debug_determinism=True, async_buffer_size=0) == []


@fault("DISK01")
def test_a_disk_too_small_for_the_checkpoints(world):
    """No disk holds what a run leaves that saves after each of a trillion rollouts and removes nothing."""
    one = 2 * (5 * 64 + 8) * 12
    every_rollout = {"save": world.folder / "save", "save_interval": 1, "num_rollout": 10**12}
    found = only(world.look(**every_rollout), "DISK01")
    free = shutil.disk_usage(world.folder).free
    assert (found.evidence["checkpoint_bytes"], found.evidence["kept"]) == (one, 10**12)
    assert found.evidence["free_bytes"] == pytest.approx(free, rel=0.5)
    words = found.remedy.partition(",")[0].split()
    assert words[0] == "--keep-checkpoints"
    assert int(words[1]) == found.evidence["free_bytes"] // one - 1
    assert world.look(**every_rollout, keep_checkpoints=3) == []


def test_folders_that_cannot_be_made(world):
    (world.folder / "file").touch()
    for name in ("output_dir", "save"):
        found = only(world.look(**{name: world.folder / "file" / "run"}), "DISK01")
        flag = f"--{name.replace('_', '-')}"
        assert found.finding == f"{flag} {world.folder / 'file' / 'run'}: {world.folder / 'file'} is a file"
        assert found.remedy == f"give another path with {flag}"
    found = only(world.look(save_debug_rollout_data=world.folder / "file" / "{rollout_id}"), "DISK01")
    assert found.finding.startswith("--save-debug-rollout-data")
    assert world.look(save_debug_rollout_data=world.folder / "file_{rollout_id}") == []


def test_functions_that_an_evaluation_file_names(world):
    file = world.folder / "eval.yaml"
    row = {"name": "a", "path": str(world.data), "custom_rm_path": "nope.py:f", "custom_generate_function_path": "no.g"}
    file.write_text(json.dumps({"datasets": [row]}))
    found = world.look(eval_config=file, eval_interval=1)
    assert sorted(each.id for each in found) == ["HOOK01", "REW01"]
    assert all(f"--eval-config {file}, set a: " in each.finding for each in found)


def test_format_that_is_not_read_is_said_once(world):
    (world.folder / "p.csv").write_text("a,b")
    assert "the format .csv is not read" in only(world.look(prompt_data=world.folder / "p.csv"), "CFG05").finding


def test_stop_ids_that_the_model_does_not_have(world):
    path, size = world.model / "config.json", 64
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": size}))
    found = only(world.look(rollout_stop_token_ids=[3, size]), "STOP01")
    assert f"--rollout-stop-token-ids {size}: {world.model} has tokens 0 to {size - 1}" == found.finding
    assert world.look(rollout_stop_token_ids=[3]) == []


def test_object_reward_of_which_no_entry_is_named(world):
    (world.folder / "own.py").write_text("def f(args, sample, **kw): return {'score': 1.0, 'acc': 0}")
    own = {"rm_type": None, "custom_rm_path": f"{world.folder}/own.py:f"}
    found = only(world.look(**own), "REW01")
    assert "returns an object with ['acc', 'score']; without --reward-key" in found.finding
    found = only(world.look(**own, reward_key="accuracy"), "REW01")
    assert "--reward-key accuracy is not among them" in found.finding
    assert world.look(**own, reward_key="score") == []


@fault("GPU01")
def test_more_gpus_than_there_are(world):
    for number in range(2):
        (world.folder / f"nvidia{number}").touch()
    (world.folder / "nvidiactl").touch()

    def look(count: int) -> list[Diagnosis]:
        typed("furlong doctor ... --actor-num-gpus-per-node", count)
        resolved, _ = examine(flags(world.model, world.data, world.folder, actor_num_gpus_per_node=count))
        return list(machine.gpus(machine.Context(resolved.config), world.folder))

    found = only(look(4), "GPU01")
    assert found.finding == "the run needs 4 GPUs, the cluster has 2"
    assert "--actor-num-gpus-per-node" in found.remedy
    assert look(2) == []


def test_engines_may_share_the_gpu_of_one_trainer(world):
    (world.folder / "nvidia0").touch()

    def found(count: int, transport: str) -> list[str]:
        changes = {"engine": "sglang", "rollout_num_gpus": count, "update_weight_transport": transport}
        resolved, _ = examine(flags(world.model, world.data, world.folder, **changes))
        return [diagnosis.finding for diagnosis in machine.gpus(machine.Context(resolved.config), world.folder)]

    assert found(1, "disk") == found(1, "ipc") == []
    assert found(1, "nccl") == ["the run needs 1 + 1 = 2 GPUs, the cluster has 1"]
    assert found(2, "disk") == ["the run needs 1 + 2 = 3 GPUs, the cluster has 1"]


@fault("GPU03")
def test_a_port_that_another_process_has(tmp_path, capsys):
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        typed("furlong serve --model-path model --port", port)
        found = taken_port("--port", "127.0.0.1", port)
        assert found is not None
        assert (found.id, found.evidence["pid"]) == ("GPU03", other.pid)
        assert f"process {other.pid} listens there" in found.finding
        assert main(["serve", "--model-path", str(tmp_path), "--port", str(port)]) == 2
        assert "[GPU03]" in capsys.readouterr().err
        other.communicate("\n", timeout=20)
    assert taken_port("--port", "127.0.0.1", port) is None
    with socket.create_server(("127.0.0.1", 0)) as mine:
        assert taken_port("--port", "127.0.0.1", mine.getsockname()[1]) is not None
    assert taken_port("--port", "127.0.0.1", 0) is None


def test_the_doctor_imports_neither_torch_nor_transformers(world):
    words = flags(world.model, world.data, world.folder / "run", rm_type="math", apply_chat_template=True)
    code = (
        "import sys; from furlong.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'transformers'} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, "doctor", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["no problems found", "[]"]), done.stderr


@fault("MEM01")
def test_training_that_does_not_fit_the_gpu_is_told_with_a_change_that_does(world, monkeypatch):
    """The driver's command is a script that names a GPU, and the model's config one of 4B parameters."""
    path = world.folder / "bin" / "nvidia-smi"
    path.parent.mkdir()
    config = json.loads((world.model / "config.json").read_text())
    large = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 2,
        "vocab_size": 151936,
    }
    (world.model / "config.json").write_text(json.dumps(config | large))

    def gpu(mebibytes: int) -> None:
        path.write_text(f"#!/bin/sh\necho 'Tiny GPU, {mebibytes}'\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    gpu(13 * 1024)
    found = [each for each in world.look(bf16=True) if each.id == "MEM01"]
    assert len(found) == 1
    assert "Tiny GPU" in found[0].finding
    assert found[0].remedy.startswith("--")
    assert found[0].evidence["fits"] is False
    words = found[0].remedy.split()
    mended = {word[2:].replace("-", "_"): True for word in words if word.startswith("--")}
    assert not [each for each in world.look(bf16=True, **mended) if each.id == "MEM01"]
    gpu(141 * 1024)
    assert not [each for each in world.look(bf16=True) if each.id == "MEM01"]
