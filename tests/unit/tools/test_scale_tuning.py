"""Scales of INT4 weights that are tuned together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from furlong.models.hf_config import load_config
from furlong.models.hf_model import load_network
from furlong.models.tokenizer import load_tokenizer
from furlong.quickstart.quickstart import model_folder
from furlong.tools import calibration

SUMS = " ".join(f"{a} + {b} = {a + b}" for a in range(40) for b in range(1, 40, 3))
GROUP = 32


@pytest.mark.slow
def test_tuned_scales_bring_a_model_closer_to_its_unquantized_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BATCH_TOKENS", 64)
    folder = model_folder()
    model = load_network(folder, load_config(folder), dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor(load_tokenizer(folder).encode(SUMS)[: 40 * 64]).view(40, 64)
    with torch.no_grad():
        targets = [model.base_model(input_ids=each[None], use_cache=False).last_hidden_state[0] for each in ids]
        linears = [each for each in model.base_model.modules() if isinstance(each, nn.Linear)]
        for each in linears:
            each.weight.mul_(1.04)

    def divergence() -> float:
        with torch.no_grad():
            return float(calibration._divergence(model, ids[0], targets[0]))

    before = divergence()
    scales = {each: torch.ones(each.out_features, each.in_features // GROUP, dtype=torch.bfloat16) for each in linears}
    tuned = calibration.tuned_scales(model, scales, ids, targets)
    assert divergence() < before / 2
    assert tuned.keys() == scales.keys()
    assert all(tuned[each].dtype == torch.bfloat16 and tuned[each].shape == scales[each].shape for each in linears)
    assert sum(float(scale.float().mean()) for scale in tuned.values()) / len(tuned) < 1
