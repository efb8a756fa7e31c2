"""The embedded engine keeps the states of gated delta nets per slot, with prompts shared, slots moved and reused."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache

from fakes_engine import run, tiny_engine
from furlong.inference.embedded.transformers_model import _CacheAdapter
from furlong.interfaces import SamplingParams
from models_zoo import VOCAB, family_config

PROMPTS = [[(7 * i + 3 * j + 4) % VOCAB for j in range(length)] for i, length in enumerate((1, 2, 5, 30, 5, 33))]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_log_probs_of_concurrent_requests_are_those_of_the_models_own_forward_pass(family):
    config = family_config(family)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    engine = tiny_engine(config, model.state_dict(), num_slots=6, dtype=torch.float32)
    wanted = [  # two samples of each prompt, which end at different times; more requests than slots
        (PROMPTS[i % len(PROMPTS)], SamplingParams(max_new_tokens=1 + (5 * i) % 23, ignore_eos=True, sampling_seed=i))
        for i in range(2 * len(PROMPTS))
    ]

    async def body():
        return await asyncio.gather(*(engine.generate(*request) for request in [*wanted, *wanted[:3]]))

    completions = run(engine, body)
    for (prompt, _), done in zip([*wanted, *wanted[:3]], completions, strict=True):
        tokens = torch.tensor([[*prompt, *done.tokens]])
        with torch.no_grad():
            expected = model(tokens, use_cache=False).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        expected = expected.gather(1, tokens[0, len(prompt) :, None]).squeeze(1)
        assert done.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
    for first, again in zip(completions, completions[len(wanted) :], strict=False):
        assert first.tokens == again.tokens


def test_layers_may_pass_every_argument_of_transformers_cache_by_name():
    shared = [name for name in vars(_CacheAdapter) if not name.startswith("_") and callable(getattr(Cache, name, None))]
    assert {"has_previous_state", "update"} <= set(shared)
    for name in shared:
        theirs = inspect.signature(getattr(Cache, name)).parameters.values()
        by_name = {each.name: None for each in theirs if each.kind is each.POSITIONAL_OR_KEYWORD}
        inspect.signature(getattr(_CacheAdapter, name)).bind_partial(**by_name)
