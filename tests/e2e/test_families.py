"""Every supported family through the whole loop: generate, score, train, update weights, and generate again."""

from __future__ import annotations

import pytest
from transformers import AutoConfig, GenerationConfig

from furlong.errors import ConfigError, EngineError
from furlong.models.hf_model import build_model, save_model
from furlong.models.tokenizer import build_tokenizer
from models_zoo import family_config
from runs import ALPHABET, flags, rows, train, write_prompts

FAMILIES = [
    *("qwen2", "qwen3", "llama", "qwen3_moe", "mixtral", "glm4", "glm4_moe", "gpt_oss", "afmoe"),
    *("mimo", "kimi_k2", "glm4_moe_lite", "minimax_m2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
]


def write(config, folder):
    tokenizer = build_tokenizer(ALPHABET[:35])
    config.vocab_size = -(-len(tokenizer) // 8) * 8
    model = build_model(config, seed=0)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.nightly
def test_family_trains_and_serves_what_it_trained(family, tmp_path):
    folder = write(family_config(family), tmp_path / "model")
    out = tmp_path / "run"
    train(flags(folder, write_prompts(tmp_path / "prompts.jsonl"), out, num_rollout=3, rollout_max_response_len=12))
    table = rows(out)
    assert [row["step"] for row in table] == [1, 2, 3]
    for row in table:  # the engine's weights are the trainer's after every update, or these would drift apart
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert row["train/grad_norm"] > 0


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.nightly
def test_a_family_with_gated_delta_nets_trains_on_packed_sequences(family, tmp_path):
    folder, data = write(family_config(family), tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl", 8)
    taught = {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None, "num_rollout": 1}
    results = []
    for name, packing in (("packed", {}), ("alone", {"micro_batch_size": 1})):
        assert train(flags(folder, data, tmp_path / name, **taught, **packing)) == 1
        (row,) = rows(tmp_path / name)
        results.append([row["train/loss"], row["train/grad_norm"]])
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_a_family_that_numbers_positions_itself_is_refused_before_anything_is_generated(tmp_path):
    shape = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48}
    config = AutoConfig.for_model("bart", max_position_embeddings=64, decoder_attention_heads=4, **shape)
    folder = write(config, tmp_path / "model")
    data = write_prompts(tmp_path / "prompts.jsonl")
    with pytest.raises(ConfigError, match=r"\(bart\) .*position_ids.*--micro-batch-size 1"):
        train(flags(folder, data, tmp_path / "packed"))
    with pytest.raises(EngineError, match=r"model type bart .*positions.*SGLang"):
        train(flags(folder, data, tmp_path / "alone", micro_batch_size=1))


def test_a_recurrent_family_is_refused_at_the_start_and_trains_with_the_proposed_flag(tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    kinds = {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}
    config = AutoConfig.for_model("lfm2", max_position_embeddings=128, **shape, **kinds)
    folder, data = write(config, tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl", 8)
    taught = {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None, "num_rollout": 1}
    with pytest.raises(ConfigError, match=r"\(lfm2\) .*conv.*--micro-batch-size 1"):
        train(flags(folder, data, tmp_path / "packed", **taught))
    assert train(flags(folder, data, tmp_path / "alone", micro_batch_size=1, **taught)) == 1
    assert rows(tmp_path / "alone")[0]["train/grad_norm"] > 0
