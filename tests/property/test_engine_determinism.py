"""A seeded completion is bitwise reproducible, whatever other requests the engine runs."""

from __future__ import annotations

import asyncio
import random
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes_engine import run, tiny_engine, tiny_model
from furlong.inference.embedded import request as request_module
from furlong.interfaces import SamplingParams

KINDS = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.0},
    {"top_k": 7},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.05},
]
PROMPTS = [[(7 * i + 3 * j + 4) % 104 for j in range(length)] for i, length in enumerate((1, 2, 5, 30, 31, 33, 70))]
FAMILIES = {
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 4},  # one query head per group
    "llama": {"num_key_value_heads": 1},
}
# Heads of width 32: PyTorch uses another kernel for bfloat16 matmuls below 16 * 16 * 16 multiply-adds.
MODELS = {family: tiny_model(family, head_dim=32, **changes) for family, changes in FAMILIES.items()}


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Return twenty requests: samples of one prompt, all kinds of sampling, many lengths."""
    made = []
    for i in range(20):
        params = SamplingParams(
            max_new_tokens=1 + (13 * i) % 30, ignore_eos=i % 3 != 0, sampling_seed=i % 11, **KINDS[i % len(KINDS)]
        )
        made.append((PROMPTS[i % len(PROMPTS)], params))
    return made


def play(family: str, dtype: torch.dtype, *, num_slots: int, order: list[int], delays: list[int], hold: bool):
    """Run `requests()` in the given order, some after a delay, and return tokens and log-probs by request."""
    config, model = MODELS[family]
    engine = tiny_engine(config, model.state_dict(), num_slots=num_slots, dtype=dtype)
    wanted = requests()

    async def one(i: int):
        for _ in range(delays[i]):
            await asyncio.sleep(0.0005)
        done = await engine.generate(*wanted[i])
        return i, (done.tokens, done.log_probs)

    async def body():
        tasks = [asyncio.create_task(one(i)) for i in order]
        if hold:
            await asyncio.sleep(0.003)
            await engine.pause("hold")
            await asyncio.sleep(0.001)
            await engine.resume()
        return dict(await asyncio.gather(*tasks))

    return run(engine, body)


@pytest.fixture(scope="module")
def alone():
    """Run each request alone in an engine with one slot."""
    cache: dict = {}

    def get(family: str, dtype: torch.dtype):
        if (family, dtype) not in cache:
            order = list(range(20))
            cache[family, dtype] = play(family, dtype, num_slots=1, order=order, delays=[0] * 20, hold=False)
        return cache[family, dtype]

    return get


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_slots=st.sampled_from([2, 3, 5, 8, 20]),
    hold=st.booleans(),
    buffer_rows=st.sampled_from([2, 9, 256]),
)
def test_completions_are_bitwise_equal_under_any_arrival(alone, family, dtype, seed, num_slots, hold, buffer_rows):
    rng = random.Random(seed)
    order = list(range(20))
    rng.shuffle(order)
    delays = [rng.choice([0, 0, 0, 1, 3, 8]) for _ in range(20)]
    want = alone(family, dtype)
    with mock.patch.object(request_module, "ROWS", buffer_rows):
        assert play(family, dtype, num_slots=num_slots, order=order, delays=delays, hold=hold) == want
