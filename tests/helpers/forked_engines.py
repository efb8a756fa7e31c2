"""Run engine servers as forked processes, which avoids the import time of a new interpreter.

`faulty_engines` contains faults for these servers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from furlong.inference.supervisor.process import LocalHost, LocalProcess
from runs import FORKED, Fault, command_in_child

SERVE = ["-m", "furlong", "serve"]


class _AsPopen:
    """The part of `subprocess.Popen` that `LocalProcess` uses."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode


class ForkedEngines:
    """Starts the `furlong serve` commands of runs; `fault` is called in each process before it serves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fault: Fault | None = None
        self.started: dict[int, list[str]] = {}  # command by process id
        start = LocalHost.start

        async def forked(
            host: LocalHost,
            command: Sequence[str],
            *,
            log: Path,
            env: Mapping[str, str] | None = None,
            ports: Sequence[int] = (),
        ) -> LocalProcess:
            if list(command[1:4]) != SERVE:
                return await start(host, command, log=log, env=env, ports=ports)
            log.parent.mkdir(parents=True, exist_ok=True)
            await host.release_ports(ports)
            words = [*command[3:]]
            process = FORKED.Process(target=_serve, args=(words, dict(env or {}), log, self.fault), daemon=True)
            process.start()
            made: Any = _AsPopen(process)
            self.started[made.pid] = words
            return LocalProcess(made, log)

        patch.setattr(LocalHost, "start", forked)

    def alive(self) -> list[int]:
        """Return the ids of the running processes, in start order."""
        return [pid for pid in self.started if psutil.pid_exists(pid)]

    def of(self, model: Path) -> int:
        """Return the id of the process that serves this model."""
        [pid] = [pid for pid in self.alive() if str(model) in self.started[pid]]
        return pid


def _serve(words: list[str], env: dict[str, str], log: Path, fault: Fault | None) -> None:
    """Body of the forked process: run the command with the fault."""
    os.setsid()
    os.environ.update(env)
    command_in_child(words, log, fault)
