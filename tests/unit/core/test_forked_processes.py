"""Processes that user code forks end where they leave it."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from furlong.core.forked_processes import forks_end_here, forks_leave_loop
from furlong.core.user_code import with_hook_errors


def end_of(pid: int) -> int:
    """Return the exit code of a forked process."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forks(children: list[int], *, then=lambda: None):
    """Fork as user code; the child returns, or ends as `then` does."""
    pid = os.fork()
    if pid == 0:
        then()
    else:
        children.append(pid)


@pytest.mark.parametrize("then", [lambda: None, lambda: sys.exit(0), lambda: 1 / 0], ids=["returns", "exits", "raises"])
def test_a_child_that_leaves_user_code_ends_with_its_place(then, capfd):
    children = list[int]()
    with forks_end_here():
        forks(children, then=then)
    assert end_of(children[0]) == 1
    assert capfd.readouterr().err.startswith(f"forks ({__file__}:")


def test_a_child_that_calls_exit_keeps_its_code():
    children = list[int]()
    with forks_end_here():
        forks(children, then=lambda: os._exit(7))
    assert end_of(children[0]) == 7


def test_a_child_of_a_hook_ends_outside_of_a_run_too(capfd):
    children = list[int]()
    with_hook_errors(lambda: forks(children), "--some-path")()
    assert end_of(children[0]) == 1
    assert "its child process returned" in capfd.readouterr().err


@pytest.mark.parametrize("then", [lambda: None, lambda: sys.exit(0)], ids=["returns", "exits"])
def test_a_child_of_a_task_never_runs_the_loop(then, capfd):
    children, others = list[int](), list[int]()

    async def task():
        await asyncio.sleep(0)
        forks(children, then=then)

    async def other():
        await asyncio.sleep(0.01)
        others.append(os.getpid())

    async def run():
        with forks_leave_loop(asyncio.get_running_loop()):
            await asyncio.gather(task(), other())

    asyncio.run(run())
    assert end_of(children[0]) == 1
    assert others == [os.getpid()]
    assert "its child process returned" in capfd.readouterr().err
