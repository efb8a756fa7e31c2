"""Run Ray's workers as forks of one process that has everything imported, which saves seconds in each.

`forked_engines` does this for engine servers.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import warm_python
from runs import FORKED, print_to

PRELOADED = ("furlong.wiring.cluster", "furlong.cluster.rank_actor")
OPTION = "--python_worker_command="
START_S = 60.0


@dataclass(frozen=True)
class RayWorkers:
    """Forks for the workers of Ray clusters. `folder` contains the commands and a log of the imports."""

    folder: Path

    @property
    def log(self) -> Path:
        """What the imports have printed."""
        return self.folder / "log.txt"

    def use(self) -> None:
        """Let the clusters that this process starts fork their workers, unless these may need CUDA."""
        if torch.backends.cuda.is_built():
            return
        from ray._private import services  # after conftest.py has set its environment

        start: Any = services.start_ray_process
        python = self.folder / "bin" / "python"

        def started(command: list[str], *arguments: Any, **options: Any) -> Any:
            words = [word.replace(OPTION + sys.executable, f"{OPTION}{python}") for word in command]
            return start(words, *arguments, **options)

        services.start_ray_process = started


@contextmanager
def forked_workers(folder: Path) -> Generator[RayWorkers]:
    """Start the process for workers, and use it in this process."""
    workers = RayWorkers(folder)
    workers.log.touch()
    if torch.backends.cuda.is_built():
        yield workers
        return
    process: Any = FORKED.Process(target=_serve, args=(workers, os.getpid()))
    process.start()
    process.join(START_S)
    assert process.exitcode == 0, workers.log.read_text()
    warm_python.check_commands(folder, PRELOADED[0], os.environ)
    workers.use()
    yield workers


def _serve(workers: RayWorkers, owner: int) -> None:
    """Body of the process for workers, which ends when `owner` does, and of each worker."""
    print_to(workers.log)
    read = [prefix for prefix in warm_python.READ_ON_IMPORT if prefix != "RAY_"]
    variables = warm_python.import_variables(os.environ, read, warm_python.READ_LATER)
    warm_python.write_clients(workers.folder, variables, read, warm_python.READ_LATER)
    preloaded: list[str] = [*PRELOADED]
    if find_spec("megatron"):
        from furlong.training.megatron import megatron_compat

        megatron_compat.prepare()
        preloaded.append("furlong.training.megatron.megatron_backend")
    request = warm_python.serve(workers.folder, owner, preloaded)
    _show(request[3])
    tempfile.tempdir = None  # is read from TMPDIR again
    os.environ.update(request[3])  # before Ray is imported: it reads its settings and job id only then
    _enter_environments_here()
    try:
        warm_python.execute(*request, commands=workers.folder / "bin")
    finally:
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  as an interpreter does at its end


def _enter_environments_here() -> None:
    """Let Ray set a worker's environment variables without starting a new interpreter for them."""
    import runpy

    from ray._private.runtime_env import context
    from ray._private.utils import update_envs

    def exec_worker(this: context.RuntimeEnvContext, words: list[str], _language: Any) -> None:
        update_envs(this.env_vars)
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")

    context.RuntimeEnvContext.exec_worker = exec_worker


def _show(environment: Mapping[str, str]) -> None:
    """Write an environment where the kernel shows that of this process; what a fork inherits from there goes last."""
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    ordered = sorted(environment.items(), key=lambda item: os.environ.get(item[0]) == item[1])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in ordered)
    os.environ.clear()  # the C library has pointers to there
    ctypes.memmove(first, text[: end - first].ljust(end - first, b"\0"), end - first)
