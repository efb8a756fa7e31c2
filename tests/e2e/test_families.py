"""Every supported family through the whole loop: generate, score, train, publish, and generate again."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from furlong.models.hf import build_model, save_model
from furlong.models.tokenizer import build_tokenizer
from models_zoo import family_config
from runs import ALPHABET, flags, rows, train, write_prompts

FAMILIES = ["qwen2", "qwen3", "llama", "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "afmoe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_and_serves_what_it_trained(family, tmp_path):
    tokenizer = build_tokenizer(ALPHABET[:35])
    config = family_config(family)
    config.vocab_size = -(-len(tokenizer) // 8) * 8
    model = build_model(config, seed=0)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    folder = tmp_path / "model"
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    out = tmp_path / "run"
    train(flags(folder, write_prompts(tmp_path / "prompts.jsonl"), out, num_rollout=3, rollout_max_response_len=12))
    table = rows(out)
    assert [row["step"] for row in table] == [1, 2, 3]
    for row in table:  # the engine's weights are the trainer's after every update, or these would drift apart
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert row["train/grad_norm"] > 0
