"""Faults of flags and functions that are found before a run starts.

Each is injected, found with its values, fixed as the message says, and gone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from faults.world import Row, names, only
from faults_marker import fault
from furlong.config.command_line import examine
from furlong.diagnosis.preflight import CHECKS, preflight
from furlong.diagnosis.preflight import machine_checks as machine
from runs import flags

HEALTHY: dict[str, Row] = {
    "plain": {},
    "chat": {"apply_chat_template": True, "rm_type": "math"},
    "limits": {"rollout_max_prompt_len": 64, "rollout_max_context_len": 96},
    "async": {"async_buffer_size": 2, "update_weights_interval": 2},
    "steps": {"global_batch_size": 8, "micro_batch_size": 4},
    "fixed": {"debug_determinism": True},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "k3"},
    "kl that is only reported": {"use_kl_loss": True},
    "unbiased kl": {"use_kl_loss": True, "kl_loss_coef": 0.01, "use_unbiased_kl": True},
    "demonstrations": {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_command_has_no_diagnosis(world, name):
    assert [found.text() for found in world.look(**HEALTHY[name])] == []


def test_a_check_that_raises_is_reported_and_the_others_run(world):
    def broken(context):
        raise ZeroDivisionError("in a check")

    resolved, _ = examine(flags(world.model, world.data, world.folder / "run", num_threads=999))
    ids = {found.id: found for found in preflight(resolved.config, checks=[broken, *CHECKS])}
    assert set(ids) == {"CHECK01", "ENV02"}
    assert ids["CHECK01"].evidence == {"check": "test_preflight.broken", "error": "ZeroDivisionError"}
    assert "in a check" in ids["CHECK01"].finding


def test_a_check_that_raises_beside_an_error_is_skipped(world):
    def broken(context):
        raise KeyError("depends on the model")

    resolved, problems = examine(flags(world.folder / "none", world.data, world.folder / "run"))
    assert [found.id for found in preflight(resolved.config, problems, checks=[broken, *CHECKS])] == ["CKPT07"]


REFUSED_ONCE = {
    "prefill without engines": {"prefill_num_servers": 1},
    "no engine file": {"sglang_config": "none.yaml", "engine": "sglang"},
    "no evaluation file": {"eval_config": "none.yaml", "eval_interval": 1},
    "epochs of a stream": {"streaming_data": True, "num_rollout": None, "num_epoch": 1},
    "no port": {"rollout_external_engine_addrs": "foo"},
}


@fault("CFG05")
@pytest.mark.parametrize("name", REFUSED_ONCE)
def test_a_refused_input_is_reported_without_failures_of_checks(world, name):
    found = world.look(**REFUSED_ONCE[name])
    assert "CHECK01" not in [each.id for each in found]
    assert any(each.severity == "error" for each in found)
    texts = [(each.finding, each.remedy) for each in found]
    assert len(texts) == len(set(texts))
    flag = "--" + next(iter(REFUSED_ONCE[name])).replace("_", "-")
    if name != "epochs of a stream":
        assert len([each for each in found if "none.yaml" in each.finding]) <= 1
    assert name == "no port" or any(flag in each.finding for each in found)


def test_a_slice_from_the_end_is_healthy(world):
    assert world.look(prompt_data=f"{world.data}@[-8:]") == []
    assert world.look(prompt_data=f"{world.data}@[:-8]") == []
    assert world.look(prompt_data=f"{world.data}@[8:]", streaming_data=True) == []


@fault("CFG05")
def test_flags_that_need_a_gpu(world, monkeypatch):
    needed = {"record_memory_history": True}, {"offload_optimizer_states": True}, {"optimizer_cpu_offload": True}
    nccl = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 1, "distributed_backend": "nccl"}
    for changes in (*needed, nccl):
        monkeypatch.setattr("furlong.diagnosis.preflight.machine_checks.visible_device", lambda *_: "cpu")
        found = [each for each in world.look(**changes) if each.severity == "error"]
        assert len(found) == 1, changes
        assert names(found[0].cause, "Assumed", "no GPU")
        assert found[0].evidence["is_assumed"] is True
        monkeypatch.setattr("furlong.diagnosis.preflight.machine_checks.visible_device", lambda *_: "cuda")
        assert not [each for each in world.look(**changes) if each.severity == "error"], changes


@fault("CFG05")
def test_a_model_that_megatron_cannot_shard(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", json)  # installed or not
    config = json.loads((world.model / "config.json").read_text())
    path = world.model / "config.json"
    path.write_text(json.dumps(config | {"mlp_bias": True, "num_key_value_heads": 1}))
    ranks = {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 1}
    flags = {"train_backend": "megatron", **ranks}
    found = [each.finding for each in world.look(**flags) if each.id == "CFG05"]
    assert any("mlp_bias" in finding for finding in found)
    assert any("key/value heads" in finding for finding in found)
    path.write_text(json.dumps(config))
    assert not [each for each in world.look(train_backend="megatron") if each.id == "CFG05"]
    monkeypatch.setitem(sys.modules, "megatron", None)
    [found] = [each for each in world.look(train_backend="megatron") if each.id == "CFG05"]
    assert names(found.remedy, "pip install 'furlong-rl[megatron]'", "--train-backend fsdp")


@fault("CFG01")
def test_batch_sizes_that_do_not_fit_get_three_that_do(world):
    found = only(world.look(global_batch_size=6, num_steps_per_rollout=2), "CFG01")
    assert names(found.finding, "--rollout-batch-size 4", "--n-samples-per-prompt 4", "= 16 samples", "= 12 samples")
    assert found.evidence["global_batch_size"] == 6
    settings = [words[words.index("--") :] for words in found.remedy.split("; ")]
    assert len(settings) == 3
    for words in settings:
        pairs = words.split()
        changes = {name[2:].replace("-", "_"): value for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
        asked = {"global_batch_size": 6, "num_steps_per_rollout": 2} | changes
        assert world.look(**asked) == [], words


@fault("CFG02")
def test_a_misspelt_flag_gets_its_name_and_one_without_effect_what_it_needs(world):
    found = only(world.look(rollout_batchsize=4), "CFG02")
    assert "--rollout-batch-size?" in found.remedy
    found = only(world.look(sglang_mem_fraction_static=0.4), "CFG02")  # once, by the name that was given
    assert names(found.finding, "--sglang-mem-fraction-static", "--engine embedded")
    found = only(world.look(opsm_delta=0.1), "CFG02")
    assert names(found.remedy, "--use-opsm", "--opsm-delta")
    found = only(world.look(opsm_delta=0.1, use_opsm=True), "CFG02")
    assert names(found.remedy, "--use-rollout-logprobs", "--num-steps-per-rollout")
    assert world.look(opsm_delta=0.1, use_opsm=True, use_rollout_logprobs=True) == []
    assert world.look(opsm_delta=0.1, use_opsm=True, num_steps_per_rollout=2) == []


@fault("CFG02")
def test_a_kl_loss_that_does_not_constrain_the_policy(world):
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.01}
    found = only(world.look(**kl), "CFG02", "warning")
    assert found.evidence == {"kl_loss_coef": 0.01, "kl_loss_type": "k1"}
    assert names(found.finding, "--kl-loss-coef 0.01", "--kl-loss-type k1")
    assert world.look(**kl, kl_loss_type="k2") == []
    assert "add --kl-loss-coef" in only(world.doctor(use_kl_loss=True), "CFG02", "warning").remedy
    assert world.doctor(use_kl_loss=True, kl_loss_coef=0.0) == []


@fault("CFG03")
def test_an_engine_cannot_run_ahead_on_the_trainers_gpus(world):
    found = only(world.look(colocate=True, async_buffer_size=2), "CFG03")
    assert names(found.finding, "--colocate", "--async-buffer-size 2")
    assert names(found.remedy, "--rollout-num-gpus", "--async-buffer-size 0")
    assert world.look(colocate=True) == []


@fault("CFG04")
def test_a_token_limit_that_would_be_ignored(world):
    found = only(world.look(max_tokens_per_gpu=64, micro_batch_size=2), "CFG04")
    assert "--use-dynamic-batch-size" in found.finding
    assert "add --use-dynamic-batch-size" in found.remedy
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


def test_names_of_slime_that_furlong_has_and_does_not_have(world):
    agent = world.folder / "agent.py"
    body = "async def generate(args, sample, sampling_params):\n    return await post(args.sglang_router_ip, {})\n"
    agent.write_text("from slime.utils.http_utils import post\nfrom slime.utils.types import Sample\n" + body)
    assert world.look(custom_generate_function_path=f"{agent}:generate") == []
    imports = world.folder / "imports.py"
    imports.write_text("from slime.agent.trajectory import TurnRecord\n" + body)
    found = only(world.look(custom_generate_function_path=f"{imports}:generate"), "HOOK01")
    assert "furlong has no module slime.agent.trajectory" in found.finding
    assert "policy()" in found.remedy


@fault("DET01")
def test_settings_that_let_two_runs_differ(world):
    found = only(world.look(debug_determinism=True, async_buffer_size=1), "DET01")
    assert "--async-buffer-size 1" in found.finding
    assert "--async-buffer-size 0" in found.remedy
    assert world.look(debug_determinism=True, async_buffer_size=0) == []


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="the engine computes on a GPU")
def test_an_engine_in_bfloat16_on_a_cpu_whose_sums_depend_on_the_batch(world, monkeypatch):
    monkeypatch.setattr(machine, "has_amx", lambda: True)
    for own, remedy in (({"bf16": True}, "--fp32"), ({"embedded_dtype": "bfloat16"}, "--embedded-dtype float32")):
        found = only(world.look(debug_determinism=True, **own), "DET01")
        assert names(found.finding, "bfloat16", "AMX")
        assert remedy in found.remedy
    assert world.look(debug_determinism=True, bf16=True, embedded_dtype="float32") == []
    monkeypatch.setattr(machine, "has_amx", lambda: False)
    assert world.look(debug_determinism=True, bf16=True) == []


@fault("CFG05")
def test_an_epsilon_that_makes_steps_vanish(world):
    assert names(only(world.look(adam_eps=1000), "CFG05", "warning").remedy, "--adam-eps 1e-8")
    assert world.look(adam_eps=1e-5) == []


def test_a_bound_of_0_is_a_bound(world):
    bounded = {"async_buffer_size": 1, "max_token_staleness": 0, "stale_tokens": "mask"}
    assert [each for each in world.look(**bounded) if each.severity == "error"] == []
    found = world.look(async_buffer_size=1, stale_tokens="mask")
    assert ["without --max-token-staleness" in each.finding for each in found] == [True]
