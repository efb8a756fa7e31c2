"""Tiny random models of each supported family, and batches to run them on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AfmoeConfig,
    AutoConfig,
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from furlong.algo.logprob import token_stats
from furlong.core.batch import MicroBatch, RolloutBatch
from furlong.models.hf_config import KimiK2Config, MiMoConfig
from furlong.models.packed_model import PackedModel
from furlong.models.untrained_tensors import stored_name

VOCAB = 40
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LATENT = {name: value for name, value in _SHAPE.items() if name != "head_dim"} | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_DELTA_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def family_config(name: str) -> PretrainedConfig:
    match name:
        case "qwen2":
            return Qwen2Config(**_SHAPE, tie_word_embeddings=True)
        case "qwen2-sliding":
            return Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1)
        case "qwen3":
            return Qwen3Config(**_SHAPE, tie_word_embeddings=False)
        case "llama":
            return LlamaConfig(**_SHAPE, attention_bias=True)
        case "qwen3_moe":
            return Qwen3MoeConfig(
                **_SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
            )
        case "glm4":
            return Glm4Config(**_SHAPE, rms_norm_eps=1e-5)
        case "glm4_moe":
            return Glm4MoeConfig(
                **_SHAPE,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                n_shared_experts=1,
                first_k_dense_replace=1,
                n_group=1,
                topk_group=1,
                use_qk_norm=True,
            )
        case "gpt_oss":
            return GptOssConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=6)
        case "afmoe":
            return AfmoeConfig(
                **_SHAPE,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=24,
                num_dense_layers=1,
                sliding_window=6,
            )
        case "mixtral":
            return MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2)
        case "mistral":
            return MistralConfig(**_SHAPE, sliding_window=5)
        case "deepseek_v3":
            return DeepseekV3Config(**_LATENT, first_k_dense_replace=1)
        case "kimi_k2":
            return KimiK2Config(**_LATENT | {"n_group": 1, "topk_group": 1}, first_k_dense_replace=1)
        case "glm4_moe_lite":
            return Glm4MoeLiteConfig(**_LATENT | {"n_group": 1, "topk_group": 1})
        case "minimax_m2":
            return MiniMaxM2Config(
                **_SHAPE, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_HALF_ROTARY, rms_norm_eps=1e-5
            )
        case "mimo":
            return MiMoConfig(**_SHAPE, attention_bias=True, num_nextn_predict_layers=1)
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text":
            return AutoConfig.for_model(name, **_SHAPE, **_DELTA, **_DELTA_EXPERTS if name != "qwen3_5_text" else {})
        case _:
            raise KeyError(name)


def add_vision(folder: Path) -> None:
    """Turn a saved Qwen3.5 text model into a folder as released: a model with vision that contains it."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    family = text["model_type"].removesuffix("_text")
    kinds = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"}
    vision = {"model_type": f"{family}_vision", "depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8}
    whole = {"model_type": family, "architectures": [kinds[family]], "text_config": text, "vision_config": vision}
    path.write_text(json.dumps(whole))
    file = folder / "model.safetensors"
    tensors = {stored_name(name): tensor for name, tensor in load_file(file).items()}
    tensors["model.visual.merger.norm.weight"] = torch.randn(3, dtype=torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})


FAMILIES = ("qwen2", "qwen2-sliding", "qwen3", "llama", "qwen3_moe", "glm4_moe", "gpt_oss")


def random_batch(
    *,
    prompts: list[int],
    responses: list[list[int]],
    seed: int = 0,
    vocab: int = VOCAB,
    masked: float = 0.0,
    rollout_id: int = 0,
) -> RolloutBatch:
    """Return a batch with a group for each length in `prompts`; `responses[i]` are the response lengths of group i."""
    rng = np.random.default_rng(seed)
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    response_lengths: list[int] = []
    groups: list[int] = []
    for group, (prompt_len, sizes) in enumerate(zip(prompts, responses, strict=True)):
        prompt = rng.integers(2, vocab, prompt_len)
        for size in sizes:
            tokens.append(np.concatenate([prompt, rng.integers(2, vocab, size)]))
            lengths.append(prompt_len + size)
            response_lengths.append(size)
            groups.append(group)
    n, total = len(lengths), sum(response_lengths)
    rewards = rng.normal(size=n).astype(np.float32)
    return RolloutBatch(
        rollout_id=rollout_id,
        tokens=np.concatenate(tokens).astype(np.int32),
        lengths=np.array(lengths, np.int64),
        response_lengths=np.array(response_lengths, np.int64),
        loss_masks=(rng.random(total) >= masked).astype(np.uint8),
        rewards=rewards,
        raw_rewards=rewards,
        group_ids=np.array(groups, np.int64),
        rollout_ids=np.arange(n),
        sample_ids=np.arange(n) + 100,
        truncated=np.zeros(n, np.uint8),
        columns={"rollout_log_probs": -rng.random(total).astype(np.float32)},
    )


def plain_log_probs(model: torch.nn.Module, batch: RolloutBatch) -> torch.Tensor:
    """Return [R] log-probs of the response tokens, one unpadded sequence at a time with the model's own attention."""
    parts: list[torch.Tensor] = []
    for i in range(len(batch)):
        tokens = torch.from_numpy(batch.tokens[batch.starts[i] : batch.starts[i + 1]].astype(np.int64))
        size = int(batch.response_lengths[i])
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
        logp = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        parts.append(logp[len(logp) - size :])
    return torch.cat(parts)


def packed_log_probs(packed: PackedModel, micro: MicroBatch) -> torch.Tensor:
    """Return [R] log-probs of the response tokens, as training computes them."""
    (hidden_RD,) = packed(micro, lambda hidden_RD, *_: (hidden_RD,))
    return token_stats(
        hidden_RD,
        packed.head_VD,
        micro.tokens_T[micro.response_pos_R],
        temperature=1.0,
        entropy=False,
        entropy_grad=False,
        bias_V=packed.head_bias_V,
        softcap=packed.softcap,
    ).log_probs_R
