"""Tiny models with random weights for the quickstart, tests and benchmarks; built offline in under a second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from furlong.core.model_config import RANDOM
from furlong.errors import ConfigError
from furlong.models.hf_model import build_model, save_model
from furlong.models.tokenizer import EOS, IM_END, PAD, SPECIALS, build_tokenizer


@dataclass(frozen=True)
class Preset:
    """A model shape. The vocabulary is that of `build_tokenizer()`, rounded up to a multiple of 8."""

    family: type[Qwen2Config] | type[Qwen3Config]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int


# Sizes include embeddings.
PRESETS: dict[str, Preset] = {
    "tiny": Preset(Qwen3Config, 128, 384, 5, 4, 2),  # 1.0M, for the quickstart
    "3m": Preset(Qwen2Config, 256, 704, 4, 4, 4),  # 3.2M, for CPU benchmarks
    "12m": Preset(Qwen2Config, 384, 1120, 7, 6, 2),  # 11.8M, for CPU benchmarks
}


def preset_config(name: str) -> PretrainedConfig:
    """Return the config of a preset. Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        raise ConfigError(f"no model preset {name!r}; use one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    shape: dict[str, Any] = {"head_dim": preset.hidden_size // preset.num_attention_heads}
    return preset.family(
        vocab_size=-(-len(build_tokenizer()) // 8) * 8,
        hidden_size=preset.hidden_size,
        intermediate_size=preset.intermediate_size,
        num_hidden_layers=preset.num_hidden_layers,
        num_attention_heads=preset.num_attention_heads,
        num_key_value_heads=preset.num_key_value_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIALS.index(IM_END),
        pad_token_id=SPECIALS.index(PAD),
        **shape,
    )


def write_preset(name: str, folder: Path | str, *, seed: int = 0) -> Path:
    """Write a model folder with random weights and its tokenizer; deterministic in name and seed."""
    folder = Path(folder)
    model = build_model(preset_config(name), seed=seed)
    model.generation_config = GenerationConfig(
        eos_token_id=[SPECIALS.index(IM_END), SPECIALS.index(EOS)], pad_token_id=SPECIALS.index(PAD)
    )
    setattr(model.config, RANDOM, True)
    save_model(model, folder)
    build_tokenizer().save_pretrained(folder)
    return folder
