"""Turns of a session continue from the KV cache of the prompt before, with the same bits as without it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fakes_engine import FAMILIES, run, source_of, tiny_engine, tiny_model
from furlong.inference.embedded.decode_steps import SlotCache
from furlong.inference.embedded.slot_batch import PrefixCache
from furlong.interfaces import Completion, SamplingParams

PARAMS = SamplingParams(max_new_tokens=2, ignore_eos=True)
DENSE = [family for family in FAMILIES if "moe" not in family and family != "gpt_oss"]


async def episode(
    engine: Any, number: int, turns: int, *, key: str | None = None, observed: int = 8, params: SamplingParams = PARAMS
) -> list[Completion]:
    """Answers of turns that each append the answer and `observed` tokens to the prompt."""
    rng = random.Random(number)
    prompt = [rng.randrange(4, 100) for _ in range(5 + number)]
    answers: list[Completion] = []
    for turn in range(turns):
        seeded = dataclasses.replace(params, sampling_seed=1000 * number + turn, prefix_key=key)
        answer = await engine.generate(prompt, seeded)
        prompt = [*prompt, *answer.tokens, *(rng.randrange(4, 100) for _ in range(observed))]
        answers.append(answer)
    return answers


def compared(engine_of: Callable[..., Any], turns: int = 12, count: int = 3, **options: Any) -> tuple[list[Any], Any]:
    """Answers of concurrent episodes with the cache; asserts that those without it are the same, bit by bit."""
    results: list[list[list[Completion]]] = []
    for keyed in (True, False):
        engine = engine_of()

        async def body(engine: Any = engine, keyed: bool = keyed) -> list[list[Completion]]:
            return await asyncio.gather(
                *(episode(engine, i, turns, key=f"sample {i}" if keyed else None, **options) for i in range(count))
            )

        results.append(run(engine, body))
        if keyed:
            stats = engine.stats()
    for with_cache, without in zip(*results, strict=True):
        assert [answer.tokens for answer in with_cache] == [answer.tokens for answer in without]
        assert [answer.log_probs for answer in with_cache] == [answer.log_probs for answer in without]
    return results[0], stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", DENSE)
def test_log_probs_are_bitwise_those_without_the_cache(family, dtype):
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AMX":
        pytest.skip("oneDNN's bfloat16 sums depend on the number of rows")
    config, model = tiny_model(family)
    state = dict(model.state_dict())
    answers, _ = compared(lambda: tiny_engine(config, state, dtype=dtype))
    for number, turns in enumerate(answers):
        prompt = 5 + number
        for turn, answer in enumerate(turns):
            expected = 0 if turn == 0 else prompt + 10 * (turn - 1)
            assert answer.cached_tokens == expected


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_continue_from_the_cache_up_to_rounding(family):
    config, model = tiny_model(family)
    state = dict(model.state_dict())
    results: list[list[Completion]] = []
    for key in ("a", None):
        engine = tiny_engine(config, state, return_routed_experts=True)
        params = dataclasses.replace(PARAMS, temperature=0.0, return_routed_experts=True)
        turns = functools.partial(episode, engine, 1, 8, key=key, params=params)
        results.append(run(engine, turns))
    for with_cache, without in zip(*results, strict=True):
        assert with_cache.tokens == without.tokens
        np.testing.assert_allclose(with_cache.log_probs, without.log_probs, atol=1e-5)
        assert np.array_equal(with_cache.routed_experts, without.routed_experts)
    assert results[0][-1].cached_tokens > 60


def test_models_with_recurrent_states_compute_whole_prompts():
    config, model = tiny_model("qwen2")
    engine = tiny_engine(config, dict(model.state_dict()))
    engine.model.extends_prefixes = False
    engine._batch.kept_prompts = PrefixCache(0)
    answers = run(engine, lambda: episode(engine, 1, 4, key="a"))
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.nightly
def test_log_probs_are_bitwise_equal_with_two_threads_and_long_prompts(dtype):
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AMX":
        pytest.skip("oneDNN's bfloat16 sums depend on the number of rows")
    config, model = tiny_model("qwen3", max_position_embeddings=800, head_dim=16, num_attention_heads=6)
    state = dict(model.state_dict())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compared(lambda: tiny_engine(config, state, dtype=dtype), turns=35, observed=17)
    finally:
        torch.set_num_threads(before)


def test_branches_keep_the_longest_common_prefix():
    config, model = tiny_model("qwen3")
    state = dict(model.state_dict())
    prompts = [list(range(10, 60)), [*range(10, 40), 90, 91, 92], list(range(10, 60)), [7, 8, 9]]
    answers: list[list[Completion]] = []
    for key in ("a", None):
        engine = tiny_engine(config, state)

        async def body(engine=engine, key=key):
            params = dataclasses.replace(PARAMS, sampling_seed=3, prefix_key=key)
            return [await engine.generate(prompt, params) for prompt in prompts]

        answers.append(run(engine, body))
    assert [each.log_probs for each in answers[0]] == [each.log_probs for each in answers[1]]
    assert [each.cached_tokens for each in answers[0]] == [0, 30, 49, 0]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_weight_load_drops_the_cache_unless_it_is_kept(keeps):
    config, model = tiny_model("qwen2")
    other = dict(tiny_model("qwen2", seed=1)[1].state_dict())
    engine = tiny_engine(config, dict(model.state_dict()), kv_policy="keep" if keeps else "recompute")
    fresh = tiny_engine(config, other)
    prompt = list(range(5, 45))
    params = dataclasses.replace(PARAMS, sampling_seed=1, prefix_key="a")

    async def body():
        await engine.generate(prompt, params)
        await engine.load_weights(source_of(other), 1)
        return await engine.generate([*prompt, 50, 51], params)

    answer = run(engine, body)
    right = run(fresh, lambda: fresh.generate([*prompt, 50, 51], params))
    assert answer.cached_tokens == (40 if keeps else 0)
    assert (answer.log_probs == right.log_probs) is not keeps


def test_the_least_recently_used_sessions_are_dropped_beyond_the_budget():
    cache = SlotCache()
    cache.resize(4, 64)
    cache.layer(0, torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4))
    prefixes = PrefixCache(100)
    for number in range(3):
        prefixes.store(str(number), [number] * 40, cache, 0, None)
    assert len(prefixes) == 2
    assert [prefixes.match(str(i), [i] * 50) for i in range(3)] == [0, 40, 40]
    prefixes.match("1", [1] * 50)  # used again
    prefixes.store("3", [3] * 40, cache, 0, None)
    assert [prefixes.match(str(i), [i] * 50) for i in range(4)] == [0, 40, 0, 40]
    prefixes.store("1", [1] * 60, cache, 0, None)  # its memory grows
    assert prefixes.num_tokens <= 100
    assert prefixes.match("1", [1] * 60) == 59  # the last token is computed, for its logits
    prefixes.store("1", [1] * 101, cache, 0, None)
    assert prefixes.match("1", [1] * 60) == 0
    prefixes.clear()
    assert (len(prefixes), prefixes.num_tokens) == (0, 0)


def test_the_cache_is_released_with_the_memory_of_the_engine_and_by_a_flush():
    config, model = tiny_model("qwen2")
    engine = tiny_engine(config, dict(model.state_dict()))

    async def body():
        sessions = engine._batch.kept_prompts
        sizes: list[int] = []
        for drop in (engine.forget_prefixes, lambda: engine.release_memory(weights=False, cache=True)):
            await episode(engine, 1, 2, key="a")
            sizes.append(len(sessions))
            await drop()
            sizes.append(sessions.num_tokens)
        return sizes

    assert run(engine, body) == [1, 0, 1, 0]
