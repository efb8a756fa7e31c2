"""Print the table of model sizes in docs/scale-out/ray.md: python scripts/plan_sizes.py [--device h100].

Each row is the shape of a public model with the fewest GPUs on which a run fits, according to `furlong plan`. The run
uses samples of 8,192 tokens, one sample per micro-batch, and bfloat16 with float32 master weights and AdamW. The plan
reads only config.json, which this script writes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.config.command_line import load
from furlong.tools.gpu_memory import device_bytes
from furlong.tools.memory_formulas import GIB, ModelSize, Phase
from furlong.tools.memory_plan import MemoryPlan, plan_memory

QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 40_960, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "intermediate_size": 18_432, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
}  # fmt: skip
CACHE_GIB = 8.0  # minimum KV cache per engine GPU
COLUMNS = (
    "shape", "parameters (10^9)", "trainer", "GPUs", "GiB per GPU", "GPUs of an engine", "weights, GiB per GPU",
    "cache, GiB per GPU", "GB of an update",
)  # fmt: skip
CUT = ("--train-backend", "megatron", "--sequence-parallel")


@dataclass(frozen=True)
class Size:
    """A model shape, the step in which training GPUs are added, and the parallel layout (FSDP if empty)."""

    name: str
    config: dict[str, Any]
    step: int = 1
    layout: tuple[str, ...] = ()


def cut(tensor: int, pipeline: int, expert: int, *more: str) -> tuple[str, ...]:
    """Return the flags of a Megatron layout."""
    return (
        "--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline),
        "--expert-model-parallel-size", str(expert), "--expert-tensor-parallel-size", "1", *more,
    )  # fmt: skip


SIZES = (
    Size("Qwen3-8B", QWEN | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
                             "num_attention_heads": 32}, 2),
    Size("Qwen3-32B", QWEN | {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64,
                              "num_attention_heads": 64}, 8),
    Size("Qwen2.5-72B", QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152_064,
                                "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
                                "num_attention_heads": 64}, 8),
    Size("Qwen3-235B-A22B", QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
        "intermediate_size": 12_288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True,
    }, 64, cut(4, 8, 8, "--decoder-last-pipeline-num-layers", "10")),
    Size("DeepSeek-V3", DEEPSEEK | {"n_routed_experts": 256, "first_k_dense_replace": 3, "num_attention_heads": 128,
                                    "num_key_value_heads": 128, "vocab_size": 129_280, "n_group": 8, "topk_group": 4},
         256, cut(8, 16, 16, "--decoder-last-pipeline-num-layers", "1")),
    Size("Kimi-K2", DEEPSEEK | {"n_routed_experts": 384, "first_k_dense_replace": 1, "num_attention_heads": 64,
                                "num_key_value_heads": 64, "vocab_size": 163_840, "n_group": 1, "topk_group": 1},
         256, cut(8, 16, 16, "--decoder-last-pipeline-num-layers", "1")),
)  # fmt: skip


def planned(folder: Path, size: Size, device: int, trainers: int, engine: int) -> MemoryPlan:
    """Return the memory plan of a run with `trainers` training GPUs and one engine on `engine` GPUs."""
    nodes, each = (trainers // 8, 8) if trainers > 8 else (1, trainers)
    words = [
        "--hf-checkpoint", folder, "--prompt-data", folder / "prompts.jsonl", "--label-key", "label",
        "--rm-type", "math", "--num-rollout", 1, "--rollout-batch-size", 64, "--n-samples-per-prompt", 8,
        "--rollout-max-context-len", 8192, "--rollout-max-response-len", 7168, "--use-dynamic-batch-size",
        "--max-tokens-per-gpu", 8192, "--recompute-activations", "--actor-num-nodes", nodes,
        "--actor-num-gpus-per-node", each, "--engine", "sglang", "--rollout-num-gpus", engine,
        "--rollout-num-gpus-per-engine", engine, *((*CUT, *size.layout) if size.layout else ()),
    ]  # fmt: skip
    config = load([str(word) for word in words]).config
    return plan_memory(config, size.config, device)


def rows(folder: Path, device: int) -> Iterator[str]:
    """Yield one table row per size."""
    for size in SIZES:
        (folder / "config.json").write_text(json.dumps(size.config))
        tp = 1
        while (served := planned(folder, size, device, 8 * size.step, tp).engine) is None or _cache(served) < CACHE_GIB:
            tp *= 2
        trainers = size.step
        while (plan := planned(folder, size, device, trainers, tp)).trainer_peak.total > plan.limit:
            trainers += size.step
        model, peak = ModelSize.read(size.config), plan.trainer_peak
        how = "FSDP" if not size.layout else "TP {1}, PP {3}, EP {5}".format(*size.layout)
        cells = (
            size.name, f"{model.parameters / 1e9:.1f}", how, trainers, f"{peak.total / GIB:.1f}", tp,
            f"{served.parts['weights'] / GIB:.1f}", f"{_cache(served):.1f}", f"{2 * model.parameters / 1e9:.0f}",
        )  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"


def _cache(engine: Phase) -> float:
    return engine.parts.get("KV cache", 0) / GIB


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="h100", help="GPU name known to `furlong plan`, or memory in GiB")
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---" * len(COLUMNS) + "|")
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
        for row in rows(Path(scratch), device_bytes(args.device)):
            print(row)


if __name__ == "__main__":
    main()
