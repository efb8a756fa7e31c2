"""Run a command under `process_supervisor`: with limits, bounded output, and no process left at its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from furlong.errors import InfraError

MAX_OUTPUT = 1 << 20
_SUPERVISOR = str(Path(__file__).with_name("process_supervisor.py"))
_ENDS_WITHIN_S = 10.0  # for the supervisor to kill the processes, before it is killed itself
MARK = "_FURLONG_COMMAND"  # environment variable of all processes of one command: who started it, and a random word
_FINDS_PYTHON = ("PYTHONHOME", "LD_LIBRARY_PATH")  # that the supervisor's interpreter may need to start


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a command; None is no limit.

    memory_bytes: resident memory of all processes together, and writable memory of each (Linux). max_processes: at
    one time. cpu_s: CPU seconds of each process. file_bytes: size of each file. open_files: of each process.
    """

    memory_bytes: int | None = None
    max_processes: int | None = None
    cpu_s: int | None = None
    file_bytes: int | None = None
    open_files: int | None = None


@dataclass(frozen=True)
class Ended:
    """The end of a command. code: exit code, negative for a signal, None if it was killed by furlong for `reason`.

    stdout, stderr: their last bytes.
    """

    code: int | None
    reason: str = ""
    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def ending(self) -> str:
        """Describe how the command ended, such as "exit code 1"."""
        return ending_of(self.code, self.reason)


def ending_of(code: int | None, reason: str) -> str:
    """Describe an end with this exit code, negative for a signal; the reason if furlong killed the command."""
    if code is None:
        return reason
    if code >= 0:
        return f"exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"


async def run_supervised(
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    directory: str,
    environment: Mapping[str, str],
    limits: ProcessLimits | None = None,
    timeout_s: float | None = None,
    output_bytes: int = MAX_OUTPUT,
    temporary: str | None = None,
) -> Ended:
    """Run a command to its end, or for `timeout_s`; all processes that it started have ended when this returns.

    output_bytes: of stdout, and of stderr, are kept, from the end. temporary: directory in which the supervisor makes
    the command's TMPDIR, which it deletes at the end, also after a kill of this process. A cancellation ends the
    processes, too.
    Raises InfraError if the machine cannot start the supervisor, or if a process is left.
    """
    supervisor = await Supervisor.start(
        command, directory=directory, environment=environment, limits=limits, temporary=temporary
    )
    process = supervisor.process
    streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
    readers = [asyncio.create_task(_tail(stream, output_bytes)) for stream in streams]
    writer = asyncio.create_task(_send(process, stdin))
    reason = ""
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            reason = f"not finished within {timeout_s:g} s"
            await supervisor.end()
        end = supervisor.take_report()
        await asyncio.wait(readers, timeout=_ENDS_WITHIN_S)  # a process that escaped keeps the pipes
        out, err = (reader.result() if reader.done() else b"" for reader in readers)
        return Ended(None if reason else end["code"], reason or end["reason"], out, err)
    finally:
        try:
            await supervisor.end()
        finally:
            for task in (*readers, writer):
                task.cancel()
            supervisor.close()


async def _send(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # a command need not read its input
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


class Supervisor:
    """A `process_supervisor` and its pipes. `process` has stdin and stdout of the command."""

    def __init__(self, process: asyncio.subprocess.Process, open_end: int, report: int, mark: str) -> None:
        self.process = process
        self._open_end, self._report, self._mark = open_end, report, mark

    @staticmethod
    async def start(
        command: Sequence[str],
        *,
        directory: str,
        environment: Mapping[str, str],
        limits: ProcessLimits | None = None,
        pipes_stderr: bool = True,
        temporary: str | None = None,
    ) -> Supervisor:
        """Start a command. Its stderr is that of this process without `pipes_stderr`.

        Raises InfraError if the machine cannot start the supervisor.
        """
        control, open_end = os.pipe()
        report, report_end = os.pipe()
        values = {
            "command": list(command),
            "directory": directory,
            "limits": asdict(limits or ProcessLimits()),
            "temporary": temporary,
            "control": control,
            "report": report_end,
        }
        pipe = asyncio.subprocess.PIPE
        words = [sys.executable, "-I", "-S", _SUPERVISOR, json.dumps(values)]
        inherited = {name: os.environ[name] for name in _FINDS_PYTHON if name in os.environ}
        mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            process = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, stderr=pipe if pipes_stderr else None,
                env={**inherited, **environment, MARK: mark}, pass_fds=(control, report_end), start_new_session=True,
            )  # fmt: skip
        except BaseException as error:
            os.close(open_end)
            os.close(report)
            if not isinstance(error, OSError):
                raise
            raise InfraError(
                f"a process cannot be started: {error}; see ulimit -u and the memory of the machine"
            ) from error
        finally:
            os.close(control)
            os.close(report_end)
        return Supervisor(process, open_end, report, mark)

    async def end(self) -> None:
        """Have the supervisor kill the processes; kill it if it does not."""
        if self._open_end >= 0:
            os.close(self._open_end)
            self._open_end = -1
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)  # the command may have stopped it
        try:
            async with asyncio.timeout(_ENDS_WITHIN_S):
                await self.process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
            self.kill_marked()

    def kill_marked(self) -> None:
        """Kill the processes that have the mark in their environment (Linux)."""
        word = f"{MARK}={self._mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if word in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def take_report(self) -> Mapping[str, Any]:
        """Return the end of the command, once the supervisor has ended.

        Kills what is left if the command has killed its supervisor. Raises InfraError for a fault of the machine.
        """
        os.set_blocking(self._report, False)
        text = b""
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._report, 1 << 16)
        if not text:
            self.kill_marked()
            return {"code": None, "reason": "its supervisor was killed"}
        end: dict[str, Any] = json.loads(text)
        if end["fault"]:
            raise InfraError(end["fault"])
        return end

    def close(self) -> None:
        """Close the pipe of reports."""
        os.close(self._report)


async def _tail(stream: asyncio.StreamReader, count: int) -> bytes:
    kept = bytearray()
    while part := await stream.read(1 << 16):
        kept += part
        del kept[:-count]
    return bytes(kept)
