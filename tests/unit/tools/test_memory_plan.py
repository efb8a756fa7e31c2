"""`furlong plan`: phases computed from flags, and proposals that fit."""

from __future__ import annotations

import importlib.util
import json
import re
import sys

import pytest

from furlong.cli import main
from furlong.config.command_line import load
from furlong.machine import MemoryUse
from furlong.tools.gpu_memory import device_bytes, local_device
from furlong.tools.memory_formulas import GIB, usable
from furlong.tools.memory_plan import change_after, cpu_findings, findings, host_findings, plan_memory
from runs import REPOSITORY, flags, write_prompts

QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def command(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3_4B))
    data = write_prompts(tmp_path / "prompts.jsonl", 64)

    def words(**changes):
        large = {"bf16": True, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 32768}
        limits = {"rollout_max_prompt_len": 512, "rollout_max_response_len": 7680}
        return flags(tmp_path / "model", data, tmp_path / "run", **large | limits | changes)

    return words


def test_a_run_that_does_not_fit_exits_with_1_and_its_change_does(command, capsys):
    assert main(["plan", *command(), "--device", "h100", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"]
    assert main(["plan", *command(), *plan["change"].split(), "--device", "h100"]) == 0
    out = capsys.readouterr().out
    assert "it fits" in out
    assert "optimizer step" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device"], "--device got nothing; give b200, h200"),
        (["--device", "h20"], "h200"),
        (["--gpus", "2"], "--gpus 2 has no effect"),
        (["--gpus", "none"], "--gpus none"),
        (["--gpus", "12"], "give a multiple of 8"),
    ],
)
def test_unusable_arguments_are_refused(command, words, message, capsys):
    assert main(["plan", *command(), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_model_alone_is_planned_with_a_printed_default_run(command, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    model = command()[:2]
    assert main(["plan", *model]) == 1
    said = capsys.readouterr().out
    assert "one h100" in said
    assert "assumed: --rollout-batch-size 32 --n-samples-per-prompt 8 " in said
    assert " --engine sglang --colocate --rollout-num-gpus 1\n" in said
    assert "chosen by the run: --sglang-cuda-graph-max-bs 256 --sglang-max-running-requests 256: " in said
    assert main(["plan", *model, "--device", "h200", "--gpus", "16", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["device"] == "h200"
    assert plan["assumed"].endswith(
        "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --engine sglang --colocate --rollout-num-gpus 16"
    )
    assert any("--max-tokens-per-gpu 32768: " in line for line in plan["chosen"])
    more = ["--rollout-batch-size", "8", "--num-rollout", "1", "--rm-type", "math"]
    words = [*command()[:6], *more, *plan["assumed"].split()]
    assert main(["plan", *words, "--device", "h200", "--json"]) == 0  # a command that can be run as it is
    again = json.loads(capsys.readouterr().out)
    assert (again.pop("assumed"), again) == ("", {name: value for name, value in plan.items() if name != "assumed"})


@pytest.mark.parametrize(
    ("given", "has", "lacks"),
    [
        ("--loss-type sft_loss", "--rollout-batch-size 32", "--engine"),
        ("--rollout-max-response-len 500", "--rollout-max-prompt-len 1024", "--rollout-max-response-len"),
        ("--rollout-max-context-len 4096", "--rollout-batch-size 32", "--rollout-max-prompt-len"),
        ("--micro-batch-size 2", "--rollout-max-response-len 7168", "--use-dynamic-batch-size"),
        ("--max-tokens-per-gpu 9000", "--use-dynamic-batch-size", "--max-tokens-per-gpu"),
        ("--rollout-num-gpus 1 --engine sglang", "--n-samples-per-prompt 8", "--colocate"),
        ("--global-batch-size 512", "--rollout-batch-size 64 --n-samples-per-prompt 8", "--global-batch-size"),
    ],
)
def test_explicit_flags_are_not_assumed(given, has, lacks, command, capsys):
    assert main(["plan", *command()[:2], *given.split(), "--device", "b200", "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)["assumed"]
    assert has in assumed
    assert lacks not in assumed


def test_no_flags_are_named_if_none_help(command, capsys):
    assert main(["plan", *command()[:2], "--device", "0.05", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert (plan["fits"], "--" in plan["change"]) == (False, False)
    assert main(["plan", *command()[:2], "--device", "0.05"]) == 1
    assert " ; " not in capsys.readouterr().out


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    assert main(["plan", "--hf-checkpoint", str(tmp_path / "none"), "--device", "h200"]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert main(["plan", "--device", "h200"]) == 2
    assert "--hf-checkpoint" in capsys.readouterr().err
    assert main(["plan", "--hf-checkpoint", str(tmp_path), "--device", "h200"]) == 2
    error = capsys.readouterr().err
    assert f"--hf-checkpoint {tmp_path}" in error
    assert "config.json" in error


def test_a_sleeping_engine_keeps_more_for_a_wide_model_with_many_requests(command):
    few = plan_of(command, "h200", **SHARED)
    many = plan_of(command, "h200", **SHARED, rollout_batch_size=64, n_samples_per_prompt=8)
    assert few.trainer[0].parts["sleeping engine"] == int(0.05 * device_bytes("h200"))
    assert many.trainer[0].parts["sleeping engine"] == 2 * GIB + 2048 * 512 * 9728


def test_the_reference_and_the_old_actor_count(command):
    config = load(command(use_kl_loss=True, kl_loss_coef=0.1, keep_old_actor=True, async_buffer_size=1)).config
    plain = plan_memory(load(command()).config, QWEN3_4B, device_bytes("h200"))
    more = plan_memory(config, QWEN3_4B, device_bytes("h200"))
    assert more.trainer[0].parts["frozen models"] == 2 * 2 * 4022272000
    assert more.trainer[0].total - plain.trainer[0].total == more.trainer[0].parts["frozen models"]


def test_a_teacher_counts_with_its_own_size(command, tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(QWEN3_4B | {"num_hidden_layers": 72}))
    words = command(use_opd=True, opd_teacher_load=tmp_path / "teacher", opd_loss="full")
    parts = plan_memory(load(words).config, QWEN3_4B, device_bytes("h200")).trainer[0].parts
    one = 2 * 4022272000
    embedding = 2 * QWEN3_4B["vocab_size"] * QWEN3_4B["hidden_size"]
    assert parts["frozen models"] == pytest.approx(2 * one - embedding, rel=1e-3)


@pytest.fixture
def teacher(tmp_path):
    """Twice as wide as the policy in its MLPs and hidden states."""
    (tmp_path / "teacher").mkdir()
    wide = QWEN3_4B | {"hidden_size": 5120, "intermediate_size": 2 * 9728}
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(wide))
    return {"use_opd": True, "opd_teacher_load": tmp_path / "teacher"}


SAMPLES, RESPONSE, TOKENS, VOCAB = 16, 7680, 32768, 151936


def test_what_a_teacher_leaves_for_the_loss_counts(command, teacher):
    """Hidden states of the rollout on the host, those of a micro-batch on the device; ids and log-probs of topk."""
    full = plan_of(command, "h200", **teacher, opd_loss="full")
    assert full.host is not None
    assert full.host.parts == {"teacher's outputs": SAMPLES * RESPONSE * 5120 * 2}
    by_name = {phase.name: phase.parts for phase in full.trainer}
    assert by_name["train"]["teacher's outputs"] == TOKENS * 5120 * 2
    wide, narrow = (by_name[name]["working rows"] for name in ("teacher's log-probs", "log-probs"))
    assert wide == 2 * narrow
    ranks = plan_of(command, "h200", **teacher, opd_loss="full", actor_num_gpus_per_node=4, rollout_num_gpus=1)
    assert ranks.host is not None
    assert ranks.host.parts == full.host.parts  # each has a quarter of the samples
    assert ranks.trainer[2].parts["teacher's outputs"] == (TOKENS + VOCAB) * 5120 * 2  # and a whole head
    top = plan_of(command, "h200", **teacher, opd_loss="topk", opd_log_prob_top_k=32)
    assert top.host is not None
    assert top.host.parts == {"teacher's outputs": SAMPLES * RESPONSE * 32 * 8}
    parts = [phase.parts.get("likeliest tokens") for phase in top.trainer]
    assert parts == [SAMPLES * RESPONSE * 32 * size if size else None for size in (8, 4, 0, 0)]
    assert plan_of(command, "h200", **teacher).host is None  # one number per token


def test_a_critic_counts_on_the_device_or_takes_turns(command, teacher):
    both = {"advantage_estimator": "ppo", "no_offload_train": True}
    stays = plan_of(command, "b200", **both)
    assert all(phase.parts["critic"] == 14 * COUNT for phase in stays.trainer)
    assert stays.host is None
    turns = plan_of(command, "b200", advantage_estimator="ppo")
    assert "critic" not in turns.trainer[1].parts
    assert turns.host is not None
    assert turns.host.parts == {"models in turn": 12 * COUNT}
    offloaded = plan_of(
        command, "b200", advantage_estimator="ppo", no_offload_train=True, offload_optimizer_states=True
    )
    assert offloaded.trainer[2].parts["critic"] == 6 * COUNT  # its moments are on the host in the policy's step
    distilled = plan_of(command, "b200", advantage_estimator="ppo", **teacher)
    assert distilled.host is not None  # while the teacher runs, both others are on the host
    assert distilled.host.parts == {"models in turn": 24 * COUNT}
    size = distilled.trainer[1].parts["frozen models"]
    assert size == pytest.approx(2 * (36 * (3 * 5120 * 19456 + 5120 * 128 * 80) + VOCAB * 5120))
    assert "frozen models" not in distilled.trainer[0].parts
    folder = teacher["opd_teacher_load"]
    larger = plan_of(command, "b200", advantage_estimator="ppo", critic_load=folder)
    of_critic = {phase.name: phase.parts for phase in larger.trainer}["critic: optimizer step"]
    assert sum(of_critic.values()) == 9 * size  # 18 bytes per parameter, of which a frozen model has 2
    assert larger.host is not None
    assert larger.host.parts == {"models in turn": 6 * size}  # while the policy trains
    asleep = plan_of(command, "b200", **SHARED, advantage_estimator="ppo").host
    assert asleep is not None
    assert asleep.parts == {"asleep": 24 * COUNT}
    megatron = plan_of(
        command, "b200", **MEGATRON, advantage_estimator="ppo", no_offload_train=True, rollout_num_gpus=1
    )
    assert megatron.trainer[0].parts["critic"] == 6 * COUNT + 12 * COUNT // 8  # weights, gradients; states are sharded


def test_engines_of_frozen_models_and_teachers_of_this_process_count(command, teacher, tmp_path, capsys):
    folder = teacher.pop("opd_teacher_load")
    models = tmp_path / "models.yaml"
    groups = "[{worker_type: regular, num_gpus: 1}]"
    models.write_text(
        f"sglang:\n- {{name: actor, server_groups: {groups}}}\n"
        f"- {{name: large, model_path: {folder}, server_groups: {groups}}}\n"
    )
    words = command(**teacher, engine="sglang", sglang_config=models, rollout_num_gpus=2)
    plan = plan_memory(load(words).config, QWEN3_4B, device_bytes("h200"))
    weights = 2 * (36 * (3 * 5120 * 19456 + 5120 * 128 * 80) + VOCAB * 5120)
    assert [(phase.name, phase.parts["weights"]) for phase in plan.frozen] == [("serve large", weights)]
    assert plan.fits
    assert main(["plan", *words, "--device", "24"]) == 1
    assert "more GPUs per engine of large in --sglang-config" in " ".join(capsys.readouterr().out.split())
    here = plan_of(command, "h200", **teacher, opd_teacher_urls=f"large={folder}")
    assert {phase.parts["teachers in this process"] for phase in here.trainer} == {weights}


def test_an_engine_has_its_share_and_a_kv_capacity_in_tokens(command):
    words = command(engine="sglang", rollout_num_gpus=1, sglang_mem_fraction_static=0.5)
    plan = plan_memory(load(words).config, QWEN3_4B, device_bytes("h200"))
    assert plan.engine is not None
    assert plan.engine.total == int(0.5 * device_bytes("h200"))
    assert "KV cache of" in plan.engine.note


COUNT = 4022272000  # parameters
MEGATRON = {"train_backend": "megatron", "actor_num_gpus_per_node": 8}


def plan_of(command, device="h100", **changes):
    return plan_memory(load(command(**changes)).config, QWEN3_4B, device_bytes(device))


def test_a_megatron_layout_shards_the_parts_it_should(command):
    whole = plan_of(command, "b200", train_backend="megatron")
    tensors = plan_of(command, **MEGATRON, tensor_model_parallel_size=2, rollout_num_gpus=1)
    assert tensors.trainer[0].parts["weights"] * 2 == whole.trainer[0].parts["weights"]
    assert tensors.trainer[2].parts["moments"] * 8 == pytest.approx(whole.trainer[2].parts["moments"], rel=1e-6)
    layers = plan_of(command, "b200", **MEGATRON, pipeline_model_parallel_size=4, rollout_num_gpus=1)
    assert layers.trainer[1].note.startswith("stage 1 of 4")  # it waits for the others' backward passes
    assert layers.trainer[1].total < whole.trainer[1].total
    split = plan_of(command, **MEGATRON, tensor_model_parallel_size=2, sequence_parallel=True, rollout_num_gpus=1)
    assert split.trainer[1].parts["activations"] < tensors.trainer[1].parts["activations"]


SHARED = {"engine": "sglang", "colocate": True, "sglang_mem_fraction_static": 0.8}


def test_gradient_buffers_of_megatron_are_on_the_gpu_until_the_trainer_leaves_it(command):
    shared = {**MEGATRON, **SHARED, "rollout_num_gpus": 8}
    whole, half = (plan_of(command, "h200", **shared, grad_reduce_in_bf16=is_half) for is_half in (False, True))
    assert whole.trainer[-1].name == "update weights"
    assert [plan.trainer[-1].parts["gradients"] for plan in (whole, half)] == [4 * COUNT, 2 * COUNT]
    stays = plan_of(command, "h200", **shared, no_offload_train=True)
    assert stays.engine is not None
    of_trainer = ("weights", "master_weights", "moments", "gradients")
    assert stays.engine.parts["trainer"] == sum(stays.trainer[-1].parts[name] for name in of_trainer)
    assert whole.host is not None
    assert whole.host.parts["asleep"] == pytest.approx(12 * COUNT, rel=1e-6)  # of eight ranks, without rounded weights


def test_the_change_makes_room_for_the_weight_update_too(command):
    """Between steps, eight ranks of Qwen3-30B-A3B leave too little of an H100 for half of its weights."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    moe = QWEN3_4B | experts | {"hidden_size": 2048, "num_hidden_layers": 48, "tie_word_embeddings": False}
    shared = {**SHARED, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 2}
    device = device_bytes("h100")
    plan = plan_memory(load(command(**shared, recompute_activations=True)).config, moe, device)
    assert plan.trainer[-1].total > plan.limit
    assert plan.change == "--offload-optimizer-states"
    words = command(**shared, recompute_activations=True, offload_optimizer_states=True)
    assert plan_memory(load(words).config, moe, device).fits


def test_colocated_trainer_and_engine_include_what_the_other_keeps(command):
    turns = plan_of(command, "h200", **SHARED)
    assert turns.trainer[0].parts["sleeping engine"] < 8 * GIB
    assert turns.most_fraction == pytest.approx(0.95, abs=0.01)
    stays = plan_of(command, "h200", **SHARED, no_offload_train=True)
    assert stays.engine is not None
    assert stays.engine.parts["trainer"] == sum(
        stays.trainer[-1].parts[name] for name in ("weights", "master_weights", "moments")
    )
    assert not stays.fits
    [found] = findings(stays, "h200")
    assert "`generate`" in found.finding
    [fraction] = re.findall(r"--sglang-mem-fraction-static (\S+)", found.remedy)
    mended = SHARED | {"sglang_mem_fraction_static": fraction}
    assert plan_of(command, "h200", **mended, no_offload_train=True).fits
    beside = plan_of(command, "h200", **SHARED, no_offload_rollout=True)
    assert beside.trainer[0].parts["engine"] == int(0.8 * device_bytes("h200"))


def test_after_running_out_the_change_is_computed_for_the_sample_at_hand(command):
    config = load(command()).config
    predicted, change = change_after(config, QWEN3_4B, usable(device_bytes("h100")), longest=8192)
    assert re.search(r"[\d.]+ GiB in `train`\D+74\.9 GiB", predicted)
    assert change.startswith("--")
    predicted, change = change_after(config, QWEN3_4B, usable(device_bytes("h200")), longest=8192)
    assert change == "--use-dynamic-batch-size --max-tokens-per-gpu 16384"  # of a run that may have chosen 32,768
    assert "fragmented" in predicted
    config = load(command(max_tokens_per_gpu=30_000)).config
    assert change_after(config, QWEN3_4B, usable(device_bytes("h200")), longest=8192)[1] == "--max-tokens-per-gpu 15000"


def test_the_gpu_of_this_machine_is_what_its_driver_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_device() is None
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert local_device() == ("NVIDIA H200", 143771 * 2**20)
    assert pytest.approx(140.4, abs=0.1) == 143771 * 2**20 / GIB


def test_host_memory_of_ranks_is_counted_and_compared_with_the_machine(command, capsys):
    assert plan_of(command).host is None
    saves = {"async_save": True, "save": "saved"}
    copied = plan_of(command, **saves).host
    assert copied is not None
    assert copied.parts == {"checkpoint": 12 * COUNT}
    lighter = plan_of(command, **saves, no_save_optim=True).host
    assert lighter is not None
    assert lighter.total == 4 * COUNT
    offloaded = plan_of(command, offload_optimizer_states=True)
    assert offloaded.host is not None
    assert offloaded.host.parts == {"offloaded": 8 * COUNT}
    assert "moments" not in offloaded.trainer[1].parts
    everything = plan_of(command, optimizer_cpu_offload=True)
    assert everything.host is not None
    assert everything.host.parts == {"offloaded": 12 * COUNT}
    assert everything.trainer[2].total == offloaded.trainer[2].total  # both are on the device for the step
    ranks = plan_of(command, "h200", **SHARED, actor_num_gpus_per_node=4, rollout_num_gpus=4).host
    assert ranks is not None
    assert (ranks.total, ranks.note) == (12 * COUNT, "of 4 ranks")
    assert main(["plan", *command(**saves), "--device", "b200"]) == 0
    assert "host during training 45.0" in " ".join(capsys.readouterr().out.split())


def test_a_machine_with_too_little_memory_is_reported(command):
    config = load(command(async_save=True, save="saved")).config
    plan = plan_memory(config, QWEN3_4B, device_bytes("b200"))
    [found] = host_findings(plan, config, 32 * GIB)
    assert all(value in found.finding for value in ("45.0 GiB", "32.0 GiB", "checkpoint"))
    assert "--async-save" in found.remedy
    assert host_findings(plan, config, 64 * GIB) == []


def test_a_limit_on_tokens_comes_with_what_it_needs(command, capsys):
    words = command(use_dynamic_batch_size=None, max_tokens_per_gpu=None, micro_batch_size=4)
    assert main(["plan", *words, "--device", "h100", "--json"]) == 1
    change = json.loads(capsys.readouterr().out)["change"]
    assert change.startswith("--use-dynamic-batch-size --max-tokens-per-gpu ")
    assert change.endswith(", without --micro-batch-size")
    flags = change.removesuffix(", without --micro-batch-size").split()
    mended = command(use_dynamic_batch_size=None, max_tokens_per_gpu=None)
    assert main(["plan", *mended, *flags, "--device", "h100"]) == 0


def test_the_table_of_sizes_in_the_docs_is_what_the_plan_says(tmp_path, monkeypatch):
    path = REPOSITORY / "scripts" / "plan_sizes.py"
    spec = importlib.util.spec_from_file_location("plan_sizes", path)
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plan_sizes", script)
    spec.loader.exec_module(script)
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    rows = list(script.rows(tmp_path, device_bytes("h100")))
    page = (REPOSITORY / "docs" / "scale-out" / "ray.md").read_text()
    assert [row for row in rows if row not in page] == []  # else: python scripts/plan_sizes.py
    assert len(rows) == 6


def test_a_rollout_is_the_most_that_a_micro_batch_can_hold(command):
    few = {"rollout_batch_size": 1, "n_samples_per_prompt": 2}
    small = plan_of(command, **few, max_tokens_per_gpu=1 << 20)
    assert small.trainer == plan_of(command, **few, max_tokens_per_gpu=2 * 8192).trainer


def test_a_machine_without_gpus_that_is_too_small_is_reported_with_what_fits(command):
    words = {"bf16": None, "fp32": True, "rollout_max_response_len": 1000}
    config = load(command(**words)).config
    [found] = cpu_findings(config, QWEN3_4B, MemoryUse(10 * GIB, 140 * GIB, "the machine"))
    assert found.severity == "warning"
    assert all(value in found.finding for value in ("140.0 GiB", "130.0 GiB", "the machine"))
    assert found.evidence["free"] == 130 * GIB
    mended = load([*command(**words), *found.remedy.split()[1:]]).config
    assert cpu_findings(mended, QWEN3_4B, MemoryUse(10 * GIB, 140 * GIB, "the machine")) == []
