"""User code that changes the process of the run, or tries to end it."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time

import pytest

from furlong.core.process_guard import ProcessChangedError, process_guard
from furlong.core.user_code import exits_fail_the_run, exits_raise, with_hook_errors
from furlong.errors import HookError


def patch_clock():
    time.monotonic = lambda: 0.0


def lower_limit():
    sys.setrecursionlimit(len(__import__("inspect").stack()) + 30)


def move():
    os.chdir("/")


@pytest.mark.parametrize(
    ("function", "what"), [(patch_clock, "time.monotonic"), (lower_limit, "recursion limit"), (move, "directory")]
)
def test_a_hook_that_changes_the_process_is_named_and_undone(function, what):
    before = time.monotonic, sys.getrecursionlimit(), os.getcwd()
    with process_guard.watching(), pytest.raises(ProcessChangedError) as caught:
        with_hook_errors(function, "--x-path: f")()
    assert what in str(caught.value)
    assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)
    assert (time.monotonic, sys.getrecursionlimit(), os.getcwd()) == before


def test_a_failure_of_furlong_after_a_change_names_the_function():
    def fail_as_the_loop_does():
        with process_guard.watching():
            try:
                with_hook_errors(patch_clock, "--x-path: f")()
            except HookError:
                raise OSError("bad file descriptor") from None

    with pytest.raises(ProcessChangedError, match=r"--x-path: f .*monotonic"):
        fail_as_the_loop_does()


def test_outside_a_run_nothing_is_compared(monkeypatch, tmp_path):
    with_hook_errors(monkeypatch.chdir, "f")(tmp_path)


def test_exits_of_the_process_raise_and_name_the_line():
    with exits_raise():
        for leave in (lambda: os._exit(0), lambda: os.execv("/bin/true", ["true"]), os.abort):
            with pytest.raises(HookError, match=r"would end this process"):
                with_hook_errors(leave, "f")()
        child = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
        child.start()
        child.join()
    assert child.exitcode == 7


def test_an_exit_of_a_task_of_user_code_is_an_error():
    async def run():
        async def leave():
            sys.exit(0)

        task = asyncio.create_task(leave())
        await asyncio.sleep(0.01)
        await task

    with pytest.raises(HookError, match=r"(?s)SystemExit: 0\n.*test_process_guard"), exits_fail_the_run():
        asyncio.run(run())


@pytest.mark.parametrize("kind", [GeneratorExit, KeyboardInterrupt])
def test_exceptions_of_the_interpreter_pass(kind):
    def interrupted():
        raise kind

    with pytest.raises(kind):
        with_hook_errors(interrupted, "f")()


def test_any_other_exception_is_one_of_the_hook():
    class Stop(BaseException):
        pass

    def stop():
        raise Stop("mine")

    with pytest.raises(HookError, match="Stop: mine"):
        with_hook_errors(stop, "f")()
