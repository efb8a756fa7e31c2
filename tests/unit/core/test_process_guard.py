"""User code that changes the process of the run, or tries to end it."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import errno
import io
import logging
import logging.config
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from furlong.core import process_guard as process_guard_module
from furlong.core.process_guard import ProcessChangedError, location_of, process_guard
from furlong.core.user_code import exits_fail_the_run, exits_raise, with_hook_errors
from furlong.errors import HookError


def patch_clock():
    time.monotonic = lambda: 0.0


def lower_limit():
    sys.setrecursionlimit(len(__import__("inspect").stack()) + 30)


def move():
    os.chdir("/")


def patch_torch():
    torch.exp = lambda x: x


def patch_tensors():
    torch.Tensor.sum = lambda self: None


def remove_process():
    psutil.Process = None


class Fake:
    pass


def fake_process():
    psutil.Process = Fake


def patch_paths():
    Path.write_text = lambda *_: 0


def raise_warnings():
    warnings.simplefilter("error", ResourceWarning)


def set_dtype():
    torch.set_default_dtype(torch.float64)


def limit_files():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))


set_limit = resource.setrlimit


def limit_files_by_a_name_of_its_own():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    set_limit(resource.RLIMIT_NOFILE, (200, hard))


def patch_builtins():
    builtins.len = builtins.isinstance = lambda *_: 1 / 0


def patch_builtins_and_fail():
    builtins.any = builtins.getattr = builtins.str = lambda *_: 1 / 0
    raise ValueError("mine")


def mask_files():
    os.umask(0o777)


def remove_hooks():
    sys.excepthook = None


def remove_streams():
    sys.stderr = None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "what"),
    [
        (patch_builtins, "builtins.len"),
        (patch_builtins_and_fail, "builtins.any"),
        (mask_files, "the umask from"),
        (remove_hooks, "sys.excepthook"),
        (remove_streams, "sys.stderr"),
        (patch_clock, "time.monotonic"),
        (lower_limit, "recursion limit"),
        (move, "directory"),
        (patch_torch, "torch.exp"),
        (patch_tensors, "torch.Tensor.sum"),
        (remove_process, "psutil.Process"),
        (fake_process, "psutil.Process"),
        (patch_paths, "pathlib.Path.write_text"),
        (raise_warnings, "warnings of any module"),
        (set_dtype, "default dtype from torch.float32 to torch.float64"),
        (limit_files, "RLIMIT_NOFILE"),
        (limit_files_by_a_name_of_its_own, "RLIMIT_NOFILE"),
    ],
)
def test_a_hook_that_changes_the_process_is_named_and_undone(function, what):
    before = state()
    with process_guard.watching(), pytest.raises(ProcessChangedError) as caught:
        with_hook_errors(function, "--x-path: f")()
    assert what in str(caught.value)
    assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)
    assert state() == before


def state():
    return (
        *(
            time.monotonic,
            sys.getrecursionlimit(),
            os.getcwd(),
            torch.exp,
            torch.Tensor.sum,
            Path.write_text,
            psutil.Process,
        ),
        *(len, isinstance, any, getattr, str, sys.excepthook, sys.stderr, os.umask(0o022)),
        *(psutil.Process, torch.get_default_dtype(), resource.getrlimit(resource.RLIMIT_NOFILE)),
    )


def test_a_limit_is_not_lowered_even_while_the_function_runs():
    """Other threads of the run would fail, or hang when they start."""
    before = resource.getrlimit(resource.RLIMIT_AS)

    def attempt():
        with pytest.raises(ProcessChangedError, match=rf"^{__file__}:\d+ lowered RLIMIT_AS from .* to 1048576 in the"):
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))
        with pytest.raises(ProcessChangedError, match="lowered RLIMIT_AS"):
            resource.prlimit(0, resource.RLIMIT_AS, (1 << 20, before[1]))
        assert resource.prlimit(0, resource.RLIMIT_AS) == before
        resource.setrlimit(resource.RLIMIT_AS, before)  # no change
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
        lower = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))
        return subprocess.run([sys.executable, "-c", code], preexec_fn=lower, capture_output=True, check=True).stdout

    with process_guard.watching():
        assert with_hook_errors(attempt, "--x-path: f")() == b"64\n"  # child processes may have less


def test_a_change_that_stays_is_that_of_the_function_that_made_it_not_of_its_caller():
    def close_all():
        os.closerange(process_guard._state._sentinel, process_guard._state._sentinel + 1)

    def calls_another():
        with contextlib.suppress(ProcessChangedError):
            with_hook_errors(close_all, "--inner: f")()

    with process_guard.watching(), pytest.raises(ProcessChangedError, match=r"^--inner: f .* closed descriptor"):
        with_hook_errors(calls_another, "--outer: g")()


def test_a_failure_of_furlong_with_a_closed_descriptor_names_the_function_that_closed_it():
    def step_fails():
        with process_guard.watching():
            process_guard.begin(step_fails, "--x-path: f")
            os.close(process_guard._state._sentinel)
            raise OSError(errno.EBADF, "Bad file descriptor")

    with pytest.raises(ProcessChangedError, match=r"^--x-path: f .* closed descriptor"):
        step_fails()


def test_a_failure_after_a_step_that_patched_a_library_names_the_function(monkeypatch):
    monkeypatch.setattr(torch, "exp", torch.exp)  # restored after the test

    def fail_as_the_trainer_does():
        with process_guard.watching():
            process_guard.begin()
            patch_torch()
            process_guard.check(patch_torch, "the custom generate function", is_step=True)
            raise AttributeError("'NoneType' object has no attribute 'to'")

    with pytest.raises(ProcessChangedError, match=r"generate function .*torch\.exp"):
        fail_as_the_trainer_does()


def test_many_steps_are_compared_together_and_a_change_names_all_their_functions(monkeypatch):
    """An HTTP client takes ten steps for each message."""
    now_s, compared = [100.0], []
    monkeypatch.setattr(process_guard_module, "_clock", lambda: now_s[0])
    with process_guard.watching():
        process_guard.begin(move, "the custom generate function")
        compare = process_guard._compare
        monkeypatch.setattr(
            process_guard, "_compare", lambda *args, **kwargs: (compared.append(1), compare(*args, **kwargs))
        )
        for _ in range(50):
            process_guard.check(move, "the custom generate function", is_step=True)
            now_s[0] += 0.001
        assert len(compared) == 10
        process_guard.check(patch_clock, "the agent", is_step=True)  # compared: the last time was 5 ms ago
        before = os.getcwd()
        move()
        process_guard.check(move, "the custom generate function", is_step=True)
        now_s[0] += 0.006
        with pytest.raises(
            ProcessChangedError, match=r"agent.*or the custom generate function.*working directory"
        ) as caught:
            process_guard.check(patch_clock, "the agent", is_step=True)
        assert location_of(move) in str(caught.value)
        assert os.getcwd() == before
        process_guard.begin(move, "the custom generate function")
        move()
        with pytest.raises(ProcessChangedError, match="working directory"):  # of the first step, at once
            process_guard.check(move, "the custom generate function", is_step=True)
        assert len(compared) == 13


def test_libraries_and_the_user_may_add_functions_to_torch(monkeypatch):
    def extend():
        monkeypatch.setattr(torch, "my_own_function", lambda: 0, raising=False)
        monkeypatch.setattr(torch, "load", lambda *_, **__: 0)

    with process_guard.watching():
        with_hook_errors(extend, "--x-path: f")()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_does_not_continue_the_run(capfd):
    with process_guard.watching():
        pid, parent = with_hook_errors(os.fork, "--x-path: f")(), os.getpid()
        assert os.getpid() == parent
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert "os._exit()" in capfd.readouterr().err


def test_a_failure_of_furlong_after_a_change_names_the_function():
    def fail_as_the_loop_does():
        with process_guard.watching():
            try:
                with_hook_errors(patch_clock, "--x-path: f")()
            except HookError:
                raise OSError("bad file descriptor") from None

    with pytest.raises(ProcessChangedError, match=r"--x-path: f .*monotonic"):
        fail_as_the_loop_does()


def test_a_failure_of_furlong_at_the_end_of_a_run_names_the_function():
    def fail_as_a_lock_does():
        with process_guard.blaming():
            try:
                with process_guard.watching():
                    with_hook_errors(patch_clock, "--x-path: f")()
            finally:
                raise OSError("bad file descriptor")

    with pytest.raises(ProcessChangedError, match=r"--x-path: f .*monotonic"):
        fail_as_a_lock_does()
    with pytest.raises(OSError, match="of another run"), process_guard.blaming():
        raise OSError("of another run")


def test_a_class_is_located():
    assert location_of(Environment) == f"{__file__}:{Environment.step.__code__.co_firstlineno}"


class Environment:
    def step(self):
        """Located by its first method."""


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


@pytest.mark.parametrize("name", ["exit", "_exit", "quick_exit", "abort"])
@pytest.mark.parametrize("library", [ctypes.CDLL, ctypes.PyDLL])
def test_exits_of_c_that_ctypes_calls_raise(name, library):
    with exits_raise(), pytest.raises(HookError, match=rf"C's {name}\(.*would end this process"):
        with_hook_errors(lambda: getattr(library(None), name)(0), "f")()
    assert ctypes.CDLL(None).getpid() == os.getpid()


def test_a_print_of_the_user_ends_with_the_run():
    def replace():
        builtins.print = lambda *_: 1 / 0

    before = vars(builtins)["print"]
    with process_guard.watching():
        with_hook_errors(replace, "f")()
    assert vars(builtins)["print"] is before


def raise_level():
    logging.getLogger("furlong").setLevel(logging.CRITICAL)


@pytest.mark.parametrize(
    ("silence", "words"),
    [
        (lambda: logging.disable(logging.CRITICAL), "disabled logging up to level CRITICAL"),
        (lambda: logging.config.dictConfig({"version": 1}), "disabled .* loggers, as logging.config does"),
        (lambda: logging.getLogger("furlong").handlers.clear(), "removed 1 handlers of the logger furlong"),
        (raise_level, "raised the level of the logger furlong"),
    ],
    ids=["disable", "dictConfig", "handlers", "level"],
)
def test_a_function_that_silences_the_log_is_reported_in_it(silence, words):
    log, run_logger = io.StringIO(), logging.getLogger("furlong")
    handler = logging.StreamHandler(log)
    run_logger.addHandler(handler)
    level = run_logger.level
    run_logger.setLevel(logging.INFO)
    try:
        with process_guard.watching():
            with_hook_errors(silence, "--x-path: f")()
            logging.getLogger("furlong.core.sample").info("later")
    finally:
        run_logger.removeHandler(handler)
        run_logger.setLevel(level)
        logging.disable(logging.NOTSET)
    first, *others = log.getvalue().splitlines()
    assert re.match(rf"--x-path: f \({__file__}:\d+\): it {words}.*; undone", first)
    assert others == ["later"]


def test_the_function_that_is_called_is_noted():
    noted = []
    process_guard.note = noted.append
    try:
        with_hook_errors(state, "--y-path: f")()
    finally:
        process_guard.note = None
    assert noted[-1] == f"--y-path: f ({__file__}:{state.__code__.co_firstlineno})"


def test_an_exit_of_a_task_of_user_code_is_an_error():
    async def run():
        async def leave():
            sys.exit(0)

        task = asyncio.create_task(leave())
        task.add_done_callback(asyncio.Task.exception)  # else its collection logs a traceback, in another test
        await asyncio.sleep(0.01)
        await task

    with pytest.raises(HookError, match=r"(?s)SystemExit: 0\n.*test_process_guard"), exits_fail_the_run():
        asyncio.run(run())


def test_an_error_of_user_code_that_no_flag_names_is_an_error_with_its_place():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("own")

    loss = Own.apply(torch.ones(1, requires_grad=True)).sum()
    message = r"(?s)^user code raised ValueError: own\n.*test_process_guard"
    with pytest.raises(HookError, match=message), exits_fail_the_run():
        loss.backward()


def test_user_code_that_stops_the_event_loop_is_an_error():
    async def run():
        with_hook_errors(lambda: asyncio.get_running_loop().stop(), "--x-path: f")()
        await asyncio.sleep(1)

    def drive():
        with process_guard.watching(), exits_fail_the_run():
            asyncio.run(run())

    with pytest.raises(HookError, match=r"stopped the event loop of the run; --x-path: f \(.*was called last"):
        drive()


def test_ctrl_c_passes():
    with pytest.raises(KeyboardInterrupt):
        with_hook_errors(lambda: signal.raise_signal(signal.SIGINT), "f")()


def test_the_end_of_a_coroutine_passes():
    async def wait():
        await asyncio.sleep(1)

    async def close():
        call = with_hook_errors(wait, "f")()
        call.send(None)
        call.close()

    asyncio.run(close())


class Interrupted(KeyboardInterrupt):
    pass


class Unreadable(BaseException):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    "kind", [GeneratorExit, KeyboardInterrupt, Interrupted, SystemExit, asyncio.CancelledError, Unreadable]
)
def test_exceptions_of_the_interpreter_that_the_user_raises_are_errors_of_the_hook(kind):
    def stop():
        raise kind

    async def stop_later():
        await asyncio.sleep(0)
        raise kind

    line = stop.__code__.co_firstlineno + 1
    with pytest.raises(HookError, match=rf"{kind.__name__}: .*\n.*{__file__}:{line}"):
        with_hook_errors(stop, "f")()
    with pytest.raises(HookError, match=kind.__name__):
        asyncio.run(with_hook_errors(stop_later, "f")())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, Interrupted])
def test_an_interrupt_that_a_task_of_the_user_raises_is_an_error(kind):
    def run():
        raise kind

    with pytest.raises(HookError, match=rf"(?s){kind.__name__}.*test_process_guard"), exits_fail_the_run():
        run()


def test_any_other_exception_is_one_of_the_hook():
    class Stop(BaseException):
        pass

    def stop():
        raise Stop("mine")

    with pytest.raises(HookError, match="Stop: mine"):
        with_hook_errors(stop, "f")()
