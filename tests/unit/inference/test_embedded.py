from __future__ import annotations

import asyncio
import dataclasses
import threading

import pytest
import torch

from fakes_engine import FAMILIES, FUSED, Halt, reference_log_probs, run, source_of, tiny_engine, tiny_model
from furlong.core.weights import WeightSource, checksum
from furlong.errors import EngineError, SyncError
from furlong.inference.embedded import EmbeddedEngine
from furlong.interfaces import SamplingParams
from furlong.models.tokenizer import build_tokenizer

PROMPTS = [[(11 * i + 5 * j + 4) % 100 for j in range(2 + 5 * i)] for i in range(4)]
TOKENIZER = build_tokenizer()


def generate_all(engine, prompts, params):
    """Complete every prompt at once; `params` is one for all or one each."""
    each = params if isinstance(params, list) else [params] * len(prompts)

    async def body():
        return await asyncio.gather(*[engine.generate(p, s) for p, s in zip(prompts, each, strict=True)])

    return run(engine, body)


@pytest.fixture(scope="module")
def qwen():
    return tiny_model("qwen2")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers_generate(family):
    config, model = tiny_model(family)
    engine = tiny_engine(config, model.state_dict())
    assert engine.model.description.startswith("fused" if family in FUSED else "transformers")
    for prompt, done in zip(
        PROMPTS, generate_all(engine, PROMPTS, SamplingParams(max_new_tokens=24, temperature=0.0)), strict=True
    ):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )[0, len(prompt) :].tolist()
        assert done.tokens == expected
        assert done.finish_reason == ("stop" if expected[-1] == 3 else "length")


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_a_full_forward(family):
    config, model = tiny_model(family)
    engine = tiny_engine(config, model.state_dict(), num_slots=5)
    prompts = [p for p in PROMPTS for _ in range(3)]
    params = [
        SamplingParams(max_new_tokens=10 + 3 * i, temperature=0.7, top_p=0.9 if i % 2 else 1.0, ignore_eos=True)
        for i in range(len(prompts))
    ]
    for prompt, done in zip(prompts, generate_all(engine, prompts, params), strict=True):
        expected = reference_log_probs(model, prompt, done.tokens, 0.7)
        torch.testing.assert_close(torch.tensor(done.log_probs), expected, atol=1e-5, rtol=0)


def test_bfloat16_stays_near_float32(qwen):
    config, model = qwen
    engine = tiny_engine(config, model.state_dict(), dtype=torch.bfloat16)
    for prompt, done in zip(PROMPTS, generate_all(engine, PROMPTS, SamplingParams(max_new_tokens=20)), strict=True):
        expected = reference_log_probs(model, prompt, done.tokens)
        assert (torch.tensor(done.log_probs) - expected).abs().max() < 0.15


def test_waiting_requests_of_one_prompt_are_prefilled_once(qwen):
    config, model = qwen
    engine = tiny_engine(config, model.state_dict(), num_slots=3)
    prompts = [PROMPTS[2]] * 10 + [PROMPTS[1]]
    done = generate_all(engine, prompts, SamplingParams(max_new_tokens=7, ignore_eos=True))
    assert engine.stats().prefilled_tokens == len(PROMPTS[2]) + len(PROMPTS[1])
    assert sorted(c.cached_tokens for c in done) == [0, 0] + [len(PROMPTS[2])] * 9


def test_retraction_in_a_small_cache_changes_no_token(qwen):
    config, model = qwen
    params = [SamplingParams(max_new_tokens=120, ignore_eos=True, sampling_seed=i) for i in range(6)]
    prompts = [PROMPTS[i % 4] for i in range(6)]
    roomy = generate_all(tiny_engine(config, model.state_dict()), prompts, params)
    small = tiny_engine(config, model.state_dict(), kv_tokens=1)  # raised to what one full request needs
    tight = generate_all(small, prompts, params)
    assert [c.tokens for c in tight] == [c.tokens for c in roomy]


def test_stop_strings_end_a_response_and_trim_on_request(qwen):
    config, model = qwen
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, sampling_seed=3)
    engine = tiny_engine(config, model.state_dict(), tokenizer=TOKENIZER)
    free = generate_all(engine, [PROMPTS[1]], params)[0]
    stop = TOKENIZER.decode(free.tokens[20:23])
    assert len(stop) == 3
    for trim in (True, False):
        engine = tiny_engine(config, model.state_dict(), tokenizer=TOKENIZER)
        stopping = dataclasses.replace(params, stop=("never there", stop), no_stop_trim=not trim)
        done = generate_all(engine, [PROMPTS[1]], stopping)[0]
        end = free.text.index(stop)
        assert done.finish_reason == "stop"
        assert done.tokens == free.tokens[: len(done.tokens)]
        assert done.text == free.text[: end if trim else end + 3]


def test_stop_strings_without_a_tokenizer_are_rejected(qwen):
    config, model = qwen
    with pytest.raises(EngineError, match="need a tokenizer"):
        generate_all(tiny_engine(config, model.state_dict()), [[5]], SamplingParams(stop=("x",)))


def test_end_of_sequence_stops_unless_ignored_or_too_early(qwen):
    config, model = qwen
    changed = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changed["lm_head.weight"][3] = 0
    changed["lm_head.weight"] *= 0.05  # nearly uniform, so that token 3 comes within a few dozen tokens
    params = SamplingParams(max_new_tokens=180, sampling_seed=0, temperature=1.0)
    ended = generate_all(tiny_engine(config, changed), [[5]], params)[0]
    assert ended.finish_reason == "stop"
    assert ended.tokens.index(3) == len(ended.tokens) - 1
    early = len(ended.tokens)
    late = generate_all(tiny_engine(config, changed), [[5]], dataclasses.replace(params, min_new_tokens=early + 5))[0]
    assert 3 not in late.tokens[: early + 4]
    free = generate_all(tiny_engine(config, changed), [[5]], dataclasses.replace(params, ignore_eos=True))[0]
    assert free.tokens[:early] == ended.tokens
    assert len(free.tokens) == 180


def test_max_new_tokens_zero_returns_no_tokens(qwen):
    config, model = qwen
    done = generate_all(tiny_engine(config, model.state_dict()), [[5]], SamplingParams(max_new_tokens=0))[0]
    assert (done.tokens, done.finish_reason) == ([], "length")


def test_token_ids_outside_the_vocabulary_are_rejected(qwen):
    config, model = qwen
    with pytest.raises(EngineError, match="104"):
        generate_all(tiny_engine(config, model.state_dict()), [[5, 104]], SamplingParams())


def test_routed_experts_of_a_dense_model_are_an_error_naming_the_flag(qwen):
    config, model = qwen
    with pytest.raises(EngineError, match=r"qwen2 .*experts.*--no-log-routing-agreement"):
        tiny_engine(config, model.state_dict(), return_routed_experts=True)


def test_a_cancelled_caller_frees_its_slot(qwen):
    config, model = qwen
    engine = tiny_engine(config, model.state_dict(), num_slots=1)

    async def body():
        task = asyncio.create_task(engine.generate([5], SamplingParams(max_new_tokens=190, ignore_eos=True)))
        await asyncio.sleep(0.005)
        task.cancel()
        return await engine.generate([6], SamplingParams(max_new_tokens=2, ignore_eos=True))

    assert len(run(engine, body).tokens) == 2


def test_new_weights_recompute_the_cache_of_paused_requests(qwen, monkeypatch):
    config, model = qwen
    _, other = tiny_model("qwen2", seed=1)
    engine = tiny_engine(config, model.state_dict())
    params = SamplingParams(max_new_tokens=150, ignore_eos=True)

    async def body():
        halt = Halt(monkeypatch, after_steps=30)
        tasks = [asyncio.create_task(engine.generate(p, params)) for p in PROMPTS]
        await halt.reached()
        await engine.pause("hold")
        halt.release()
        await engine.load_weights(source_of(other.state_dict()), 4)
        await engine.resume()
        return await asyncio.gather(*tasks)

    for prompt, done in zip(PROMPTS, run(engine, body), strict=True):
        old = done.versions.count(0)
        assert 0 < old < 150
        assert done.versions == [0] * old + [4] * (150 - old)
        with_old, with_new = (reference_log_probs(m, prompt, done.tokens) for m in (model, other))
        torch.testing.assert_close(torch.tensor(done.log_probs[:old]), with_old[:old], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(done.log_probs[old:]), with_new[old:], atol=1e-5, rtol=0)


def test_checksums_are_of_the_tensors_in_the_engines_dtype(qwen):
    config, model = qwen
    engine = tiny_engine(config, model.state_dict(), dtype=torch.bfloat16)
    state = model.state_dict()
    sums = run(engine, lambda: engine.load_weights(source_of(state), 1))
    assert sums == {name: checksum(engine.model.table.as_stored(name, tensor)) for name, tensor in state.items()}
    name = "model.layers.0.self_attn.k_proj.weight"
    assert sums[name] == checksum(state[name].bfloat16()) != checksum(state[name])


def test_a_request_during_a_weight_load_waits(qwen):
    config, model = qwen
    engine = tiny_engine(config, model.state_dict())
    begun, asked = threading.Event(), threading.Event()

    def tensors():
        begun.set()
        assert asked.wait(5)
        yield from model.state_dict().items()

    async def body():
        await engine.pause("hold")
        load = asyncio.create_task(engine.load_weights(WeightSource(tensors), 3))
        await asyncio.to_thread(begun.wait, 5)
        request = asyncio.create_task(engine.generate([5], SamplingParams(max_new_tokens=1)))
        await asyncio.sleep(0)
        asked.set()
        await load
        await engine.resume()
        return await request

    assert run(engine, body).versions == [3]


def test_after_a_failed_load_the_engine_rejects_requests_until_one_succeeds(qwen, monkeypatch):
    config, model = qwen
    state = model.state_dict()
    engine = tiny_engine(config, state)

    async def body():
        halt = Halt(monkeypatch, after_steps=3)
        waiting = asyncio.create_task(engine.generate([5], SamplingParams(max_new_tokens=190, ignore_eos=True)))
        await halt.reached()
        with pytest.raises(SyncError, match=r"model\.norm\.weight"):
            await engine.load_weights(WeightSource(lambda: [("model.norm.weight", torch.zeros(3))]), 1)
        halt.release()
        with pytest.raises(EngineError):
            await asyncio.wait_for(waiting, 5)
        with pytest.raises(EngineError, match="incomplete"):
            await engine.generate([5], SamplingParams(max_new_tokens=1))
        await engine.load_weights(source_of(state), 2)
        return await engine.generate([5], SamplingParams(max_new_tokens=1, ignore_eos=True))

    assert run(engine, body).versions == [2]


def test_experts_load_one_by_one_under_checkpoint_names():
    config, model = tiny_model("qwen3_moe")
    state = dict(model.state_dict())
    for name in [n for n in state if n.endswith((".gate_up_proj", ".down_proj"))]:
        fused = state.pop(name)
        prefix, last = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert, weight in enumerate(fused):
            for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                state[f"{prefix}.{expert}.{part}.weight"] = piece
    engine = tiny_engine(config, {n: torch.zeros_like(t) for n, t in model.state_dict().items()})

    async def body():
        sums = await engine.load_weights(source_of(state), 1)
        assert sums == {name: checksum(tensor) for name, tensor in state.items()}
        return await engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=5, ignore_eos=True))

    done = run(engine, body)
    expected = reference_log_probs(model, PROMPTS[1], done.tokens)
    torch.testing.assert_close(torch.tensor(done.log_probs), expected, atol=1e-5, rtol=0)


def test_nan_weights_fail_every_request_and_the_engine_recovers(qwen):
    config, model = qwen
    bad = {
        n: torch.full_like(t, float("nan")) if n == "model.norm.weight" else t for n, t in model.state_dict().items()
    }
    engine = tiny_engine(config, bad)

    async def body():
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        results = await asyncio.gather(*[engine.generate(p, params) for p in PROMPTS], return_exceptions=True)
        await engine.load_weights(source_of(model.state_dict()), 1)
        return results, await engine.generate(PROMPTS[0], params)

    results, after = run(engine, body)
    assert all(isinstance(r, EngineError) and "not finite" in str(r) for r in results)
    assert len(after.tokens) == 4


@pytest.mark.parametrize("part", ["prefill", "decode"])
def test_a_failing_step_fails_every_request_and_the_engine_recovers(part, qwen, monkeypatch):
    config, model = qwen
    engine = tiny_engine(config, model.state_dict(), num_slots=2)  # the others wait

    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    async def body():
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, part, fails)
            asked = (engine.generate(p, SamplingParams(max_new_tokens=4, ignore_eos=True)) for p in PROMPTS)
            answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
        return answers, await engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=4, ignore_eos=True))

    answers, after = run(engine, body)
    assert [type(answer) for answer in answers] == [EngineError] * len(PROMPTS)
    assert all("no memory" in str(answer) for answer in answers)
    assert len(after.tokens) == 4


def test_a_folder_gives_the_same_engine_as_its_state_dict(qwen, tmp_path):
    config, model = qwen
    model.save_pretrained(tmp_path)
    params = SamplingParams(max_new_tokens=12, sampling_seed=5)
    from_folder = EmbeddedEngine(tmp_path, dtype=torch.float32, num_slots=4)
    assert from_folder.eos_ids == (3,)
    done = generate_all(from_folder, PROMPTS, params)
    same = generate_all(tiny_engine(config, model.state_dict(), num_slots=4), PROMPTS, params)
    assert [(c.tokens, c.log_probs) for c in done] == [(c.tokens, c.log_probs) for c in same]


def test_models_with_recurrent_layers_are_rejected():
    from transformers import AutoConfig

    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    config = AutoConfig.for_model("lfm2", layer_types=["conv", "full_attention"], num_hidden_layers=2, **shape)
    with pytest.raises(EngineError, match="conv"):
        EmbeddedEngine(config=config, state_dict={}, dtype=torch.float32)


@pytest.mark.parametrize("context_len", [1, 500])
def test_a_context_length_beyond_the_model_is_rejected(qwen, context_len):
    config, model = qwen
    with pytest.raises(EngineError, match=f"{context_len}.*192"):
        tiny_engine(config, model.state_dict(), context_len=context_len)
