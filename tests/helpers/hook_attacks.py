"""User functions that attack the run that calls them: what they do, and the flags that name them."""

from __future__ import annotations

import importlib
import inspect
import os
import resource
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runs import print_to

HEAD = """
import asyncio, builtins, ctypes, gc, json, locale, math, multiprocessing, os, re, signal, socket, subprocess, sys
import threading, time, random

def compiled_exit():
    import _ctypes  # as compiled code does, past ctypes.CDLL
    address = _ctypes.dlsym(_ctypes.dlopen(None, 2), 'exit')
    ctypes.CFUNCTYPE(None, ctypes.c_int)(address)(0)

def attack():
    if not done:
        done.append(1)
        {attack}

done = []
"""

# What a function does when it is called first, in one line.
ATTACKS: Mapping[str, str] = {
    "sys.exit": "sys.exit(0)",
    "os._exit": "os._exit(0)",
    "C exit": "ctypes.CDLL(None).exit(0)",
    "C _exit": "ctypes.CDLL(None)._exit(0)",
    "C exit itself": "compiled_exit()",
    "execv": "os.execv('/bin/true', ['true'])",
    "SIGKILL": "os.kill(os.getpid(), 9)",
    "BaseException": "raise BaseException('mine')",
    "KeyboardInterrupt": "raise KeyboardInterrupt('mine')",
    "GeneratorExit": "raise GeneratorExit('mine')",
    "CancelledError": "raise asyncio.CancelledError('mine')",
    "StopIteration": "raise StopIteration('mine')",
    "StopAsyncIteration": "raise StopAsyncIteration('mine')",
    "SystemExit text": "raise SystemExit('mine')",
    "descriptors": "os.closerange(3, 256)",
    "stderr": "os.close(2)",
    "chdir": "os.chdir('/')",
    "recursion limit": "sys.setrecursionlimit(60)",
    "json": "json.dumps = json.loads = lambda *a, **k: 1 / 0",
    "time": "time.monotonic = time.time = time.perf_counter = lambda: 'now'",
    "os": "os.replace = os.fsync = os.stat = lambda *a, **k: None",
    "builtins": "builtins.open = builtins.len = builtins.print = lambda *a, **k: 1 / 0",
    "locale": "locale.setlocale(locale.LC_ALL, 'C.UTF-8'); os.environ.clear()",
    "sys.modules": "[sys.modules.pop(n) for n in list(sys.modules) if n.startswith(('furlong', 'json'))]",
    "umask": "os.umask(0o777)",
    "alarm": "signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(1)",
    "SIGTERM ignored": "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getpid(), 15)",
    "stdout": "sys.stdout = sys.stderr = None",
    "stdout replaced": "sys.stdout = sys.stderr = object()",
    "excepthook": "sys.excepthook = None",
    "quit": "quit()",
    "exit code 3": "os._exit(3)",
    "SystemExit of a thread": "threading.Thread(target=sys.exit).start()",
    "SIGSEGV": "ctypes.string_at(0)",
    "SIGABRT": "os.kill(os.getpid(), signal.SIGABRT)",
    "SIGINT default": "signal.signal(signal.SIGINT, signal.SIG_DFL); os.kill(os.getpid(), 2)",
    "closed stdout": "sys.stdout.close()",
    "descriptor 1": "os.close(1)",
    "setitimer": "signal.setitimer(signal.ITIMER_VIRTUAL, 0.01); sum(range(10 ** 8))",
    "sleep replaced": "time.sleep = lambda _: None",
    "low NOFILE": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))",
    "low AS": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))",
    "recursion": "(f := lambda: f())()",
    "MemoryError": "raise MemoryError('mine')",
    "huge memory": "bytearray(1 << 50)",
    "OSError": "raise OSError(28, 'No space left on device', '/x')",
    "odd exception": "raise type('Odd', (Exception,), {'__str__': lambda s: 1 / 0, '__repr__': lambda s: 1 / 0})()",
    "exception group": "raise BaseExceptionGroup('mine', [KeyboardInterrupt(), SystemExit(0)])",
    "ExceptionGroup": "raise ExceptionGroup('mine', [ValueError('a'), OSError('b')])",
    "long text": "raise ValueError('x' * 10 ** 8)",
    "surrogates": "raise ValueError('\\udcff\\0\\x1b[2J')",
    "TimeoutError": "raise TimeoutError('mine')",
    "event loop closed": "asyncio.get_event_loop().close()",
    "event loop stopped": "asyncio.get_event_loop().stop()",
    "asyncio.run": "asyncio.run(asyncio.sleep(0))",
    "tasks cancelled": "[t.cancel() for t in asyncio.all_tasks()]",
    "atexit": "import atexit; atexit.register(os._exit, 0)",
    "run folder": "import shutil; shutil.rmtree(os.environ['ATTACKED_RUN'])",
    "torch dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "torch grad": "import torch; torch.set_grad_enabled(False)",
    "torch threads": "import torch; torch.set_num_threads(7)",
    "torch seed": "import torch; torch.manual_seed(0); random.seed(0)",
    "logging": "import logging; logging.disable(50); logging.shutdown(); logging.getLogger().handlers.clear()",
    "warnings": "import warnings; warnings.simplefilter('error')",
}  # fmt: skip

# Attacks of the class that ends the process of the run or its child at another place.
FORKS: Mapping[str, str] = {
    "fork returns": "os.fork()",
    "fork sys.exit": "os.fork() or sys.exit(0)",
    "fork raises": "if os.fork() == 0: raise ValueError('child')",
    "fork os._exit": "os.fork() or os._exit(0)",
    "fork sleeps": "if os.fork() == 0: time.sleep(1000)",
    "fork forks": "if os.fork() == 0: os.fork(); time.sleep(1000)",
    "fork setsid": "if os.fork() == 0: os.setsid(); os.fork() or time.sleep(1000); os._exit(0)",
    "fork parent exits": "os.fork() and sys.exit(0)",
    "fork in thread": "t = threading.Thread(target=os.fork); t.start(); t.join()",
    "fork in thread falls off": "t = threading.Thread(target=lambda: os.fork() or print('child')); t.start(); t.join()",
    "multiprocessing": "multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,)).start()",
    "multiprocessing exits": "multiprocessing.get_context('fork').Process(target=sys.exit, args=(0,)).start()",
    "pool left": "globals().update(pool=multiprocessing.get_context('fork').Pool(2))",
    "thread": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "daemon thread": "threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()",
    "subprocess": "subprocess.Popen(['sleep', '1000'])",
    "subprocess session": "subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    "shell": "os.system('sleep 1000 & sleep 1000 &')",
}  # fmt: skip

# A process of the run that grows or never returns. Interpreter lock: the C function keeps it.
HANGS: Mapping[str, str] = {
    "sleep": "time.sleep(1000)",
    "busy": "[0 for _ in iter(int, 1)]",
    "lock": "threading.Lock().acquire(); (l := threading.Lock()).acquire(); l.acquire()",
    "socket": "(s := socket.socketpair())[0].recv(1)",
    "C sleep": "ctypes.CDLL(None).sleep(1000)",
    "C sleep with the lock": "ctypes.PyDLL(None).sleep(1000)",
    "regex": "re.match('(a+)+b', 'a' * 64)",
    "caught": "while True:\n            try: time.sleep(1000)\n            except BaseException: pass",
}  # fmt: skip

GROWTH: Mapping[str, str] = {
    "list": "kept = []\n        while True: kept.append(bytes(1 << 20))",
    "doubling": "kept = 'x'\n        while True: kept += kept",
    "numpy": "import numpy; kept = []\n        while True: kept.append(numpy.ones(1 << 20))",
    "child": "subprocess.run([sys.executable, '-c', 'k = []\\nwhile True: k.append(bytes(1 << 20))'])",
    "small objects": "kept = []\n        while True: kept.append([])",
}  # fmt: skip

# Contents of the file of a hook.
SOURCES: Mapping[str, bytes] = {
    "syntax error": b"def hook(:\n",
    "Latin-1": "def hook(*a): return 'é'\n".encode("latin-1"),
    "UTF-16": "def hook(*a): pass\n".encode("utf-16"),
    "unknown encoding": b"# -*- coding: none -*-\ndef hook(*a): pass\n",
    "null bytes": b"def hook(*a): pass\n\0\n",
    "missing module": b"\nimport no_such_module_at_all\n",
    "missing name": b"\nfrom json import no_such_name\n",
    "no function": b"x = 1\n",
    "not a function": b"hook = 5\n",
    "nested": b"x = " + b"(" * 5000 + b")" * 5000 + b"\n",
    "own import": b"import attack\nattack.hook\n",
    "tabs": b"def hook(*a):\n\tif a:\n        return 1\n",
    "relative": b"from . import something\n",
}  # fmt: skip

# Expressions that are returned in place of the right value.
VALUES: Mapping[str, str] = {
    "None": "None", "int": "5", "text": "'abc'", "nan": "float('nan')", "empty": "[]", "nested": "[[[1]]]",
    "generator": "(x for x in [1])", "dict": "{'a': 1}", "class": "dict", "object": "object()",
    "coroutine": "later()", "pair": "(1, 2)", "bytes": "b'ab'", "error": "ValueError('returned')", "huge": "10**400",
}  # fmt: skip

# Expressions that change the last argument that is an object, list or mapping.
CHANGES: Mapping[str, str] = {
    "cleared": "clear(received)",
    "reversed": "reverse(received)",
    "attributes": "strip(received)",
    "tokens": "tokens(received)",
}

MUTATE = """
def samples_in(value):
    if hasattr(value, 'tokens'):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from samples_in(each)

def clear(args):
    for each in args:
        if isinstance(each, (list, dict)):
            each.clear()

def reverse(args):
    for each in args:
        if isinstance(each, list):
            each.reverse()

def strip(args):
    for sample in samples_in(args):
        sample.index = sample.group_index = sample.reward = sample.metadata = None

def tokens(args):
    for sample in samples_in(args):
        sample.tokens = sample.tokens[:-1]

async def later():
    return 1
"""

MEGATRON = {"train_backend": "megatron", "num_steps_per_rollout": 2}
TOOLS = {"custom_generate_function_path": "faulty_agents.converses_with_tools", "rm_type": "random"}
AGENT = {"custom_generate_function_path": "faulty_agents.converses", "rm_type": "random"}

# Flags, the function of `hooks_zoo` that works, whether it is async.
HOOKS: Mapping[str, tuple[str, str, bool, dict[str, Any]]] = {
    "generate": ("custom_generate_function_path", "hooks_zoo.generate_unseen", True, {}),
    "reward": ("custom_rm_path", "rewards_zoo.reward_group", False, {"group_rm": True, "rm_type": None}),
    "filter": ("dynamic_sampling_filter_path", "hooks_zoo.filter_by_index", False, {"over_sampling_batch_size": 6}),
    "buffer_filter": ("buffer_filter_path", "hooks_zoo.buffer_filter", False, {"over_sampling_batch_size": 6}),
    "sample_filter": ("rollout_sample_filter_path", "hooks_zoo.sample_filter", False, {}),
    "all_samples": ("rollout_all_samples_process_path", "hooks_zoo.all_samples_process", False, {}),
    "sample_hook": ("rollout_sample_hook_path", "hooks_zoo.sample_hook", False, {}),
    "post_process": ("custom_reward_post_process_path", "hooks_zoo.reward_post_process", False, {}),
    "convert": ("custom_convert_samples_to_train_data_path", "hooks_zoo.convert", False, {}),
    "log": ("custom_rollout_log_function_path", "hooks_zoo.log_rollout", False, {}),
    "data_postprocess": ("rollout_data_postprocess_path", "hooks_zoo.postprocess", False, {}),
    "advantages": ("custom_advantage_function_path", "hooks_zoo.advantages", False, {}),
    "loss": (
        "custom_loss_function_path", "hooks_zoo.loss", False, {"loss_type": "custom_loss"}
    ),
    "rollout": ("rollout_function_path", "hooks_zoo.rollout_function", False, {}),
    "source": ("data_source_path", "hooks_zoo.Endless", False, {}),
    "reward_async": ("custom_rm_path", "rewards_zoo.reward_slime", True, {"rm_type": None, "num_reward_workers": 1}),
    "reward_sync": ("custom_rm_path", "rewards_zoo.reward_verifier", False, {
        "rm_type": None, "num_reward_workers": 1, "reward_key": "score"}),
    "tis": ("custom_tis_function_path", "hooks_zoo.tis", False, {"use_tis": True}),
    "reducer": ("custom_pg_loss_reducer_function_path", "hooks_zoo.reducer", False, {}),
    "eval": ("eval_function_path", "hooks_zoo.rollout_function", False, {"eval_interval": 1}),
    "eval_log": ("custom_eval_rollout_log_function_path", "hooks_zoo.log_evaluation", False, {"eval_interval": 1}),
    "agent": ("agent_function_path", "faulty_agents.asks_once", True, {}),
    "environment": ("environment", "faulty_agents.Patient", True, {"rm_type": None}),
    "match": ("session_match", "faulty_agents.any_message", False, AGENT),
    "leaves": ("session_leaves", "faulty_agents.all_leaves", False, AGENT),
    "tool_parser": ("session_tool_parser", "faulty_agents.no_tools", False, TOOLS),
    "megatron_init": ("custom_megatron_init_path", "hooks_zoo.megatron_init", False, MEGATRON),
    "provider": ("custom_model_provider_path", "hooks_zoo.provider", False, MEGATRON),
    "log_prob_hook": ("custom_megatron_before_log_prob_hook_path", "hooks_zoo.before_log_prob", False, MEGATRON),
    "step_hook": ("custom_megatron_before_train_step_hook_path", "hooks_zoo.before_step", False, MEGATRON),
}  # fmt: skip
METHODS = {"source": "get_samples(self, num_samples)", "environment": "step(self, message)"}  # that attack


def write_attack(
    folder: Path, hook: str, *, attack: str = "pass", value: str = "", change: str = "", at_import: bool = False
) -> dict[str, Any]:
    """Write a module whose function attacks, or the import of which does, and return the flags that name it."""
    flag, good, is_async, others = HOOKS[hook]
    path = folder / "attack.py"
    call = "pass" if at_import else "attack()"
    word, wait = ("async ", "await ") if is_async else ("", "")
    module, name = good.split(".")
    if hook in METHODS:
        method = METHODS[hook]
        base = method.split("(")[0]
        body = f"""
import {module}
class hook({good}):
    {word}def {method}:
        {call}
        return {value or f"{wait}super().{base}({method.split('self, ')[1]}"}
"""
    else:  # the module with the good function imports PyTorch, which takes seconds in each import
        signature = inspect.signature(getattr(importlib.import_module(module), name))
        given = ", ".join(map(_argument, signature.parameters.values()))
        body = f"""
{word}def hook{signature}:
    {call}
    received = [{", ".join(p.name for p in signature.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD)}]
    {change or "pass"}
    import {module}
    return {value or f"{wait}{good}({given})"}
"""
    path.write_text(HEAD.format(attack=attack) + MUTATE + body + ("attack()\n" if at_import else ""))
    named: Any = f"{path}:hook"
    return {flag: [named] if flag == "environment" else named, **others}


def _argument(parameter: inspect.Parameter) -> str:
    """Return how a parameter is passed on in a call."""
    if parameter.kind == parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    return f"{parameter.name}={parameter.name}" if parameter.kind == parameter.KEYWORD_ONLY else parameter.name


def attacked_command(words: list[str], log: Path, variables: dict[str, str], memory_bytes: int | None = None) -> None:
    """Body of a forked process: run `furlong words` as the command line does, with its output in `log`."""
    from furlong.cli import main

    os.environ.update(variables)
    tempfile.tempdir = None
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    print_to(log)
    sys.argv[:] = ["furlong", *words]
    raise SystemExit(main())
