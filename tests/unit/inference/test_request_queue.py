"""The order in which `RequestQueue` sends requests, without a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.inference.sglang import request_queue
from furlong.inference.sglang.request_queue import MAX_SENDING, RequestQueue

PREFILL = -1  # in an order: the prompt of the next request is computed ahead


def order_of(prompts: Sequence[int], *, num_tokens: int = 1000, may_lead: bool = False) -> list[int]:
    """The order in which concurrent requests with these prompts are sent; each takes two loop iterations."""
    sent: list[int] = []

    async def ask(queue: RequestQueue, number: int, prompt: int, answered: asyncio.Event) -> None:
        async with queue.ticket(prompt, num_tokens, may_lead=may_lead) as ticket:
            if ticket.leads:
                sent.append(PREFILL)
                ticket.mark_sent()
                for _ in range(20):
                    await asyncio.sleep(0)
                ticket.release_followers()
            sent.append(number)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            ticket.mark_sent()
            await answered.wait()

    async def body() -> None:
        queue, answered = RequestQueue(), asyncio.Event()
        tasks = [asyncio.create_task(ask(queue, i, prompt, answered)) for i, prompt in enumerate(prompts)]
        while len(sent) - sent.count(PREFILL) < len(prompts):
            await asyncio.sleep(0)
        answered.set()
        await asyncio.gather(*tasks)
        assert queue._num_free == MAX_SENDING
        assert not queue._prompts
        assert not queue._followers

    asyncio.run(asyncio.wait_for(body(), 20))
    return sent


def test_one_request_of_each_prompt_is_sent_before_the_others():
    assert order_of([0, 0, 0, 1, 1, 1, 2, 2, 2]) == [0, 3, 6, 1, 2, 4, 5, 7, 8]


def test_a_block_is_as_many_prompts_as_fill_a_prefill(monkeypatch):
    monkeypatch.setattr(request_queue, "BLOCK_TOKENS", 2000)
    assert order_of([0, 0, 1, 1, 2, 2, 3, 3, 4, 4]) == [0, 2, 4, 6, 1, 8, 3, 5, 7, 9]


def test_the_first_request_of_a_long_prompt_leads_in_a_block_that_is_not_full():
    assert order_of([0, 0, 0, 0], may_lead=True) == [PREFILL, 0, 1, 2, 3]
    assert order_of([0, 0, 0, 1, 2, 2, 2], num_tokens=1100, may_lead=True) == [PREFILL, 3, PREFILL, 0, 4, 1, 2, 5, 6]
    assert order_of([0, 0, 0, 0], num_tokens=600, may_lead=True) == [0, 1, 2, 3]  # 1,800 tokens do not pay off


def test_full_blocks_have_no_leaders(monkeypatch):
    monkeypatch.setattr(request_queue, "BLOCK_TOKENS", 2200)
    assert order_of([0, 0, 0, 1, 1, 1, 2, 2, 2], num_tokens=1100, may_lead=True) == [0, 3, PREFILL, 1, 2, 4, 5, 6, 7, 8]


def num_computed(order: Sequence[int], prompts: Sequence[int], *, num_tokens: int, prefill_tokens: int = 8192) -> int:
    """Prompt tokens computed by a server that prefills in order of arrival and caches each finished prefill."""
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
    assert once <= computed < once + 8192  # the last prompts may share a prefill with their other requests
    if num_tokens < 8192:  # in order of arrival, requests of one prefill share nothing
        assert num_computed(range(len(prompts)), prompts, num_tokens=num_tokens) > 2 * once


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=120), st.sampled_from([1, 700, 16_384]), st.booleans())
def test_every_request_is_sent_once_in_the_order_of_its_prompt(prompts, num_tokens, may_lead):
    sent = [number for number in order_of(prompts, num_tokens=num_tokens, may_lead=may_lead) if number != PREFILL]
    assert sorted(sent) == list(range(len(prompts)))
    for prompt in set(prompts):
        of_prompt = [number for number in sent if prompts[number] == prompt]
        assert of_prompt == sorted(of_prompt)


def test_a_cancelled_leader_releases_its_followers():
    async def body() -> list[int]:
        queue, sent = RequestQueue(), list[int]()

        async def ask(number: int) -> None:
            async with queue.ticket(0, 2048, may_lead=True) as ticket:
                if ticket.leads:
                    await asyncio.sleep(60)
                sent.append(number)

        tasks = [asyncio.create_task(ask(number)) for number in range(3)]
        while not queue._followers:
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not queue._followers
        return sent

    assert asyncio.run(asyncio.wait_for(body(), 20)) == [1, 2]


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_cancelled_request_does_not_block_others(is_admitted):
    async def body() -> int:
        queue, gate = RequestQueue(), asyncio.Event()
        sent: list[int] = []

        async def ask(number: int) -> None:
            async with queue.ticket(number, 10) as ticket:
                sent.append(number)
                await gate.wait()
                ticket.mark_sent()

        tasks = [asyncio.create_task(ask(number)) for number in range(MAX_SENDING + 5)]
        while len(sent) < MAX_SENDING:
            await asyncio.sleep(0)
        if is_admitted:
            gate.set()
            await asyncio.sleep(0)  # the next ones are admitted, but have not run yet
        for task in tasks[MAX_SENDING:]:
            task.cancel()
        gate.set()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        assert not queue._prompts
        return queue._num_free

    assert asyncio.run(asyncio.wait_for(body(), 20)) == MAX_SENDING
