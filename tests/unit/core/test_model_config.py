"""config.json with values that no model can be built from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from furlong.core.model_config import read_json
from furlong.errors import ConfigError

GOOD: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "intermediate_size": [128, 256],
    "rope_theta": 1e6,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_parameters": {"full_attention": {"rope_theta": 10_000, "rope_type": "default"}},
    "rms_norm_eps": 1e-6,
    "eos_token_id": [1, 2],
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"],
    "transformers_version": "5.0.0",
}


def write(folder: Path, name: str = "config.json", **changes: Any) -> Path:
    (folder / name).write_text(json.dumps(GOOD | changes))
    return folder / name


def test_a_good_config_is_returned_unchanged(tmp_path: Path) -> None:
    assert read_json(write(tmp_path)) == GOOD
    assert read_json(tmp_path / "missing.json") == {}


def test_a_value_of_the_wrong_type_is_named_with_its_key_and_file(tmp_path: Path) -> None:
    for key, value in [
        ("rope_theta", "x"),
        ("rope_theta", 0),
        ("rope_theta", float("nan")),
        ("rope_theta", [1]),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", -1),
        ("vocab_size", 0),
        ("vocab_size", 99.5),
        ("vocab_size", True),
        ("hidden_size", {"a": 1}),
        ("num_attention_heads", 0),
        ("num_attention_heads", "4"),
        ("intermediate_size", ["a"]),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, "3"]),
        ("tie_word_embeddings", "yes"),
        ("layer_types", "full_attention"),
        ("architectures", {}),
        ("rope_scaling", []),
        ("text_config", [1]),
        ("hidden_act", 3),
        ("model_type", ["qwen3"]),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 10**6),
        ("max_position_embeddings", 10**30),
        ("pad_token_id", 10**30),
    ]:
        path = write(tmp_path, **{key: value})
        with pytest.raises(ConfigError, match=rf"config\.json: {key} is .*, expected ") as caught:
            read_json(path)
        assert str(path) in str(caught.value)


def test_nested_values_are_named_with_their_path(tmp_path: Path) -> None:
    nested = {"text_config": {"rope_parameters": {"full_attention": {"rope_theta": "x"}}, "vocab_size": "y"}}
    with pytest.raises(ConfigError) as caught:
        read_json(write(tmp_path, **nested))
    assert "text_config.rope_parameters.full_attention.rope_theta is 'x'" in str(caught.value)
    assert "text_config.vocab_size is 'y'" in str(caught.value)


def test_the_stop_tokens_of_generation_config_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is 'x'"):
        read_json(write(tmp_path, "generation_config.json", eos_token_id="x"))
    assert read_json(write(tmp_path, "other.json", eos_token_id="x"))["eos_token_id"] == "x"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b"\xff{}", b"[" * 99_999],
)
def test_other_content_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from([*GOOD, "text_config"]), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD]), inner, max_size=3),
    max_leaves=6,
)))  # fmt: skip
@pytest.mark.nightly
def test_any_json_is_accepted_or_a_config_error(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    try:
        read_json(path)
    except ConfigError as error:
        assert str(path) in str(error)  # noqa: PT017  either outcome is right
