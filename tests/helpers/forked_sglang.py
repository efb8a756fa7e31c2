"""Run SGLang as forks of one process that has imported it, which saves ten seconds of imports in each process.

`forked_engines` does this for `furlong serve`.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

import warm_python
from furlong.inference.supervisor import process as host

PRELOADED = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    "furlong.transfer.device_checksum",
)
READ_ON_IMPORT = (*warm_python.READ_ON_IMPORT, "SGLANG_", "SGL_")
READ_LATER = (
    "SGLANG_CPU_OMP_THREADS_BIND",  # by a scheduler, before it has a model
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",  # by each /health
    "SGLANG_HOST_IP",  # by network.get_local_ip_auto
)
FORKED = {"sglang.launch_server", "sglang_router.launch_router"}  # modules; the second one imports SGLang, too
NUM_GUARD_WORDS = 6  # before a command of LocalHost
LOG = logging.getLogger(__name__)


def python(environment: Mapping[str, str]) -> Path:
    """Return a command like `python` for scripts that import SGLang with these variables."""
    return _started(environment) / "bin" / "python"


class ForkedServer:
    """The part of `subprocess.Popen` that `LocalHost` uses."""

    started: ClassVar[list[ForkedServer]] = []  # a server without a connection would be killed

    def __init__(self, command: list[str], environment: Mapping[str, str], log: int) -> None:
        address = str(_started(environment) / "socket")
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), log, log]
            self._connection, self.pid = warm_python.request(address, command, dict(environment), streams)
        self._exit_code: int | None = None
        self.started.append(self)

    def poll(self) -> int | None:
        """Return the exit code, or None while the server runs."""
        if self._exit_code is None:
            try:
                answer = self._connection.recv(8, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            self._connection.close()
            self._exit_code = int.from_bytes(answer, "big", signed=True)
        return self._exit_code


def fork_servers(patch: pytest.MonkeyPatch) -> None:
    """Let `LocalHost` fork SGLang servers and routers; it starts other commands as before."""

    def start(words: list[str], *, env: Mapping[str, str], stdout: Any, **options: Any) -> Any:
        command = words[NUM_GUARD_WORDS:]
        if command[1:2] == ["-m"] and not FORKED.isdisjoint(command[2:4]):
            return ForkedServer(["python", *command[1:]], env, stdout.fileno())
        return subprocess.Popen(words, env=env, stdout=stdout, **options)

    patch.setattr(host, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))


def _started(environment: Mapping[str, str]) -> Path:
    """Return the folder of a process that has imported SGLang with the variables of this environment."""
    variables = warm_python.import_variables(environment, READ_ON_IMPORT, READ_LATER)
    return _start(frozenset(variables.items()))


@functools.cache
def _start(variables: frozenset[tuple[str, str]]) -> Path:
    """Start the process, unless another worker of this session has started it."""
    session = psutil.Process(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid())
    name = hashlib.sha256(repr((session.pid, session.create_time(), sorted(variables))).encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"furlong-sglang-{name[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "bin").exists():
            LOG.warning("a process imports SGLang with %s", ", ".join(sorted(name for name, _ in variables)))
            others = {n: v for n, v in os.environ.items() if not n.startswith(READ_ON_IMPORT)}
            warm_python.start(
                folder, PRELOADED, environment=others | dict(variables), read_on_import=READ_ON_IMPORT,
                read_later=READ_LATER, owner=session.pid,
            )  # fmt: skip
    return folder
