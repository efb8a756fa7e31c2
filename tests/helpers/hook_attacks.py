"""User functions that attack the run that calls them: what they do, and the flags that name them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD = """
import asyncio, builtins, ctypes, json, locale, os, signal, sys, time, random
import hooks_zoo, rewards_zoo
from furlong import Sample

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
    "excepthook": "sys.excepthook = None",
}  # fmt: skip

# Expressions that are returned in place of the right value.
VALUES: Mapping[str, str] = {
    "None": "None", "int": "5", "text": "'abc'", "nan": "float('nan')", "empty": "[]", "nested": "[[[1]]]",
    "generator": "(x for x in [1])", "dict": "{'a': 1}", "class": "Sample", "object": "object()",
    "coroutine": "later()", "pair": "(1, 2)", "bytes": "b'ab'", "error": "ValueError('returned')", "huge": "10**400",
}  # fmt: skip

# Expressions that change the last argument that is an object, list or mapping.
CHANGES: Mapping[str, str] = {
    "cleared": "clear(args)",
    "reversed": "reverse(args)",
    "attributes": "strip(args)",
    "tokens": "tokens(args)",
}

MUTATE = """
def samples_in(value):
    if isinstance(value, Sample):
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
}  # fmt: skip


def write_attack(folder: Path, hook: str, *, attack: str = "pass", value: str = "", change: str = "") -> dict[str, Any]:
    """Write a module whose function attacks, and return the flags that name it."""
    flag, good, is_async, others = HOOKS[hook]
    path = folder / "attack.py"
    before = f"    {change}\n" if change else ""
    if hook == "source":
        result = f"return {value}" if value else "return super().get_samples(num_samples)"
        body = f"""
class hook({good}):
    def get_samples(self, num_samples):
        attack()
        {result}
"""
    else:
        result = value or f"{'await ' if is_async else ''}{good}(*args, **kwargs)"
        body = f"""
import inspect
{"async " if is_async else ""}def hook(*args, **kwargs):
    attack()
{before}    return {result}
hook.__signature__ = inspect.signature({good})
"""
    path.write_text(HEAD.format(attack=attack) + MUTATE + body)
    return {flag: f"{path}:hook", **others}
