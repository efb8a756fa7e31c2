"""Runs a function on several trainer ranks: one interpreter is started, which forks the ranks of one run after another.

    python tests/helpers/ranks_zoo.py MODULE FOLDER DEADLINE_S < cases.json

A case is {"name", "function", "world", "args"}, with "module" where the function is in another one. It is started when
fewer than its "at_once" cases (1) run, and with "is_after" when none does: it needs what those before it have made.
MODULE.function(ranks, folder, **args) runs on each rank, joined over gloo, or nccl where args have the device "cuda",
and what it returns goes into FOLDER/<name>-<rank>.json. A rank that fails ends its case, and nothing outlives the
deadline.

NCCL refuses two ranks on one GPU of one machine. With FURLONG_TEST_RANKS_PER_GPU=N each rank that shares a GPU calls
itself another machine, so that NCCL joins them by sockets: slow, with the results of as many GPUs.
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
    """Run all cases; what each rank returned, by the case's name."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, module, str(folder), str(deadline_s)],
        input=json.dumps(cases),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=deadline_s + 20,
        check=False,
    )
    first = max(done.stderr.find("Traceback"), 0)  # before it come warnings, after it ranks that end because of it
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
    """Run groups of cases, each in as many processes as its number says; what each rank returned, by the case's name.

    MODULE.together gets the cases of a group and `common`, so that they share what a process takes to warm up. With
    `first_later`, the number of the first group that needs what others have saved, two groups are run at once.
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
    """How many ranks with CUDA this machine can hold."""
    return device_count() * int(os.environ.get("FURLONG_TEST_RANKS_PER_GPU", "1"))


def device_count() -> int:
    """The GPUs of this machine, asked without a CUDA context."""
    import torch

    return torch.cuda.device_count()


def take_gpu(rank: int, world: int, first: int = 0) -> None:
    """Make a GPU the device of this process, which has not called NCCL yet; that of rank 0 is the `first`."""
    import torch

    if world > device_count():
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device((first + rank) % device_count())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank(module: str, folder: Path, case: dict[str, Any], rank: int, port: int) -> None:
    import torch.distributed

    from furlong.training.ranks import Ranks, join

    args = dict(case["args"])
    sizes = {name: args.pop(name, 1) for name in ("replicate", "context", "tensor", "pipeline")}
    ranks = Ranks(rank, case["world"], **sizes)
    on_gpu = args.get("device") == "cuda"
    if on_gpu:
        take_gpu(rank, case["world"], case.get("first_gpu", 0))
    if ranks.world_size > 1:
        backend, timeout = "nccl" if on_gpu else "gloo", timedelta(seconds=60)
        join(rank=rank, world_size=case["world"], address="127.0.0.1", port=port, backend=backend, timeout=timeout)
    result = getattr(importlib.import_module(case.get("module", module)), case["function"])(ranks, folder, **args)
    (folder / f"{case['name']}-{rank}.json").write_text(json.dumps(result))
    if on_gpu:
        ranks.leave()
    elif torch.distributed.is_initialized():  # a case may have left; a forked rank ends without its interpreter's end
        ranks.wait()  # a rank that ends closes what the others may be reading from


class _Running:
    """The processes of one case, forked."""

    def __init__(self, module: str, folder: Path, case: dict[str, Any]) -> None:
        self.name, self.started, self.failed = case["name"], time.monotonic(), False
        self.pids = set[int]()
        port = free_port()
        for rank in range(case["world"]):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    _rank(module, folder, case, rank, port)
                    code = 0
                except BaseException:  # noqa: BLE001  the process ends here
                    _say(f"--- {self.name}, rank {rank}\n{traceback.format_exc()}")
                finally:
                    _exit_function()  # else what Megatron-core started to save outlives it, and holds its pipes
                    os._exit(code)
            self.pids.add(pid)

    def look(self) -> bool:
        """Whether it goes on: no rank has failed, and not all have ended."""
        for pid in list(self.pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.pids.discard(pid)
                self.failed |= status != 0
        if not self.pids:
            _say(f"{self.name}: {time.monotonic() - self.started:.1f} s")
        return bool(self.pids) and not self.failed

    def end(self) -> None:
        """Kill what still runs."""
        if self.pids:
            _say(f"--- {self.name}: {len(self.pids)} ranks were still running")
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run_all(module: str, folder: Path, cases: list[dict[str, Any]], deadline: float) -> bool:
    """Run cases, up to the first that fails; as many at once as each of them allows, which wait for one another."""
    left, running, failed = cases[::-1], list[_Running](), False
    while (left or running) and not failed and time.monotonic() < deadline:
        while left and len(running) < left[-1].get("at_once", 1) and not (running and left[-1].get("is_after")):
            running.append(_Running(module, folder, left.pop()))
        going = [case for case in running if case.look()]
        failed = any(case.failed for case in running)
        running = running if failed else going
        time.sleep(0.01)
    if running:
        time.sleep(0.5)  # the others may say why, too
    for case in running:
        case.end()
    return not failed and not left and not running


def _run_afresh(case: dict[str, Any], words: list[str], deadline: float) -> bool:
    """Run the ranks in processes of their own: a forked one cannot use CUDA."""
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


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main() -> None:
    module, folder, deadline_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    cases = json.load(sys.stdin)
    if len(sys.argv) == 6:  # one rank of one case, on a GPU
        _rank(module, folder, cases, int(sys.argv[5]), int(sys.argv[4]))
        return
    importlib.import_module(module)
    gc.freeze()  # a collection in a forked rank would copy every page that holds an object
    deadline = time.monotonic() + deadline_s
    if cases[0]["args"].get("device") == "cuda":  # every rank starts by itself, which takes longer than what it does
        with ThreadPoolExecutor(4 if ranks_possible() == device_count() else 1) as pool:  # sharers wait for each other
            words = [module, str(folder), str(deadline)]
            ok = all(list(pool.map(lambda case: _run_afresh(case, [*words, str(free_port())], deadline), cases)))
    else:
        ok = _run_all(module, folder, cases, deadline)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
