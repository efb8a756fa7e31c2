"""Sizes that no flag gives: micro-batches and engines on every layout, from the memory of a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from furlong.cluster.ray_session import Node
from furlong.config.command_line import Resolved, parse
from furlong.models.presets import write_preset
from furlong.run import launch
from furlong.run.launch import sized_for_gpus
from furlong.tools.chosen_sizes import RECOMPUTED_TOKENS, chosen_sizes, engine_advice, with_chosen_sizes
from furlong.tools.gpu_memory import DEVICES, type_bytes
from furlong.tools.memory_plan import plan_memory
from furlong.wiring.engine import warn_of_sharing

GIB = 2**30
QWEN3_06B = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
WIDER = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3_4B = QWEN3_06B | WIDER
SGLANG = "--engine sglang"
FOUR, SPLIT = "--actor-num-gpus-per-node 4", "--actor-num-gpus-per-node 2 --rollout-num-gpus 2"
MEGATRON = f"--train-backend megatron {FOUR}"


def command(more: str = "", *, model: str = "model", new: int = 256) -> Resolved:
    words = ["--hf-checkpoint", model, "--prompt-data", "x.jsonl", "--rm-type", "random", "--num-rollout", "3"]
    words += ["--rollout-batch-size", "64", "--n-samples-per-prompt", "8", "--rollout-max-response-len", str(new)]
    return parse([*words, *more.split()])


def sizes_on(gib: float, more: str = "", *, new: int = 256, shape: dict[str, Any] = QWEN3_06B) -> dict[str, Any]:
    sizes = chosen_sizes(command(more, new=new).config, shape, int(gib * GIB))
    return {name: value for name, (value, _) in sizes.items()}


@pytest.mark.parametrize(
    ("more", "tokens", "engine"),
    [
        ("", 32768, {"embedded_num_slots": 512}),
        (SGLANG, 32768, {"cuda_graph_max_bs": 512, "max_running_requests": 512}),
        (f"{SGLANG} --rollout-num-gpus 1", 32768, {"cuda_graph_max_bs": 512, "max_running_requests": 512}),
        (f"{SGLANG} {FOUR} --colocate", 32768, {"cuda_graph_max_bs": 128, "max_running_requests": 128}),
        (f"{SGLANG} {SPLIT} --async-buffer-size 1", 32768, {"cuda_graph_max_bs": 256, "max_running_requests": 256}),
        (f"{SGLANG} {MEGATRON} --rollout-num-gpus 4", 32768, {"cuda_graph_max_bs": 128, "max_running_requests": 128}),
        (f"{MEGATRON} --colocate {SGLANG}", 32768, {"cuda_graph_max_bs": 128, "max_running_requests": 128}),
        ("--engine embedded --rollout-num-gpus 2", 32768, {"embedded_num_slots": 256}),
        ("--rollout-external-engine-addrs a:1", 32768, {}),
        ("--debug-train-only --load-debug-rollout-data x", 32768, {}),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 5000", 5000, {"embedded_num_slots": 512}),
    ],
)
def test_each_layout_gets_large_micro_batches_and_an_engine_for_all_of_its_requests(
    more: str, tokens: int, engine: dict[str, int]
):
    sizes = sizes_on(79.1, more)
    assert sizes.pop("max_tokens_per_gpu", 5000) == tokens
    assert sizes.pop("sglang_options", sizes) == engine


def test_sizes_grow_with_the_memory_and_the_ranks_and_shrink_next_to_an_engine():
    assert sizes_on(12) == {}
    assert sizes_on(80, new=1024)["embedded_num_slots"] < sizes_on(80, new=256)["embedded_num_slots"]
    tokens = [sizes_on(gib)["max_tokens_per_gpu"] for gib in (56, 140)]
    assert 4096 < tokens[0] < tokens[1] <= 32768
    alone, next_to_engine, four = (
        sizes_on(139.8, f"{SGLANG} {more}", shape=QWEN3_4B).get("max_tokens_per_gpu", 0)
        for more in ("--rollout-num-gpus 1", "--colocate --no-offload-rollout", f"--colocate {FOUR}")
    )
    assert next_to_engine < alone <= four


def test_sizes_leave_room_for_a_critic_and_teachers(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    given = [
        *("", "--advantage-estimator ppo", "--advantage-estimator ppo --no-offload-train"),
        *(f"--use-opd --opd-teacher-{how}" for how in (f"load {tmp_path}", f"urls large={tmp_path}")),
    ]
    sizes = [sizes_on(79.1, more) for more in given]
    assert sizes[0] == sizes[1]  # policy and critic take turns
    for less in sizes[2:]:
        assert less.get("max_tokens_per_gpu", 4096) < sizes[0]["max_tokens_per_gpu"]
    assert sizes[4].get("embedded_num_slots", 128) <= sizes[0]["embedded_num_slots"]


def test_a_pipeline_gets_enough_micro_batches():
    stages = f"{MEGATRON} --pipeline-model-parallel-size 4 --rollout-num-gpus 1 {SGLANG}"
    assert sizes_on(140, stages)["max_tokens_per_gpu"] * 4 * 4 <= 512 * 512
    assert sizes_on(140, stages)["max_tokens_per_gpu"] < sizes_on(140, stages, new=4096)["max_tokens_per_gpu"]


def test_a_model_that_needs_recomputation_gets_moderate_micro_batches():
    wide = QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144}
    tokens, reason = chosen_sizes(command().config, wide, 80 * GIB)["max_tokens_per_gpu"]
    assert tokens == RECOMPUTED_TOKENS
    assert "recomputed" in reason


@pytest.mark.parametrize(
    ("more", "requests"),
    [
        ("--over-sampling-batch-size 96 --sglang-server-concurrency 2048", 768),
        ("--max-concurrent-episodes 100", 104),
        ("--max-concurrent-episodes 100 --eval-interval 1 --eval-prompt-data a x.jsonl", 104),
        ("--rollout-batch-size 2", 64),
        ("--rollout-batch-size 2 --eval-interval 1 --eval-prompt-data a x.jsonl", 256),
        ("--rollout-batch-size 1024 --sglang-server-concurrency 2048", 1024),
        ("--sglang-max-running-requests 200", 200),
        ("--sglang-cuda-graph-max-bs 100", None),
        ("--sglang-disable-cuda-graph", None),
        ("--sglang-mem-fraction-static 0.95", None),
    ],
)
def test_graphs_are_for_the_requests_of_an_engine_unless_flags_say_otherwise(more: str, requests: int | None):
    config = command(f"{SGLANG} --rollout-num-gpus 1 {more}").config
    options, _ = chosen_sizes(config, QWEN3_06B, int(79.1 * GIB)).get("sglang_options", ({}, ""))
    given = config.engines.sglang_options
    assert options == (
        {} if requests is None else {"cuda_graph_max_bs": requests, "max_running_requests": requests} | given
    )


def test_an_engine_next_to_a_trainer_that_stays_gets_what_fits():
    def fraction(more: str) -> Any:
        return sizes_on(79.1, f"{SGLANG} {more}")["sglang_options"].get("mem_fraction_static")

    assert fraction("") is fraction("--rollout-num-gpus 1") is None  # SGLang's own
    bounded, stays, both_stay = (
        fraction("--rollout-max-context-len 512"),
        fraction("--no-offload-train"),
        fraction("--no-offload-train --no-offload-rollout"),
    )
    assert 0.4 < bounded < 0.5  # 512 requests of 512 tokens need 28 GiB
    assert 0.1 < both_stay < stays < 0.7


QWEN25_05B = QWEN3_06B | {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "gib", "stay"),
    [
        ("", 139.8, True),
        ("", 79.1, True),
        ("", 47.4, False),  # of which the trainer needs 31 GiB
        (f"{FOUR} --colocate", 79.1, True),
        (f"{MEGATRON} --colocate --tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 2", 79.1, True),
        ("--micro-batch-size 4", 79.1, True),
        ("--use-kl-loss --use-opd --opd-teacher-load {teacher}", 139.8, True),
        ("--rollout-max-context-len 1024 --custom-generate-function-path a:b", 79.1, True),
        ("--rollout-max-context-len 32768", 139.8, False),  # 196 GiB of KV cache
        ("--custom-generate-function-path a:b", 139.8, False),  # any number of turns
        ("--eval-interval 1 --eval-prompt-data a x.jsonl --eval-max-response-len 16384", 139.8, False),
        ("--advantage-estimator ppo", 139.8, False),
        ("--offload", 139.8, False),
        ("--colocate --offload-train", 139.8, False),
        ("--colocate --offload-rollout", 139.8, False),
        ("--rollout-num-gpus 2 --actor-num-gpus-per-node 2 --colocate --prefill-num-servers 1", 139.8, False),
        ("--sglang-mem-fraction-static 0.5", 139.8, False),
        ("--sglang-cuda-graph-max-bs 64", 139.8, False),
        ("--sglang-speculative-algorithm NGRAM --rollout-max-context-len 1024", 139.8, False),
        ("--sglang-device cpu", 139.8, False),
    ],
)
def test_trainer_and_engine_stay_on_a_gpu_only_where_both_fit_for_sure(
    more: str, gib: float, stay: bool, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_05B))
    before = command(f"{SGLANG} {more.format(teacher=tmp_path)}")
    after, _, _ = with_chosen_sizes(before.config, before.sources, QWEN25_05B, int(gib * GIB))
    assert before.config.cluster.offload_train
    assert (after.cluster.offload_train, after.cluster.offload_rollout) == (not stay, not stay)


def test_the_engine_of_a_trainer_that_stays_has_cache_for_its_requests_and_both_fit_into_nine_tenths():
    """Whether the engine starts on the whole GPU or next to the trainer, of which SGLang takes the same fraction."""
    device = int(79.1 * GIB)
    for response in (64, 256, 512):
        before = command(SGLANG, new=response)
        config, _, _ = with_chosen_sizes(before.config, before.sources, QWEN25_05B, device)
        fraction = config.engines.sglang_options["mem_fraction_static"]
        plan = plan_memory(config, QWEN25_05B, device)
        assert plan.fits
        weights, request = 2 * 494e6, (1024 + response) * 24 * 2 * 2 * 64 * 2  # a prompt without a limit
        trainer = max(phase.total - phase.parts["engine"] for phase in plan.trainer)
        assert fraction * (device - trainer) >= weights + 512 * request
        assert trainer + (fraction + 0.15) * device <= 0.9 * plan.limit


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "local_device", lambda: ("NVIDIA H100", 80 * GIB))


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return str(write_preset("tiny", tmp_path / "model", seed=0))


@pytest.mark.usefixtures("gpu")
def test_chosen_sizes_are_in_the_configuration_with_their_reason_and_in_the_log(tiny: str):
    embedded = sized_for_gpus(command(model=tiny))
    assert embedded.config.train.max_tokens_per_gpu == 32768
    assert embedded.config.cluster.embedded_num_slots == 512
    assert embedded.sources["embedded_num_slots"].startswith("derived: 80 GiB")
    assert any(line.startswith("--max-tokens-per-gpu 32768: ") for line in embedded.lines)
    sglang = sized_for_gpus(command(f"{SGLANG} --sglang-attention-backend fa3", model=tiny))
    assert sglang.config.engines.sglang_options == {
        "cuda_graph_max_bs": 512, "max_running_requests": 512, "mem_fraction_static": 0.1, "attention_backend": "fa3",
    }  # fmt: skip
    new = "cuda_graph_max_bs, max_running_requests, mem_fraction_static"
    assert sglang.sources["sglang_options"].startswith(f"flag; derived {new}: 80 GiB")
    assert any("--sglang-cuda-graph-max-bs 512 --sglang-max-running-requests 512 " in line for line in sglang.lines)
    cluster, why = sglang.config.cluster, sglang.sources["offload_train"]
    assert (cluster.offload_train, cluster.offload_rollout) == (False, False)
    assert re.fullmatch(r"derived: 80 GiB of GPU memory: trainer \(\S+ GiB\) and engine \(\S+ GiB\) fit together", why)
    assert f"--no-offload-train --no-offload-rollout: {why.removeprefix('derived: ')}" in sglang.lines


def test_only_flags_that_keep_memory_are_warned_of(caplog: pytest.LogCaptureFixture):
    chosen = command(SGLANG)
    config, sources, _ = with_chosen_sizes(chosen.config, chosen.sources, QWEN25_05B, int(79.1 * GIB))
    assert not config.cluster.offload_train
    warn_of_sharing(config, sources)
    assert caplog.text == ""
    given = command(f"{SGLANG} --no-offload-train")
    warn_of_sharing(given.config, given.sources)
    assert "--no-offload-train: trainer and engines share GPUs" in caplog.text


@pytest.mark.usefixtures("gpu")
def test_flags_take_precedence(tiny: str):
    words = "--embedded-num-slots 64 --use-dynamic-batch-size --max-tokens-per-gpu 4096"
    before = command(words, model=tiny)
    after = sized_for_gpus(before)
    assert (after.config, after.sources) == (before.config, before.sources)


@pytest.mark.usefixtures("gpu")
def test_a_ray_cluster_is_asked_for_the_type_of_its_gpus(tiny: str, monkeypatch: pytest.MonkeyPatch):
    on_ray = command(f"{FOUR} --colocate {SGLANG} --ray-address head:1", model=tiny)
    for types, resource, limit in ((("H100", "A100"), "GPU", "39 GiB"), (("X1",), "GPU", "80 GiB"), ((), "CPU", "")):
        nodes = [Node(name, "10.0.0.1", 4, 4, name) for name in types]
        monkeypatch.setattr(launch, "cluster_nodes", lambda _: (nodes, resource))  # noqa: B023
        sized = sized_for_gpus(on_ray)
        if limit:
            assert sized.sources["sglang_options"].startswith(f"derived: {limit}")
        else:
            assert sized.config == on_ray.config
            assert "the Ray cluster at head:1 has no GPU" in sized.lines[-1]


def test_the_faster_engine_depends_on_how_often_slots_are_filled_with_long_responses():
    many, few = (command(f"--embedded-num-slots {slots}", new=1024).config for slots in (128, 512))
    assert "--engine sglang" in engine_advice(many)
    assert "--engine sglang" not in engine_advice(few)
    assert "--engine sglang" not in engine_advice(command("--embedded-num-slots 128", new=64).config)


def test_defaults_stay_without_a_gpu_or_for_an_unknown_model_and_the_log_says_why(
    tiny: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    for what in ("no GPU", "num_hidden_layers"):
        before = command(model=tiny)
        after = sized_for_gpus(before)
        assert (after.config, after.sources) == (before.config, before.sources)
        assert what in after.lines[-1]
        request.getfixturevalue("gpu")
        monkeypatch.setattr(
            launch, "read_json", lambda _: {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
        )


def test_types_of_gpus_are_known_by_the_names_of_ray():
    gib = {name: (type_bytes(name) or 0) / GIB for name in ("H100", "H20", "A100", "A100-80G", "GeForce-RTX-4090", "")}
    assert gib == pytest.approx(
        {"H100": 79.1, "H20": 0, "A100": 39.4, "A100-80G": 79.1, "GeForce-RTX-4090": DEVICES["rtx-4090"], "": 0}
    )
