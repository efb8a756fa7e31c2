"""Experts that trainer and engine choose differently, in real runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig

from diagnosed_runs import run
from faults_marker import fault
from furlong.models import hf_model as hf
from furlong.models.hf_config import load_config
from furlong.quickstart.quickstart import model_folder
from furlong.training.fsdp.backend import FsdpBackend
from runs import rows

OF_ROUTING = {"NUM02", "NUM05"}  # an untrained model has other faults
SETTINGS = {"num_rollout": 2, "rollout_batch_size": 4, "rollout_max_response_len": 8}


@pytest.fixture
def mixture(tmp_path) -> Path:
    """A mixture of experts with the quickstart's vocabulary and confident routers."""
    folder = tmp_path / "mixture"
    folder.mkdir()
    dense = load_config(model_folder())
    config = Qwen3MoeConfig(
        vocab_size=dense.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
        max_position_embeddings=dense.max_position_embeddings, eos_token_id=dense.eos_token_id,
        bos_token_id=dense.bos_token_id, pad_token_id=dense.pad_token_id, norm_topk_prob=True,
    )  # fmt: skip
    model = hf.build_model(config, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "experts" in name:
                parameter.mul_(20)
    hf.save_model(model, folder)
    for path in model_folder().iterdir():
        if path.name not in ("config.json",) and path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    return folder


@pytest.fixture
def trainer_without_routers(monkeypatch):
    """The trainer computes with zeroed routers, but exports the original weights."""
    build, hand_out = FsdpBackend.__init__, FsdpBackend.named_weights

    def broken(self, *settings, **options):
        build(self, *settings, **options)
        self.whole = {}
        for name, parameter in self.actor.model.named_parameters():
            if "gate.weight" in name:
                self.whole[name] = parameter.detach().clone()
                parameter.data.zero_()

    def handed_out(self, **of):
        return ((name, self.whole.get(name, tensor)) for name, tensor in hand_out(self, **of))

    monkeypatch.setattr(FsdpBackend, "__init__", broken)
    monkeypatch.setattr(FsdpBackend, "named_weights", handed_out)


@fault("NUM05")
@pytest.mark.usefixtures("trainer_without_routers")
def test_routers_that_are_zero_in_the_trainer_only(mixture, tmp_path):
    code, found = run(tmp_path / "run", hf_checkpoint=mixture, **SETTINGS)
    assert code == 0
    event, first = found["NUM05"], rows(tmp_path / "run")[0]
    assert event["evidence"]["agreement"] == first["train/routing_agreement"] < 0.6
    assert "--use-rollout-routing-replay" in event["remedy"]
    shares = {name: value for name, value in first.items() if name.startswith("selftest/share/")}
    assert max(shares, key=shares.get) == "selftest/share/routing"


def test_healthy_routers_agree_and_are_not_reported(mixture, tmp_path):
    code, found = run(tmp_path / "run", hf_checkpoint=mixture, **SETTINGS | {"num_rollout": 1})
    assert (code, OF_ROUTING & found.keys()) == (0, set())
    assert rows(tmp_path / "run")[0]["train/routing_agreement"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "flags", [("--use-rollout-routing-replay",), ("--use-routing-replay", "--no-log-routing-agreement")]
)
def test_a_run_that_replays_is_healthy(flags, mixture, tmp_path):
    settings = SETTINGS | {"num_rollout": 1, "num_steps_per_rollout": 2}
    code, found = run(tmp_path / "run", *flags, hf_checkpoint=mixture, **settings)
    assert (code, OF_ROUTING & found.keys()) == (0, set())
    (row,) = rows(tmp_path / "run")
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert "perf/log_probs_time" in row
    assert ("train/routing_agreement" in row) == (len(flags) == 1)
