"""Tokens of micro-batches and slots of the embedded engine, from the memory of a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from furlong.config.command_line import Resolved, parse
from furlong.models.presets import write_preset
from furlong.run import device_sizes as sizes
from furlong.run.device_sizes import device_sizes, engine_advice, sized_for_device

GIB = 2**30
QWEN3_06B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def command(*more: str, model: str = "model", new: int = 256) -> Resolved:
    words = ["--hf-checkpoint", model, "--prompt-data", "x.jsonl", "--rm-type", "random", "--num-rollout", "3"]
    words += ["--rollout-batch-size", "64", "--n-samples-per-prompt", "8", "--rollout-max-response-len", str(new)]
    return parse([*words, *more])


def sizes_on(gib: float, *more: str, new: int = 256) -> dict[str, int]:
    found = device_sizes(command(*more, new=new).config, QWEN3_06B, int(gib * GIB))
    return {name: value for name, (value, _) in found.items()}


def test_sizes_grow_with_the_memory_and_never_fall_below_the_defaults():
    small, medium, large = sizes_on(12), sizes_on(56), sizes_on(140)
    assert small == {}
    assert 4096 < medium["max_tokens_per_gpu"] < large["max_tokens_per_gpu"] <= 32768
    assert 128 < medium["embedded_num_slots"] <= large["embedded_num_slots"] == 512


def test_slots_are_fewer_for_longer_responses():
    assert sizes_on(80, new=1024)["embedded_num_slots"] < sizes_on(80, new=256)["embedded_num_slots"]


def test_a_model_that_needs_recomputation_gets_moderate_micro_batches():
    wide = QWEN3_06B | {"hidden_size": 2048, "intermediate_size": 6144}
    tokens, reason = device_sizes(command().config, wide, 80 * GIB)["max_tokens_per_gpu"]
    assert tokens == sizes.RECOMPUTED_TOKENS
    assert "recomputed" in reason


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def mem_get_info() -> tuple[int, int]:
        return 80 * GIB, 80 * GIB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)


@pytest.mark.usefixtures("gpu")
def test_derived_sizes_are_in_the_configuration_with_their_reason_and_in_the_log(tmp_path):
    model = str(write_preset("tiny", tmp_path / "model", seed=0))
    resolved = sized_for_device(command(model=model))
    assert resolved.config.train.max_tokens_per_gpu == 32768
    assert resolved.config.cluster.embedded_num_slots == 512
    assert resolved.sources["embedded_num_slots"].startswith("derived: 80 GiB")
    assert any(line.startswith("--max-tokens-per-gpu 32768: ") for line in resolved.lines)


@pytest.mark.usefixtures("gpu")
def test_flags_take_precedence(tmp_path):
    model = str(write_preset("tiny", tmp_path / "model", seed=0))
    words = ("--embedded-num-slots", "64", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096")
    before = command(*words, model=model)
    after = sized_for_device(before)
    assert (after.config, after.sources) == (before.config, before.sources)


def test_the_faster_engine_depends_on_how_often_slots_are_filled_with_long_responses():
    many, few = (command("--embedded-num-slots", str(slots), new=1024).config for slots in (128, 512))
    assert "--engine sglang" in engine_advice(many)
    assert "--engine sglang" not in engine_advice(few)
    assert "--engine sglang" not in engine_advice(command("--embedded-num-slots", "128", new=64).config)


def test_nothing_changes_without_a_gpu_or_with_another_engine(monkeypatch: pytest.MonkeyPatch):
    resolved: Any = command()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sized_for_device(resolved) is resolved
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cluster = dataclasses.replace(resolved.config.cluster, engine="external")
    other = dataclasses.replace(resolved, config=dataclasses.replace(resolved.config, cluster=cluster))
    assert sized_for_device(other) is other
