"""Run functions on several trainer ranks: one interpreter forks the ranks of each case.

    python tests/helpers/ranks_zoo.py MODULE FOLDER DEADLINE_S < cases.json

A case is {"name", "function", "world", "args"}, plus "module" if the function is in another module. It starts when
fewer than "at_once" cases (default 1) run. With "is_after" it starts when no case runs, since it reads earlier output.
Up to "together" cases (default 1) that follow each other with the same "world" run one by one in the same processes,
so that they share the warm-up of a process.
MODULE.function(ranks, folder, **args) runs on each rank, connected over gloo, or over NCCL if args have the device
"cuda". The result is written to FOLDER/<name>-<rank>.json. If a rank fails, its case is terminated; all processes end
by the deadline.

NCCL rejects two ranks on one GPU of the same machine. With FURLONG_TEST_RANKS_PER_GPU=N, ranks that share a GPU use
different host IDs, so that NCCL connects them by sockets: slower, with the same results as on separate GPUs.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.util import _exit_function  # pyright: ignore[reportAttributeAccessIssue]  as Process does it
from pathlib import Path
from typing import Any


def run_cases(module: str, folder: Path, cases: list[dict[str, Any]], *, deadline_s: int) -> dict[str, list[Any]]:
    """Run all cases, and return the results of the ranks by case name."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, module, str(folder), str(deadline_s)],
        input=json.dumps(cases),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=deadline_s + 20,
        check=False,
    )
    first = max(done.stderr.find("Traceback"), 0)  # skip warnings, keep errors that follow
    assert done.returncode == 0, done.stderr[max(first - 500, 0) :][:6000]
    return {
        case["name"]: [json.loads((folder / f"{case['name']}-{r}.json").read_text()) for r in range(case["world"])]
        for case in cases
    }


def run_together(
    module: str,
    folder: Path,
    groups: list[tuple[int, dict[str, dict[str, Any]]]],
    *,
    deadline_s: int,
    first_later: int = 0,
    **common: Any,
) -> dict[str, list[Any]]:
    """Run groups of (number of processes, cases), and return the results of the ranks by case name.

    MODULE.together runs the cases of a group with `common` arguments, so that they share the warm-up of a process.
    With `first_later`, the number of the first group that reads files of others, two groups run at once.
    """
    runs = [
        {"name": f"{number}", "function": "together", "world": world, "args": {"cases": cases, **common}}
        | ({"at_once": 2, "is_after": number == first_later} if first_later else {})
        for number, (world, cases) in enumerate(groups)
    ]
    found = run_cases(module, folder, runs, deadline_s=deadline_s)
    return {
        name: [rank[name] for rank in found[f"{number}"]] for number, (_, cases) in enumerate(groups) for name in cases
    }


def ranks_possible() -> int:
    """Return how many CUDA ranks can run on this machine."""
    return device_count() * int(os.environ.get("FURLONG_TEST_RANKS_PER_GPU", "1"))


def device_count() -> int:
    """Count the GPUs of this machine without creating a CUDA context."""
    import torch

    return torch.cuda.device_count()


def take_gpu(rank: int, world: int, first: int = 0) -> None:
    """Set the GPU of this process before its first NCCL call; rank 0 uses GPU `first`."""
    import torch

    if world > device_count():
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device((first + rank) % device_count())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class _SharedGloo:
    """Replaces torch's class of gloo groups, each of which would start a thread, by groups that share one."""

    def __init__(self) -> None:
        from torch.distributed import distributed_c10d as c10d

        self._plain: Any = c10d.ProcessGroupGloo
        self._device: Any = None
        c10d.ProcessGroupGloo = self  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self, store: Any, rank: int, size: int, timeout: Any = None) -> Any:
        if not isinstance(timeout, timedelta):
            return self._plain(store, rank, size, *([] if timeout is None else [timeout]))
        self._device = self._device or self._plain.create_default_device()
        options = self._plain._Options()
        options._devices, options._threads, options._timeout = [self._device], 2, timeout
        return self._plain(store, rank, size, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._plain)


def _rank(module: str, folder: Path, cases: list[dict[str, Any]], rank: int, port: int) -> None:
    import torch.distributed

    from furlong.training.ranks import Ranks, join

    _SharedGloo()  # Megatron-core creates about thirty groups
    first, world = cases[0], cases[0]["world"]
    on_gpu = first["args"].get("device") == "cuda"
    if on_gpu:
        take_gpu(rank, world, first.get("first_gpu", 0))
    if world > 1:
        backend, timeout = "nccl" if on_gpu else "gloo", timedelta(seconds=60)
        join(rank=rank, world_size=world, address="127.0.0.1", port=port, backend=backend, timeout=timeout)
    for case in cases:
        args = dict(case["args"])
        sizes = {name: args.pop(name, 1) for name in ("replicate", "context", "tensor", "pipeline")}
        ranks = Ranks(rank, world, **sizes)
        result = getattr(importlib.import_module(case.get("module", module)), case["function"])(ranks, folder, **args)
        (folder / f"{case['name']}-{rank}.json").write_text(json.dumps(result))
        if on_gpu:
            ranks.leave()
        elif torch.distributed.is_initialized():  # the case may have left; no interpreter exit follows
            ranks.wait()  # others may still read from this rank's sockets
        if case is not cases[-1]:  # a process has one layout of Megatron-core at a time
            sys.modules["megatron.core.parallel_state"].destroy_model_parallel()


class _Running:
    """The forked processes of one case, or of several."""

    def __init__(self, module: str, folder: Path, cases: list[dict[str, Any]]) -> None:
        self.name, self.started = ", ".join(case["name"] for case in cases), time.monotonic()
        self.failed, self.pids = False, set[int]()
        port = free_port()
        for rank in range(cases[0]["world"]):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    _rank(module, folder, cases, rank, port)
                    code = 0
                except BaseException:  # noqa: BLE001  the process ends here
                    _say(f"--- {self.name}, rank {rank}\n{traceback.format_exc()}")
                finally:
                    _exit_function()  # stop Megatron-core's save workers, which keep pipes open
                    os._exit(code)
            self.pids.add(pid)

    def look(self) -> bool:
        """Return whether the case is still running: no rank has failed, and not all have ended."""
        for pid in list(self.pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.pids.discard(pid)
                self.failed |= status != 0
        if not self.pids:
            _say(f"{self.name}: {time.monotonic() - self.started:.1f} s")
        return bool(self.pids) and not self.failed

    def end(self) -> None:
        """Kill all remaining processes."""
        if self.pids:
            _say(f"--- {self.name}: {len(self.pids)} ranks were still running")
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run_all(module: str, folder: Path, cases: list[dict[str, Any]], deadline: float) -> bool:
    """Run cases up to the first failure, with as many at once as each case allows."""
    left, running, failed = cases[::-1], list[_Running](), False
    while (left or running) and not failed and time.monotonic() < deadline:
        while left and len(running) < left[-1].get("at_once", 1) and not (running and left[-1].get("is_after")):
            running.append(_Running(module, folder, _taken(left)))
        going = [case for case in running if case.look()]
        failed = any(case.failed for case in running)
        running = running if failed else going
        time.sleep(0.01)
    if running:
        time.sleep(0.5)  # the others may say why, too
    for case in running:
        case.end()
    return not failed and not left and not running


def _taken(left: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the next case, and those that run in the same processes, from the end of `left`."""
    cases = [left.pop()]
    while left and len(cases) < left[-1].get("together", 1):
        if left[-1]["world"] != cases[0]["world"] or left[-1].get("is_after"):
            break
        cases.append(left.pop())
    return cases


def _run_afresh(case: dict[str, Any], words: list[str], deadline: float) -> bool:
    """Run each rank in a new process, since a forked one cannot use CUDA."""
    started = time.monotonic()
    command = [sys.executable, "-W", "ignore", __file__, *words]
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(case["world"])]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stderr=log, text=True)
            for rank, log in enumerate(logs)
        ]
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(case))
            rank.stdin.close()
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() for rank in ranks):
                time.sleep(2.0)  # the others may say why, too
                break
            time.sleep(0.05)
        for rank in ranks:
            rank.kill()
        codes = [rank.wait() for rank in ranks]
        for number, (code, log) in enumerate(zip(codes, logs, strict=True)):
            log.seek(0)
            if code:
                _say(f"--- {case['name']}, rank {number} ended with {code}\n{log.read()[-3000:]}")
    _say(f"{case['name']}: {time.monotonic() - started:.1f} s")
    return not any(codes)


def _import_models(folder: Path) -> None:
    """Import the code of all models in the folder, which forked ranks share."""
    import torch

    from furlong.models.hf_config import load_config
    from furlong.models.hf_model import build_model

    with torch.device("meta"):
        for file in sorted(folder.glob("*/config.json")):
            build_model(load_config(file.parent), seed=0)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main() -> None:
    module, folder, deadline_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    cases = json.load(sys.stdin)
    if len(sys.argv) == 6:  # run one rank of one case on a GPU
        _rank(module, folder, [cases], int(sys.argv[5]), int(sys.argv[4]))
        return
    importlib.import_module(module)
    if cases[0]["args"].get("device") != "cuda":
        _import_models(folder)
        # If gloo's thread for connections takes the core of a sender, which holds a lock, it polls until its time slice
        # ends. Here, a thread that wakes waits for a free core.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.freeze()  # garbage collection in forked ranks would copy all pages
    deadline = time.monotonic() + deadline_s
    if cases[0]["args"].get("device") == "cuda":  # process start dominates the run time
        with ThreadPoolExecutor(4 if ranks_possible() == device_count() else 1) as pool:  # 1 if ranks share a GPU
            words = [module, str(folder), str(deadline)]
            ok = all(list(pool.map(lambda case: _run_afresh(case, [*words, str(free_port())], deadline), cases)))
    else:
        ok = _run_all(module, folder, cases, deadline)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
