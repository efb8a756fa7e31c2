"""Which of many requests is sent next: properties of `Turns`, without a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.inference.sglang import request_queue as turns
from furlong.inference.sglang.request_queue import AT_A_TIME, Turns

LED = -1  # in an order: a prompt is computed for the request after it


def order_of(prompts: Sequence[int], *, num_tokens: int = 1000, may_lead: bool = False) -> list[int]:
    """The order in which requests with these prompts, asked at once, are sent; each takes two turns of the loop."""
    sent: list[int] = []

    async def ask(queue: Turns, number: int, prompt: int, answered: asyncio.Event) -> None:
        async with queue.turn(prompt, num_tokens, may_lead=may_lead) as turn:
            if turn.leads:
                sent.append(LED)
                turn.pass_on()
                for _ in range(20):
                    await asyncio.sleep(0)
                turn.let_follow()
            sent.append(number)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            turn.pass_on()
            await answered.wait()

    async def body() -> None:
        queue, answered = Turns(), asyncio.Event()
        tasks = [asyncio.create_task(ask(queue, i, prompt, answered)) for i, prompt in enumerate(prompts)]
        while len(sent) - sent.count(LED) < len(prompts):
            await asyncio.sleep(0)
        answered.set()
        await asyncio.gather(*tasks)
        assert queue._num_free == AT_A_TIME
        assert not queue._prompts
        assert not queue._following

    asyncio.run(asyncio.wait_for(body(), 20))
    return sent


def test_one_request_of_each_prompt_is_sent_before_the_others():
    assert order_of([0, 0, 0, 1, 1, 1, 2, 2, 2]) == [0, 3, 6, 1, 2, 4, 5, 7, 8]


def test_a_block_is_as_many_prompts_as_fill_a_prefill(monkeypatch):
    monkeypatch.setattr(turns, "BLOCK_TOKENS", 2000)
    assert order_of([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]) == [0, 2, 4, 6, 1, 8, 3, 5, 7, 9]


def test_where_nothing_comes_between_the_first_leads_and_the_others_follow():
    assert order_of([0, 0, 0, 0], may_lead=True) == [LED, 0, 1, 2, 3]
    assert order_of([0, 0, 0, 1, 2, 2, 2], num_tokens=1100, may_lead=True) == [LED, 3, LED, 0, 4, 1, 2, 5, 6]
    assert order_of([0, 0, 0, 0], num_tokens=600, may_lead=True) == [0, 1, 2, 3]  # 1,800 tokens are not worth it


def test_full_blocks_are_not_led(monkeypatch):
    monkeypatch.setattr(turns, "BLOCK_TOKENS", 2200)
    assert order_of([0, 0, 0, 1, 1, 1, 2, 2, 2], num_tokens=1100, may_lead=True) == [0, 3, LED, 1, 2, 4, 5, 6, 7, 8]


def num_computed(order: Sequence[int], prompts: Sequence[int], *, num_tokens: int, prefill_tokens: int = 8192) -> int:
    """Prompt tokens computed by a server that prefills first come first served, and caches what a prefill computed."""
    cached, computed, queue = set[int](), 0, [prompts[number] for number in order]
    while queue:
        together, room = set[int](), prefill_tokens
        while queue and room > 0:
            cost = 1 if queue[0] in cached else num_tokens
            room, computed = room - cost, computed + cost
            together.add(queue.pop(0))
        cached |= together
    return computed


@pytest.mark.parametrize(("count", "samples", "num_tokens"), [(200, 4, 256), (30, 8, 2048), (5, 8, 9000)])
def test_a_server_computes_the_prompt_of_a_group_once(count, samples, num_tokens):
    prompts = [number // samples for number in range(count * samples)]
    once = count * (num_tokens + samples - 1)
    computed = num_computed(order_of(prompts, num_tokens=num_tokens), prompts, num_tokens=num_tokens)
    assert once <= computed < once + 8192  # the last prompts may share a prefill with the others of theirs
    if num_tokens < 8192:  # as they came, those of one prefill are computed apart
        assert num_computed(range(len(prompts)), prompts, num_tokens=num_tokens) > 2 * once


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=120), st.sampled_from([1, 700, 16_384]), st.booleans())
def test_each_is_sent_once_and_prompts_keep_their_order(prompts, num_tokens, may_lead):
    sent = [number for number in order_of(prompts, num_tokens=num_tokens, may_lead=may_lead) if number != LED]
    assert sorted(sent) == list(range(len(prompts)))
    for prompt in set(prompts):
        of_prompt = [number for number in sent if prompts[number] == prompt]
        assert of_prompt == sorted(of_prompt)


def test_a_leader_that_is_cancelled_lets_the_others_go():
    async def body() -> list[int]:
        queue, sent = Turns(), list[int]()

        async def ask(number: int) -> None:
            async with queue.turn(0, 2048, may_lead=True) as turn:
                if turn.leads:
                    await asyncio.sleep(60)
                sent.append(number)

        tasks = [asyncio.create_task(ask(number)) for number in range(3)]
        while not queue._following:
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not queue._following
        return sent

    assert asyncio.run(asyncio.wait_for(body(), 20)) == [1, 2]


@pytest.mark.parametrize("is_called", [False, True])
def test_a_request_that_is_cancelled_holds_up_nobody(is_called):
    async def body() -> int:
        queue, gate = Turns(), asyncio.Event()
        sent: list[int] = []

        async def ask(number: int) -> None:
            async with queue.turn(number, 10) as turn:
                sent.append(number)
                await gate.wait()
                turn.pass_on()

        tasks = [asyncio.create_task(ask(number)) for number in range(AT_A_TIME + 5)]
        while len(sent) < AT_A_TIME:
            await asyncio.sleep(0)
        if is_called:
            gate.set()
            await asyncio.sleep(0)  # the next ones are called, and have not run yet
        for task in tasks[AT_A_TIME:]:
            task.cancel()
        gate.set()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert not queue._prompts
        return queue._num_free

    assert asyncio.run(asyncio.wait_for(body(), 20)) == AT_A_TIME
