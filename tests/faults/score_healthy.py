"""Healthy settings for the score of diagnoses: families with algorithms and layouts, recipes, metrics, and runs.

`FURLONG_REAL_MODEL=DIR` adds settings and runs of a real instruct model; those of SmolLM2-135M-Instruct take 30 s each.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from diagnosis_score import Case, doctor, happened, ran, steps
from faults.score_runs import COMPARED, GAP, GOOD, KL, RANKS
from faults.test_healthy_runs import HEALTHY
from faults.world import World
from models_zoo import family_config

FAMILIES = (
    "qwen2", "qwen2-sliding", "qwen3", "llama", "mistral", "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "afmoe",
    "deepseek_v3",
)  # fmt: skip
OF_MEGATRON = ("qwen2", "qwen3", "llama", "qwen3_moe", "glm4_moe")
WHITENED = {"normalize_advantages": True}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {},
    "cispo": {},
    "rloo": {},
    "dr_grpo": {},
    "dapo": {},
    "reinforce_plus_plus": WHITENED,
    "reinforce_plus_plus_baseline": WHITENED | {"kl_coef": 0.01},
}
SERVERS = {"engine": "embedded", "rollout_num_gpus": 1}
RANKS_2 = {"actor_num_gpus_per_node": 2} | SERVERS
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one ahead": {"async_buffer_size": 1},
    "two ahead, requests held": {"async_buffer_size": 2, "update_weights_interval": 2, "pause_mode": "hold"},
    "batches by tokens": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 512},
    "micro-batches of 2": {"micro_batch_size": 2, "num_steps_per_rollout": 2},
    "bfloat16": {"bf16": True},
    "one server, weights by disk": SERVERS | {"update_weight_transport": "disk"},
    "two servers, restarted": SERVERS | {"rollout_num_gpus": 2, "use_fault_tolerance": True},
    "colocated": SERVERS | {"colocate": True},
}
if importlib.util.find_spec("sglang_router") is not None:
    LAYOUTS["two servers behind a router"] = SERVERS | {
        "rollout_num_gpus": 2, "sglang_router_strategy": "cache_aware", "async_buffer_size": 1
    }  # fmt: skip
if importlib.util.find_spec("ray") is not None:
    LAYOUTS["two ranks"] = RANKS_2
OF_MEGATRON_ONLY: dict[str, dict[str, Any]] = {}
if importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("ray") is not None:
    megatron = {"train_backend": "megatron"}
    OF_MEGATRON_ONLY = {
        "Megatron": megatron,
        "TP 2": megatron | RANKS_2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "PP 2": megatron | RANKS_2 | {"pipeline_model_parallel_size": 2},
        "CP 2": megatron | RANKS_2 | {"context_parallel_size": 2},
    }


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="furlong-families-")


@functools.cache
def family_folder(name: str) -> Path:
    """Return a tiny random model of a family with a tokenizer and a chat template."""
    from transformers import GenerationConfig

    from furlong.models.hf_model import build_model, save_model
    from furlong.models.tokenizer import EOS, IM_END, PAD, SPECIALS, build_tokenizer

    folder, tokenizer, config = Path(_folders().name) / name, build_tokenizer(), family_config(name)
    config.vocab_size = -(-len(tokenizer) // 8) * 8
    config.eos_token_id, config.pad_token_id = SPECIALS.index(IM_END), SPECIALS.index(PAD)
    model = build_model(config, seed=0)
    model.generation_config = GenerationConfig(
        eos_token_id=[SPECIALS.index(IM_END), SPECIALS.index(EOS)], pad_token_id=SPECIALS.index(PAD)
    )
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def _families() -> list[Case]:
    """Every family with every algorithm; the layouts take turns."""
    cases: list[Case] = []
    for number, (family, estimator) in enumerate(itertools.product(FAMILIES, ESTIMATORS)):
        layouts = LAYOUTS | (OF_MEGATRON_ONLY if family in OF_MEGATRON else {})
        layout = [*layouts][number % len(layouts)]
        flags = {"advantage_estimator": estimator} | ESTIMATORS[estimator] | layouts[layout]
        model = functools.partial(family_folder, family)
        cases.append(doctor(f"{family}, {estimator}, {layout}", "", flags, model=model))
    return cases


def _of_world(**flags: Any) -> Any:
    """Flags whose text values may name the folder, {}."""
    return lambda world: {
        name: value.format(world.folder) if isinstance(value, str) else value for name, value in flags.items()
    }


def _evaluation(world: World) -> dict[str, Any]:
    return {"eval_prompt_data": ["held", world.data], "eval_interval": 2}


def _chat(world: World) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    world.write(*({"input": messages, "label": "2"} for _ in range(16)))


def _own_reward(world: World) -> dict[str, Any]:
    (world.folder / "own.py").write_text("def reward(args, sample, **kw):\n    return float(len(sample.response))\n")
    return {"rm_type": None, "custom_rm_path": f"{world.folder}/own.py:reward"}


def _agent(world: World) -> dict[str, Any]:
    (world.folder / "own.py").write_text(
        "from furlong.rollout.agent import policy\n\n\nasync def generate(args, sample, sampling_params):\n"
        "    turn = await policy().generate(sample.tokens, **sampling_params)\n"
        "    sample.append_response_tokens(tokens=turn.tokens, log_probs=turn.log_probs, text=turn.text)\n"
        "    return sample\n"
    )
    return {"custom_generate_function_path": f"{world.folder}/own.py:generate"}


def _mixed_labels(world: World) -> None:
    labels = ("7", "1/2", "\\frac{3}{4}", "x+1", "0.5", "12 cm", "(1, 2)", "\\sqrt{2}")
    world.write(*({"input": f"{i}", "label": label} for i, label in enumerate(labels)))


RECIPES = (
    doctor("KL loss", "", KL),
    doctor("unbiased KL loss", "", {"use_kl_loss": True, "kl_loss_coef": 0.01, "use_unbiased_kl": True}),
    doctor("KL only measured", "", {"use_kl_loss": True}),
    doctor("own reference", "", KL, lambda world: {"ref_load": world.model}),
    doctor("clip higher", "", {"eps_clip_high": 0.28}),
    doctor("entropy bonus", "", {"entropy_coef": 0.001}),
    doctor("importance sampling", "", {"use_tis": True, "async_buffer_size": 1}),
    doctor("partial rollouts", "", {"partial_rollout": True, "over_sampling_batch_size": 8}),
    doctor("dynamic sampling", "", {
        "over_sampling_batch_size": 8,
        "dynamic_sampling_filter_path": "furlong.rollout.filters.check_reward_nonzero_std",
    }),
    doctor("demonstrations", "", {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None}),
    doctor("chat", "", {"apply_chat_template": True}, _chat),
    doctor("questions as chat", "", {"apply_chat_template": True}),
    doctor("limits", "", {"rollout_max_prompt_len": 64, "rollout_max_context_len": 96}),
    doctor("temperature 0.6", "", {"rollout_temperature": 0.6}),
    doctor("evaluations", "", None, _evaluation),
    doctor("checkpoints", "", None, _of_world(save="{}/save", load="{}/save", save_interval=1, keep_checkpoints=2)),
    doctor("checkpoints in the background", "", None, _of_world(save="{}/save", save_interval=1, async_save=True)),
    doctor("exports", "", None, _of_world(save="{}/save", save_interval=1, save_hf="{}/hf_{{rollout_id}}")),
    doctor("frozen parts", "", {"freeze_params_name_list": ["embed", "layers.0"]}),
    doctor("SGD", "", {"optimizer": "sgd", "lr": 0.1}),
    doctor("deterministic", "", {"debug_determinism": True, "deterministic_mode": True}),
    doctor("shuffled epochs", "", {"rollout_shuffle": True, "num_epoch": 3, "num_rollout": None}),
    doctor("stop words", "", {"rollout_stop": ["\n"], "rollout_stop_token_ids": [1]}),
    doctor("old actor", "", {"keep_old_actor": True, "async_buffer_size": 1}),
    doctor("labels of many forms", "", None, _mixed_labels),
    doctor("own reward", "", None, _own_reward, is_slow=True),
    doctor("own generation", "", None, _agent),
    doctor("length reward", "", {"rm_type": "random"}),
    doctor("streamed data", "", {"streaming_data": True}),
    doctor("JSON Lines with empty lines", "", None,
           lambda world: world.data.write_text(
               "\n\n".join(json.dumps({"input": f"{i}+1=", "label": "1"}) for i in range(8)) + "\n") and None),
)  # fmt: skip

NEEDS_MORE = ("megatron", "saved-beside", "evaluated", "agent")  # flags or modules that test_healthy_runs provides
STALE = {"rollout/staleness/max": 1.0, "rollout/staleness/mean": 1.0}
RUNS = (
    steps("a third of the responses cut off", "", [{"rollout/truncated_ratio": 0.7}] * 4),
    steps("KL of kernels", "", [{"train/kl_loss": 5e-5}], KL),
    steps("KL after training", "", [{"train/kl_loss": 0.0}, {"train/kl_loss": 0.4}], KL),
    steps("a warm start and its reference", "", [{"train/kl_loss": 0.5}],
          KL | {"hf_checkpoint": "base", "load": "sft", "finetune": True}),
    steps("a gap of bfloat16", "", [{GAP: 7e-3}] * 5),
    steps("a gap of stale samples", "", [{GAP: 0.08} | STALE] * 12, {"async_buffer_size": 1}),
    steps("a first gradient of 9", "", [{"train/grad_norm": 9.0}]),
    steps("gradients that vary", "", [{"train/grad_norm": norm} for norm in (1, 2, 0.5, 3, 1, 1, 2, 1, 0.7, 4, 1)]),
    steps("gradients of 0 in between", "", [{"train/grad_norm": norm} for norm in (0, 1, 0, 1, 0, 1, 1, 0, 1, 1, 1.5)]),
    steps("hard data", "", [{"rollout/zero_std_frac": 1.0, "rollout/raw_reward": 0.0, "rollout/reward_range": 0.0}] * 2
          + GOOD),
    steps("rewards that rise", "", [{"rollout/zero_std_frac": 0.3, "rollout/raw_reward": i / 40,
                                     "rollout/reward_range": 1.0} for i in range(40)]),
    steps("rewards that dip", "", [*GOOD, *[row | {"rollout/raw_reward": 0.3} for row in GOOD], *GOOD]),
    steps("likely responses", "", [{"rollout/log_probs": -0.4}]),
    steps("a base model without a template", "", [{"rollout/log_probs": -1.6}], has_template=False),
    steps("SmolLM2-135M-Instruct in its own format", "", [{"rollout/log_probs": -2.0}], {"apply_chat_template": True},
          sizes=(49_152, 134_515_008)),
    steps("samples within the bound", "", [STALE] * 10, {"async_buffer_size": 1}),
    steps("a fast reward", "", [{"perf/reward_wait_time": 0.2, "perf/rollout_time": 10.0, "perf/wait_time_ratio": 0.8}]
          * 5),
    steps("balanced engines", "", [{"engine/requests/max": 12.0, "engine/requests/mean": 9.0}] * 10),
    steps("short weight updates", "", [{"perf/update_weights_time": 8.0, "perf/step_time": 90.0}] * 5),
    steps("memory that stays", "", [{"memory/engine_kept_frac": 0.06, "memory/trainer_peak_frac": 0.7}] * 10),
    steps("host memory that settles", "", [{"perf/host_memory_frac": min(0.3 + 0.01 * i, 0.36)} for i in range(60)]),
    steps("experts that mostly agree", "", [{"train/routing_agreement": 0.97}] * 3),
    happened("norms that do not change in bfloat16", "", [COMPARED | {"unchanged": ["model.norm.weight"]}] * 6),
    happened("experts without tokens once", "", [COMPARED] * 2 + [COMPARED | {"unchanged": []}] * 4),
    happened("ranks in step", "", [RANKS | {"layers_s": [0.5] * 4, "per_cost_s": [0.5] * 4}] * 10),
)  # fmt: skip

FEW = {"rollout_batch_size": 2, "n_samples_per_prompt": 2}
INSTRUCT = {"has_template": True, "sizes": (49_152, 134_515_008)}
ROUNDED = {"selftest/share/numerics": 1.0, "selftest/logp_rounding_limit": 0.08}
FLAT = {"rollout/zero_std_frac": 1.0, "rollout/raw_reward": 0.0, "rollout/reward_range": 0.0}
MEASURED = (
    steps("SmolLM2: questions at temperature 0.7", "", [{"rollout/log_probs": -0.93}], {"rollout_temperature": 0.7},
          **INSTRUCT),
    steps("SmolLM2: chat, bfloat16", "", [{"rollout/log_probs": -2.56}], {"bf16": True}, **INSTRUCT),
    steps("SmolLM2: chat, temperature 1.2", "", [{"rollout/log_probs": -3.75}], {"rollout_temperature": 1.2},
          **INSTRUCT),
    steps("SmolLM2: text to continue", "", [{"rollout/log_probs": -2.49}], **INSTRUCT),
    steps("SmolLM2: questions without a chat format", "", [{"rollout/log_probs": -3.66}], **INSTRUCT),
    steps("a base model at temperature 1.2", "", [{"rollout/log_probs": -3.77}], {"rollout_temperature": 1.2}),
    steps("a model of characters", "", [{"rollout/log_probs": -1.4}], sizes=(64, 5_000_000)),
    steps("SmolLM2: a gap of bfloat16", "", [{GAP: 0.038} | ROUNDED, *[{GAP: 0.041}] * 20], {"bf16": True}, **INSTRUCT),
    steps("a gap of bfloat16 at temperature 0.5", "", [{GAP: 0.039} | ROUNDED, {GAP: 0.054}],
          {"bf16": True, "rollout_temperature": 0.5}),
    steps("a gap of bfloat16 in a model with large logits", "",
          [{GAP: 0.041} | ROUNDED | {"selftest/logp_max_diff": 1.6}, {GAP: 0.068}], {"bf16": True}),
    steps("an engine in bfloat16, with importance sampling", "", [{GAP: 0.05, "selftest/share/numerics": 1.0}],
          {"embedded_dtype": "bfloat16", "use_tis": True}),
    steps("four of four responses cut off", "", [{"rollout/truncated_ratio": 1.0}, {"rollout/truncated_ratio": 0.5}],
          FEW),
    steps("15 of 16 responses cut off once", "", [{"rollout/truncated_ratio": 0.9375},
                                                 {"rollout/truncated_ratio": 0.625}],
          {"rollout_batch_size": 4, "n_samples_per_prompt": 4}),
    steps("a context that fills up later", "", [{"rollout/truncated_ratio": 0.4}] * 5
          + [{"rollout/truncated_ratio": 0.95}] * 5, {"rollout_max_response_len": 64}),
    steps("hard data in small batches", "", [FLAT] * 12 + [FLAT | {"rollout/zero_std_frac": 0.5,
                                                                   "rollout/raw_reward": 0.25}], FEW),
    steps("four samples a step that vary", "", [
        {"rollout/zero_std_frac": 0.5, "rollout/raw_reward": reward, "rollout/reward_range": 1.0}
        for reward in [0.5, 0.25, 0.0] * 5 + [0.0, 0.25, 0.0, 0.0, 0.0] + [0.25, 0.0, 0.5] * 5 + [0.0] * 5], FEW),
    steps("rewards of -1 and 1", "", [{"rollout/zero_std_frac": 0.2, "rollout/raw_reward": (-1) ** i * 0.05,
                                      "rollout/reward_range": 2.0} for i in range(40)]),
    steps("rewards of 100 with their spread divided out", "", [{"train/grad_norm": 6.0, "rollout/reward_range": 100.0,
                                                                "rollout/zero_std_frac": 0.1,
                                                                "rollout/raw_reward": 40.0}] * 5),
    steps("an entropy bonus while the reward rises", "", [
        {"rollout/zero_std_frac": 0.3, "rollout/raw_reward": 0.3 + i / 100, "rollout/reward_range": 1.0}
        for i in range(30)], {"entropy_coef": 0.05}),
    steps("a KL loss with a large weight that holds the policy", "", [
        {"rollout/zero_std_frac": 0.3, "rollout/raw_reward": 0.5, "rollout/reward_range": 1.0, "train/kl_loss": 0.0}
    ] * 20, KL | {"kl_loss_coef": 10.0}),
    steps("solved at last", "", [{"rollout/zero_std_frac": 0.9, "rollout/raw_reward": 0.98,
                                  "rollout/reward_range": 1.0}] * 30),
    steps("one sample per prompt, all wrong twice", "", [FLAT | {"rollout/zero_std_frac": 1.0}] * 2 + GOOD,
          {"n_samples_per_prompt": 1, "rollout_batch_size": 16}),
    steps("demonstrations with a constant reward", "", [FLAT] * 9, {"loss_type": "sft_loss"}),
    steps("one reward call in a thousand times out", "", [{"rollout/reward_timed_out": 1.0}],
          {"rollout_batch_size": 128, "n_samples_per_prompt": 8}),
    steps("one generation in a thousand fails", "", [{"rollout/generate_failed": 1.0}],
          {"rollout_batch_size": 128, "n_samples_per_prompt": 8, "custom_generate_function_path": "own.py:generate"}),
)  # fmt: skip
TRAINED = tuple(ran(f"run: {name}", "", changes) for name, changes in HEALTHY.items() if name not in NEEDS_MORE)


def _real() -> list[Case]:
    """Settings and runs of a real model, if there is one."""
    if not (folder := os.environ.get("FURLONG_REAL_MODEL")):
        return []
    model, short = functools.partial(Path, folder), {
        "num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 4, "rollout_max_response_len": 24, "lr": 1e-6
    }  # fmt: skip
    chat = {"apply_chat_template": True}
    settings = {
        name: chat | flags for name, flags in LAYOUTS.items()
    } | {
        "no chat format": {}, "KL loss": chat | KL, "long": chat | {"rollout_max_response_len": 4096},
        "temperature 0.7": chat | {"rollout_temperature": 0.7},
        "stop words": chat | {"rollout_stop": ["\n\n"]},
    }  # fmt: skip
    runs: dict[str, dict[str, Any]] = {
        "float32": {}, "bfloat16": {"bf16": True}, "temperature 0.7": {"rollout_temperature": 0.7},
        "temperature 1.2": {"rollout_temperature": 1.2, "rollout_max_response_len": 96, "num_rollout": 1},
        "bfloat16 at 0.5": {"bf16": True, "rollout_temperature": 0.5},
        "KL loss": KL, "one ahead": {"async_buffer_size": 1}, "no chat format": {"apply_chat_template": None},
        "temperature 0.9": {"rollout_temperature": 0.9},
        "96 tokens": {"rollout_max_response_len": 96, "num_rollout": 1},
    }  # fmt: skip
    return [
        *(doctor(f"a real model: {name}", "", flags, model=model) for name, flags in settings.items()),
        *(ran(f"run of a real model: {name}", "", short | flags, model=model) for name, flags in runs.items()),
    ]


CASES: tuple[Case, ...] = (*_families(), *RECIPES, *TRAINED, *_real(), *RUNS, *MEASURED)
