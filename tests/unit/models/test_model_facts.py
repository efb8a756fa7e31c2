"""Facts about models: FLOPs, and families that packed rows or slots would compute wrongly."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from fakes_engine import reference_log_probs, run, tiny_engine
from furlong.core.batch import pack_micro_batch
from furlong.errors import ConfigError, EngineError
from furlong.interfaces import SamplingParams
from furlong.models.hf_model import build_model
from furlong.models.model_facts import forward_flops
from furlong.models.packed_model import PackedModel
from models_zoo import FAMILIES, VOCAB, family_config, packed_log_probs, plain_log_probs, random_batch

BATCH = random_batch(prompts=[5, 9], responses=[[6, 2], [4, 7]])
ENDS = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
DECODER = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "max_target_positions": 64,
    "scale_embedding": True,
    **ENDS,
}
ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "is_decoder": True,
    **ENDS,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MIXED = ["linear_attention", "full_attention"]
CONFIGS = {
    **dict.fromkeys(("bart", "mbart", "pegasus", "whisper"), DECODER),
    **dict.fromkeys(("bert", "roberta", "gpt_neox_japanese", "modernbert-decoder", "doge"), ENCODER),
    "qwen3_next": ENCODER | DELTA | {"layer_types": MIXED, "head_dim": 8},
    "lfm2": ENCODER | {"layer_types": ["conv", "full_attention"]},
    "llama4_text": ENCODER | {"attention_chunk_size": 5, "num_local_experts": 2, "head_dim": 8},
    "recurrent_gemma": ENCODER | {"num_hidden_layers": 3, "lru_width": 32, "head_dim": 8, "attention_window_size": 4},
    "phimoe": ENCODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "seed_oss": ENCODER | {"head_dim": 8},
    "phi3": ENCODER
    | {
        "original_max_position_embeddings": 12,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 12,
        },
    },
    "mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, **ENDS},
    "gemma2": ENCODER | {"head_dim": 8, "sliding_window": 5},
}


def config_of(family):
    return AutoConfig.for_model(family, **CONFIGS[family])


def randomized(model):
    """Every tensor of its own, large enough that positions, biases and routers matter."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.0 if "A_log" in name or "dt_bias" in name else 0.15
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def packed_and_plain(family):
    model = randomized(build_model(config_of(family), seed=3).float())
    twin = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager", dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    return PackedModel(model), twin.eval()


@pytest.mark.parametrize("family", ["bart", "mbart", "pegasus", "lfm2", "recurrent_gemma"])
def test_a_family_that_cannot_share_a_row_is_right_one_sequence_at_a_time_and_refused_otherwise(family):
    packed, twin = packed_and_plain(family)
    with torch.no_grad():
        got = torch.cat([packed_log_probs(packed, pack_micro_batch(BATCH, [i])) for i in range(len(BATCH))])
        torch.testing.assert_close(got, plain_log_probs(twin, BATCH), rtol=1e-5, atol=2e-5)
    with pytest.raises(ConfigError, match=rf"\({family}\) .* give --micro-batch-size 1"):
        packed_log_probs(packed, pack_micro_batch(BATCH, [0, 1]))


def test_frequencies_that_follow_the_longest_sequence_are_right_alone_and_where_all_are_short():
    packed, twin = packed_and_plain("phi3")
    with torch.no_grad():
        want = plain_log_probs(twin, BATCH).split([6, 2, 4, 7])
        for rows in ([0], [1], [2], [3], [1, 0]):  # 11, 7, 13 and 16 tokens; up to 12 are short
            got = packed_log_probs(packed, pack_micro_batch(BATCH, rows))
            torch.testing.assert_close(got, torch.cat([want[i] for i in rows]), rtol=1e-5, atol=2e-5)
    with pytest.raises(ConfigError, match=r"13 tokens .*\(phi3\) .*beyond 12 .*--rollout-max-context-len 12"):
        packed_log_probs(packed, pack_micro_batch(BATCH, [1, 2]))


def test_an_engine_stays_where_frequencies_do_not_change():
    _, twin = packed_and_plain("phi3")
    with pytest.raises(EngineError, match=r"phi3 .* --rollout-max-context-len 12"):
        tiny_engine(twin.config, twin.state_dict())
    engine = tiny_engine(twin.config, twin.state_dict(), context_len=12)
    prompt = list(range(2, 11))  # of 9 tokens, which are filled up to 12 and more

    async def body():
        return await engine.generate(prompt, SamplingParams(max_new_tokens=9, ignore_eos=True))

    done = run(engine, body)
    assert len(done.tokens) == 3
    want = reference_log_probs(twin, prompt, done.tokens)
    torch.testing.assert_close(torch.tensor(done.log_probs), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["whisper", "phimoe"])
def test_a_wrapped_decoder_and_a_router_with_a_threshold_agree_in_packed_rows(family):
    packed, twin = packed_and_plain(family)
    with torch.no_grad():
        got = packed_log_probs(packed, pack_micro_batch(BATCH, range(len(BATCH))))
        torch.testing.assert_close(got, plain_log_probs(twin, BATCH), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bert", r"\(cls\.predictions\.transform"),
        ("roberta", r"\(lm_head\.dense"),
        ("modernbert-decoder", r"\(lm_head\.dense"),
        ("gpt_neox_japanese", "packed attention"),
        ("mamba", "no num_attention_heads"),
    ],
)
def test_a_family_that_would_be_computed_incorrectly_is_refused_with_the_reason(family, reason):
    with pytest.raises(ConfigError, match=rf"\({family}\) .*{reason}.*--hf-checkpoint"):
        PackedModel(build_model(config_of(family), seed=0))


def test_layers_that_choose_their_keys_are_refused():
    model = build_model(config_of("gemma2"), seed=0)
    model.config.layer_types = ["full_attention", "indexed_attention"]
    with pytest.raises(ConfigError, match="indexed_attention"):
        PackedModel(model)


def test_a_sliding_window_only_in_masks_is_refused():
    config = config_of("phimoe")
    assert config.sliding_window is None or config.sliding_window >= config.max_position_embeddings
    config.sliding_window = 6
    with pytest.raises(ConfigError, match="sliding window of 6 tokens"):
        PackedModel(build_model(config, seed=0))
    with pytest.raises(EngineError, match="phimoe has a sliding window of 6 tokens"):
        tiny_engine(config, {})


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bart", "positions"),
        ("pegasus", "positions"),
        ("roberta", "own forward pass"),  # positions begin behind the padding id
        ("gpt_neox_japanese", "does not work with the embedded engine"),
        ("doge", "Attention builds its own attention mask"),
        ("llama4_text", "chunked_attention"),
        ("lfm2", "conv"),
    ],
)
def test_an_engine_refuses_a_family_that_it_would_compute_incorrectly(family, reason):
    config = config_of(family)
    state = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).state_dict()
    with pytest.raises(EngineError, match=rf"(?i){family}.*{reason}.*use SGLang"):
        tiny_engine(config, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_engine_accepts_a_family_that_it_supports(dtype):
    config = config_of("gemma2")
    state = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).state_dict()
    assert tiny_engine(config, state, dtype=dtype).model.dtype == dtype


def test_nan_weights_are_not_mistaken_for_an_unsupported_family():
    config = config_of("gemma2")
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    assert "gemma2" in tiny_engine(config, model.state_dict()).model.description


def test_dropout_and_router_noise_are_off():
    config = config_of("seed_oss")
    assert config.residual_dropout > 0  # the family's default
    assert build_model(config, seed=0).config.residual_dropout == 0
    kept = config_of("phimoe")
    assert kept.router_jitter_noise > 0
    assert build_model(kept, seed=0).config.router_jitter_noise == kept.router_jitter_noise  # a threshold there


@pytest.mark.parametrize("family", [*FAMILIES, "mistral", "deepseek_v3", "deepseek_v3-plain-queries"])
def test_flops_are_those_of_the_gemms(family):
    config = family_config(family.removesuffix("-plain-queries"))
    if family.endswith("plain-queries"):
        config.q_lora_rank = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    counted = {}
    for length in (8, 24):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.ones(1, length, dtype=torch.long))
        counted[length] = counter.get_total_flops()
    # eager attention multiplies all pairs of tokens, which are twice those that a causal query sees
    pairs = (counted[24] / 24 - counted[8] / 8) / (24 - 8)
    flops = forward_flops(model)
    in_windows = sum(each for _, each in flops.windows)
    assert flops.per_pair + in_windows == pytest.approx(pairs / 2)
    assert flops.per_token == pytest.approx(counted[8] / 8 - 8 * pairs)


def test_tokens_outside_of_a_window_cost_nothing():
    flops = forward_flops(AutoModelForCausalLM.from_config(family_config("gpt_oss")))
    ((window, each),) = flops.windows
    assert window == 6
    lengths = np.array([4, 6, 10, 1000])
    seen = [length**2 if length <= window else 2 * window * length - window**2 for length in lengths.tolist()]
    rest = flops.per_token * lengths + flops.per_pair * lengths.astype(float) ** 2
    assert flops.cost(lengths).tolist() == pytest.approx(rest + each * np.array(seen))
