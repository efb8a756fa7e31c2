"""The embedded engine on a CUDA device."""

from __future__ import annotations

import asyncio

import pytest
import torch

from fakes_engine import FAMILIES, reference_log_probs, run, source_of, tiny_engine, tiny_model
from furlong.interfaces import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[(11 * i + 5 * j + 4) % 100 for j in range(2 + 5 * i)] for i in range(4)]
KINDS = [SamplingParams(ignore_eos=True), SamplingParams(top_p=0.8, ignore_eos=True), SamplingParams(temperature=0.0)]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_on_cuda_equal_a_full_forward_on_cpu(family):
    config, model = tiny_model(family)
    engine = tiny_engine(config, model.state_dict(), device="cuda", num_slots=5)

    async def body():
        first = await asyncio.gather(*[engine.generate(p, k) for p in PROMPTS for k in KINDS])
        await engine.load_weights(source_of(model.state_dict()), 1)
        return first

    done = iter(run(engine, body))
    for prompt in PROMPTS:
        for _ in KINDS:
            completion = next(done)
            wanted = reference_log_probs(model, prompt, completion.tokens)
            torch.testing.assert_close(torch.tensor(completion.log_probs), wanted, atol=2e-3, rtol=0)
