"""FLOPs by formula equal counted FLOPs, for every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from furlong.models.flops import forward_flops
from models_zoo import FAMILIES, family_config


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
    found = forward_flops(model)
    in_windows = sum(each for _, each in found.windows)
    assert found.per_pair + in_windows == pytest.approx(pairs / 2)
    assert found.per_token == pytest.approx(counted[8] / 8 - 8 * pairs)


def test_tokens_outside_of_a_window_cost_nothing():
    found = forward_flops(AutoModelForCausalLM.from_config(family_config("gpt_oss")))
    ((window, each),) = found.windows
    assert window == 6
    lengths = np.array([4, 6, 10, 1000])
    seen = [length**2 if length <= window else 2 * window * length - window**2 for length in lengths.tolist()]
    rest = found.per_token * lengths + found.per_pair * lengths.astype(float) ** 2
    assert found.cost(lengths).tolist() == pytest.approx(rest + each * np.array(seen))
