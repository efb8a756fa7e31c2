"""Contract of every Engine implementation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fakes_engine import FakeEngine, run, source_of, tiny_engine, tiny_model
from furlong.core.token_stream import TokenStream
from furlong.core.weights import checksum
from furlong.errors import EngineError, SyncError
from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.embedded.slot_batch import SlotBatch
from furlong.interfaces import Engine, SamplingParams
from served_engine import ServedEngine

CONFIG, MODEL = tiny_model("qwen2")
STATE = {name: tensor.clone() for name, tensor in MODEL.state_dict().items()}
LONG = SamplingParams(max_new_tokens=150, ignore_eos=True, sampling_seed=1)


def embedded() -> Engine:
    return tiny_engine(CONFIG, STATE)


def fake() -> Engine:
    return FakeEngine(weights={name: tensor.shape for name, tensor in STATE.items()})


def http() -> Engine:
    return ServedEngine(CONFIG, STATE)


@pytest.fixture(params=[embedded, fake, http], ids=lambda f: f.__name__)
def build(request: Any) -> Callable[[], Engine]:
    return request.param


@pytest.fixture(autouse=True)
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow decode steps down to 2 ms, so that requests are still running when a test acts on them."""
    step = SlotBatch.run

    def run(batch: SlotBatch, *, admit: bool, interrupted: Callable[[], bool]) -> None:
        del interrupted
        step(batch, admit=admit, interrupted=lambda: True)
        time.sleep(0.002)

    monkeypatch.setattr(SlotBatch, "run", run)


async def started(engine: Engine, count: int = 3, *, session: str | None = None) -> list[asyncio.Task[Any]]:
    """Start `count` requests, and wait until an embedded engine runs them all."""
    tasks = [asyncio.create_task(engine.generate([5, 6, 7 + i], LONG, session=session)) for i in range(count)]
    inner = getattr(engine, "embedded", engine)
    while isinstance(inner, EmbeddedEngine) and inner.stats().running < count:  # its thread admits them asynchronously
        assert not any(task.done() for task in tasks)
        await asyncio.sleep(0.001)
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


def test_every_token_has_a_log_prob_and_a_version(build):
    engine = build()
    done = run(engine, lambda: engine.generate([5, 6], SamplingParams(max_new_tokens=9, ignore_eos=True)))
    assert len(done.tokens) == len(done.log_probs) == len(done.versions) == 9
    assert done.finish_reason == "length"
    assert set(done.versions) == {0}


def test_generation_ends_at_the_context_length(build):
    engine = build()
    done = run(engine, lambda: engine.generate(list(range(5, 95)) * 2, LONG))
    assert len(done.tokens) == 192 - 180
    assert done.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([5] * 192, SamplingParams(), "192"),
        ([], SamplingParams(), "0 tokens|empty"),
        ([5], SamplingParams(temperature=-1.0), "-1.0"),
        ([5], SamplingParams(max_new_tokens=-2), "-2"),
    ],
)
def test_invalid_requests_raise_with_the_values(build, prompt, params, words):
    engine = build()
    with pytest.raises(EngineError, match=words):
        run(engine, lambda: engine.generate(prompt, params))


def test_a_stop_token_ends_the_response_and_is_part_of_it(build):
    engine = build()

    async def body():
        free = await engine.generate([5, 6], LONG)
        stop = free.tokens[4]
        params = SamplingParams(max_new_tokens=150, ignore_eos=True, sampling_seed=1, stop_token_ids=(stop,))
        return free, await engine.generate([5, 6], params)

    free, stopped = run(engine, body)
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[4]) + 1]


def test_aborting_a_session_ends_only_its_requests_with_their_tokens(build):
    engine = build()

    async def body():
        mine, other = await started(engine, session="a"), await started(engine, 1, session="b")
        await engine.abort(["a"])
        return await asyncio.gather(*mine), await asyncio.gather(*other)

    mine, other = run(engine, body)
    assert all(c.finish_reason == "abort" and len(c.tokens) == len(c.log_probs) < 150 for c in mine)
    assert [c.finish_reason for c in other] == ["length"]


def test_a_stream_has_the_tokens_of_the_completion_before_it_ends(build):
    engine = build()

    async def body():
        seen: list[int] = []
        stream = TokenStream(lambda: seen.append(len(stream.tokens)))
        task = asyncio.create_task(engine.stream([5, 6, 7], LONG, stream))
        alone = await engine.generate([5, 6, 7], LONG)
        return seen, stream, await task, alone

    seen, stream, done, alone = run(engine, body)
    assert done.tokens == alone.tokens == stream.tokens
    assert done.log_probs == stream.log_probs == pytest.approx(alone.log_probs, abs=1e-5)
    assert seen == sorted(set(seen))
    if not isinstance(engine, FakeEngine):
        assert seen[0] <= 75


def test_a_stopped_stream_returns_the_tokens_it_has(build):
    engine = build()

    async def body():
        stream = TokenStream(lambda: stream.stop())
        late = TokenStream()
        late.stop()
        done = await asyncio.gather(engine.stream([5, 6, 7], LONG, stream), engine.stream([5, 6, 7], LONG, late))
        return stream, *done, await engine.generate([5, 6, 7], LONG)

    stream, done, none, whole = run(engine, body)
    assert done.tokens == stream.tokens == whole.tokens[: len(done.tokens)]
    assert len(whole.tokens) == 150
    if not isinstance(engine, FakeEngine):
        assert (done.finish_reason, none.finish_reason) == ("abort", "abort")
        assert len(none.tokens) <= len(done.tokens) < 150


def test_pause_abort_ends_running_requests(build):
    engine = build()

    async def body():
        tasks = await started(engine)
        await engine.pause("abort")
        done = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        await engine.resume()
        return done, await engine.generate([5], SamplingParams(max_new_tokens=2, ignore_eos=True))

    done, after = run(engine, body)
    assert {c.finish_reason for c in done} == {"abort"}
    assert len(after.tokens) == 2


def test_pause_finish_lets_running_requests_finish(build):
    engine = build()

    async def body():
        tasks = await started(engine)
        await engine.pause("finish")
        await asyncio.wait_for(asyncio.gather(*tasks), 60)  # running requests finish while paused
        late = asyncio.create_task(engine.generate([5], SamplingParams(max_new_tokens=2, ignore_eos=True)))
        await asyncio.sleep(0.005)
        assert not late.done()
        await engine.resume()
        return [task.result() for task in tasks], await late

    done, late = run(engine, body)
    assert [len(c.tokens) for c in done] == [150] * 3
    assert len(late.tokens) == 2


def test_held_requests_continue_with_the_weights_loaded_meanwhile(build):
    engine = build()

    async def body():
        tasks = await started(engine)
        await engine.pause("hold")
        await asyncio.sleep(0.005)
        assert not any(task.done() for task in tasks)
        await engine.load_weights(source_of(STATE), 7)
        await engine.resume()
        return await asyncio.gather(*tasks)

    for done in run(engine, body):
        assert len(done.tokens) == 150
        assert done.versions == sorted(done.versions)
        assert done.versions[-1] == 7
        assert set(done.versions) <= {0, 7}


def test_load_weights_returns_the_checksum_of_every_tensor(build):
    engine = build()
    sums = run(engine, lambda: engine.load_weights(source_of(STATE), 1))
    assert sums == {name: checksum(tensor) for name, tensor in STATE.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("model.layers.1.mlp.up_proj.weight"),
        lambda s: s.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}),
        lambda s: s.update({"model.norm.weight": torch.zeros(5)}),
    ],
    ids=["missing", "unexpected", "misshaped"],
)
def test_wrong_weights_are_rejected_by_name(build, change):
    engine = build()
    state = dict(STATE)
    change(state)
    names = "model.norm.weight|mlp.up_proj.weight"
    with pytest.raises(SyncError, match=names):
        run(engine, lambda: engine.load_weights(source_of(state), 1))


def test_close_ends_running_requests_with_an_error(build):
    engine = build()

    async def body():
        tasks = await started(engine)
        await engine.pause("hold")
        await engine.close()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)

    assert all(isinstance(result, EngineError) for result in asyncio.run(body()))
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(engine.generate([5], LONG))
