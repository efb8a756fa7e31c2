"""Turns on the event loop: the order of actions, and how many of them one iteration runs."""

from __future__ import annotations

import asyncio

import pytest

from furlong.inference.server.turns import FOLLOW_UP_S, ITERATION_S, Turns

MAX_ACTIONS = round(ITERATION_S / FOLLOW_UP_S) + 1  # of one iteration, if each takes no time itself


def iterations_of(add_all):
    """Return in which iteration of the loop each action ran; `add_all` adds them."""

    async def main():
        turns, ran, iteration = Turns(), list[tuple[int, object]](), 0
        add_all(turns, lambda name: ran.append((iteration, name)))
        while len(ran) < 100:
            iteration += 1
            await asyncio.sleep(0)
        return ran

    return asyncio.run(main())


def test_actions_run_in_order_and_few_in_each_iteration():
    def add_all(turns, run):
        for i in range(100):
            turns.add(lambda i=i: run(i))

    ran = iterations_of(add_all)
    assert [name for _, name in ran] == [*range(100)]
    assert ran[0][0] == 0
    per_iteration = [sum(at == i for at, _ in ran) for i in range(ran[-1][0] + 1)]
    assert max(per_iteration) <= MAX_ACTIONS


def test_turns_with_long_follow_ups_run_one_in_each_iteration():
    def add_all(turns, run):
        for i in range(100):
            turns.add(lambda i=i: run(i), 2 * ITERATION_S)

    ran = iterations_of(add_all)
    assert [name for _, name in ran] == [*range(100)]
    assert len({at for at, _ in ran}) == 100


def test_an_action_that_fails_does_not_stop_the_others():
    async def main():
        failures = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
        turns, ran = Turns(), list[int]()
        for i in range(50):
            turns.add((lambda i=i: ran.append(i)) if i != 30 else (lambda: [][0]))
        while len(ran) < 49:
            await asyncio.sleep(0)
        return failures, ran

    failures, ran = asyncio.run(main())
    assert [type(error) for error in failures] == [IndexError]
    assert ran == [i for i in range(50) if i != 30]


def test_waiting_tasks_take_turns_and_can_be_cancelled():
    async def main():
        turns, order = Turns(), list[int]()

        async def one(i):
            await turns.wait(0.0)
            order.append(i)

        tasks = [asyncio.create_task(one(i)) for i in range(40)]
        await asyncio.sleep(0)
        tasks[35].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(asyncio.CancelledError):
            tasks[35].result()
        return order

    assert asyncio.run(main()) == [i for i in range(40) if i != 35]
