"""Decode steps of the embedded engine on CUDA: Triton kernels, CUDA graphs, and weights written in place."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from torch.nn import functional

from fakes_engine import reference_log_probs, run, source_of, tiny_engine, tiny_model
from furlong.inference.embedded import decode_steps
from furlong.inference.embedded.decode_model import FusedDenseModel
from furlong.inference.embedded.decode_steps import CudaSteps, SlotCache, step_rows
from furlong.interfaces import SamplingParams

CUDA = torch.device("cuda")
FAMILIES = ("llama", "qwen2", "qwen3")
REASON = decode_steps.missing_for_graphs(CUDA) if torch.cuda.is_available() else "needs a CUDA device"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "-")]
PROMPTS = [[4 + i] * (1 + 20 * i) for i in range(4)]


def cuda_model(family: str, dtype: torch.dtype) -> FusedDenseModel:
    config, model = tiny_model(family)
    fused = FusedDenseModel(config, dtype=dtype, device=CUDA, max_length=512)
    for name, tensor in model.state_dict().items():
        if name in fused.table.views:
            fused.table.views[name].copy_(tensor)
    fused.table.num_writes += 1
    return fused


def logits_of(model: FusedDenseModel, *, steps: int = 3, cached: SlotCache | None = None) -> torch.Tensor:
    cache = cached or SlotCache()
    rows = step_rows(len(PROMPTS))
    if cached is None:
        cache.resize(rows, 256)
    out = [model.prefill(PROMPTS, cache, list(range(len(PROMPTS))), [0] * len(PROMPTS))]
    positions = np.zeros(rows, np.int64)
    positions[: len(PROMPTS)] = [len(p) for p in PROMPTS]
    for step in range(steps):
        tokens = torch.zeros(rows, dtype=torch.int64, device=CUDA)
        tokens[: len(PROMPTS)] = step + 7
        out.append(model.decode(tokens, positions, cache, 256)[: len(PROMPTS)].clone())
        positions[: len(PROMPTS)] += 1
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_graphs_equal_launched_kernels_bitwise_and_plain_operations_closely(family, dtype):
    graphed = logits_of(cuda_model(family, dtype))
    launched_model = cuda_model(family, dtype)
    launched_model._is_graphed = False
    plain_model = cuda_model(family, dtype)
    plain_model.captures_steps = plain_model._attends_packed = False
    assert torch.equal(graphed, logits_of(launched_model))
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(graphed, logits_of(plain_model), atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_captured_steps_read_weights_that_were_written_in_place_or_allocated_again():
    model, cache = cuda_model("qwen3", torch.float32), SlotCache()
    cache.resize(step_rows(len(PROMPTS)), 256)
    before = logits_of(model, cached=cache)
    steps = cache.prepared
    assert isinstance(steps, CudaSteps)
    for view in model.table.views.values():
        view.mul_(1.1)
    model.table.num_writes += 1
    other = cuda_model("qwen3", torch.float32)
    for name, view in other.table.views.items():
        view.copy_(model.table.views[name])
    other.table.num_writes += 1
    after = logits_of(model, cached=cache)
    assert cache.prepared is steps
    assert not torch.equal(before, after)
    assert torch.equal(after, logits_of(other))
    saved = {name: view.clone() for name, view in model.table.views.items()}
    model.table.release()
    model.table.restore()
    for name, view in model.table.views.items():
        view.copy_(saved[name])
    model.table.num_writes += 1
    assert torch.equal(after, logits_of(model, cached=cache))


@torch.inference_mode()
def test_a_slot_does_not_depend_on_its_neighbors_or_the_length_of_the_cache():
    torch.manual_seed(0)
    from furlong.inference.embedded import decode_kernels

    keys, values = (torch.randn(8, 2, 300, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    queries = torch.randn(8, 6, 64, device=CUDA, dtype=torch.bfloat16)
    positions = torch.tensor([0, 5, 63, 64, 127, 200, 255, 299], device=CUDA)
    out = torch.empty(8, 6 * 64, device=CUDA, dtype=torch.bfloat16)
    decode_kernels.attend(queries, keys, values, positions, 0.125, out)
    for slot, end in enumerate(positions.tolist()):
        own = torch.empty(1, 6 * 64, device=CUDA, dtype=torch.bfloat16)
        k, v = (t[slot : slot + 1, :, : end + 1].contiguous() for t in (keys, values))
        decode_kernels.attend(queries[slot : slot + 1], k, v, positions[slot : slot + 1], 0.125, own)
        assert torch.equal(own[0], out[slot])
        wanted = functional.scaled_dot_product_attention(
            queries[slot].float().view(1, 6, 1, 64), k.float(), v.float(), scale=0.125, enable_gqa=True
        )
        torch.testing.assert_close(own[0].float(), wanted.flatten(), atol=2e-2, rtol=2e-2)


def test_greedy_and_sampled_tokens_follow_the_weights_across_hold_abort_and_updates():
    config, model = tiny_model("llama")
    engine = tiny_engine(config, model.state_dict(), device="cuda", num_slots=6)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)

    async def body():
        first = await asyncio.gather(*[engine.generate(p, greedy) for p in PROMPTS])
        running = [asyncio.ensure_future(engine.generate(p, greedy, session="a")) for p in PROMPTS[:2]]
        await asyncio.sleep(0)
        await engine.pause("hold")
        held = engine.stats().tokens_generated
        await asyncio.sleep(0.05)
        assert engine.stats().tokens_generated == held
        await engine.resume()
        again = await asyncio.gather(*running)
        long = SamplingParams(max_new_tokens=60, ignore_eos=True)
        aborted = [asyncio.ensure_future(engine.generate(p, long, session="b")) for p in PROMPTS[:2]]
        await asyncio.sleep(0)
        await engine.abort(["b"])
        stopped = await asyncio.gather(*aborted)
        await engine.load_weights(source_of({n: 0.9 * t for n, t in model.state_dict().items()}), 1)
        return first, again, stopped, await engine.generate(PROMPTS[1], greedy)

    first, again, stopped, updated = run(engine, body)
    for prompt, completion in zip(PROMPTS, first, strict=True):
        wanted = reference_log_probs(model, prompt, completion.tokens)
        torch.testing.assert_close(torch.tensor(completion.log_probs), wanted, atol=2e-3, rtol=0)
    assert [c.tokens for c in again] == [c.tokens for c in first[:2]]
    assert all(c.finish_reason in ("abort", "length") for c in stopped)
    assert set(updated.versions) == {1}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    wanted = reference_log_probs(model, PROMPTS[1], updated.tokens)
    torch.testing.assert_close(torch.tensor(updated.log_probs), wanted, atol=2e-3, rtol=0)
