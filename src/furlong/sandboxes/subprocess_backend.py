"""Sandbox on this machine: bubblewrap, in which `box_init` runs commands, with files in memory.

One process tree lives as long as the sandbox. Nothing of it is on a disk, and all of it ends with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from dataclasses import asdict
from typing import Any

from furlong.errors import ConfigError, DataError, InfraError
from furlong.sandboxes.box_init import HEADER, WORK, frame
from furlong.sandboxes.bubblewrap import UNISOLATED, bubblewrap_command, find_bubblewrap, free_uid
from furlong.sandboxes.code_sandbox import SEARCHED, Executed, SandboxSpec

_GRACE_S = 10.0  # for the first process to kill the others and to reply
_START_S = 60.0
_working: set[bool] = set()  # the ways that have worked in this process: with root's capabilities, or without


class SubprocessSandbox:
    """A process tree in its own namespaces. Commands run one after the other."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.missing: dict[str, str] = {}
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> None:
        """Start the process tree. Raises ConfigError if this machine cannot isolate, and InfraError."""
        program = find_bubblewrap()
        if program is None:
            raise ConfigError(
                "sandboxes on this machine need bubblewrap, and bwrap is not in PATH; run 'apt install bubblewrap' or "
                f"pip install 'furlong-rl[sandbox]', use backend='docker' or 'e2b', {UNISOLATED}"
            )
        uid = free_uid()
        refusals: list[str] = []
        for is_root in (False,) if uid is None else _working or (True, False):
            try:
                refusal = await self._start(program, uid, is_root=is_root)
            except PermissionError as error:
                refusal = str(error)
            except OSError as error:
                raise InfraError(f"a sandbox cannot be started: {error}; see ulimit -u and -n") from error
            if not refusal:
                _working.add(is_root)
                return
            refusals.append(f"{'as root' if is_root else 'with a user namespace'}: {refusal}")
        if _working:
            raise InfraError(f"a sandbox cannot be started: {'; '.join(refusals)}")
        if "source path" in refusals[-1]:
            fix = "let all users enter that folder, for example with Python in /opt"
        elif "nknown option" in refusals[-1]:
            fix = (
                "install bubblewrap 0.8 or newer, or pip install 'furlong-rl[sandbox]' and remove the old one from PATH"
            )
        else:
            fix = (
                "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone and "
                "kernel.apparmor_restrict_unprivileged_userns; for a container: --privileged, or "
                "--security-opt seccomp=unconfined --security-opt systempaths=unconfined)"
            )
        raise ConfigError(
            f"this machine does not let bubblewrap isolate processes ({'; '.join(refusals)}); {fix}, use "
            f"backend='docker' or 'e2b', {UNISOLATED}"
        )

    async def _start(self, program: str, uid: int | None, *, is_root: bool) -> str:
        """Start the process tree; returns why it was refused, "" if it was not. Raises OSError."""
        limits = self._spec.limits
        words, numbers = bubblewrap_command(
            program,
            uid=uid if is_root else None,
            storage_bytes=limits.storage_bytes,
            readable=limits.readable,
            network=limits.network,
        )
        user: dict[str, Any] = {}
        if uid is not None and not is_root:
            user = {"user": uid, "group": uid, "extra_groups": []}
        pipe = asyncio.subprocess.PIPE
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *words, stdin=pipe, stdout=pipe, stderr=pipe, env={"PATH": SEARCHED}, cwd="/", start_new_session=True,
                pass_fds=numbers, **user,
            )  # fmt: skip
        finally:
            for number in numbers:
                os.close(number)
        setup = {"uid": uid if is_root else None, "limits": asdict(limits), "has_network": limits.network}
        if await self._exchange(setup, b"", _START_S) is not None:
            return ""
        await self.close()
        assert process.stderr is not None
        text = (await process.stderr.read()).decode("utf-8", "replace").strip()
        return text.splitlines()[-1] if text else f"bwrap did not start within {_START_S:g} s"

    async def exec(self, command: str, timeout: float | None = None, *, stdin: str = "") -> Executed:
        """Run a shell command, after those before it. Raises InfraError if the sandbox is closed or was lost."""
        limits = self._spec.limits
        seconds = limits.timeout_s if timeout is None else timeout
        request = {
            "op": "exec",
            "command": command,
            "timeout_s": seconds,
            "output_bytes": limits.output_bytes,
            "environment": self._spec.variables(WORK, "/tmp"),
        }
        async with self._turn:
            self._check_open()
            started = time.monotonic()
            answer = await self._exchange(request, stdin.encode(), seconds + _GRACE_S)
            took = time.monotonic() - started
        if answer is None:
            await self.close()
            return Executed(None, "", "", took, "the first process of its sandbox ended")
        reply, data = answer
        out, err = (part.decode("utf-8", "replace") for part in (data[: reply["out"]], data[reply["out"] :]))
        return Executed(reply["code"], out, err, took, reply["reason"])

    async def write(self, path: str, content: str | bytes) -> None:
        """Write a file, without following links that a command made. Raises DataError for a path outside."""
        await self._access("write", path, content.encode() if isinstance(content, str) else content)

    async def read(self, path: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError, and DataError for a path outside or another kind."""
        return await self._access("read", path, b"")

    async def close(self) -> None:
        """End the processes, and with them the files."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.shield(_end(process))

    async def _access(self, op: str, path: str, data: bytes) -> bytes:
        async with self._turn:
            self._check_open()
            answer = await self._exchange({"op": op, "path": path}, data, _START_S)
        if answer is None:
            await self.close()
            raise InfraError("the first process of the sandbox ended")
        reply, content = answer
        if "absent" in reply:
            raise FileNotFoundError(reply["absent"])
        if "refused" in reply:
            raise DataError(reply["refused"])
        return content

    def _check_open(self) -> None:
        if self._process is None:
            raise InfraError("the sandbox is closed; use it in the body of `async with sandbox()`")

    async def _exchange(
        self, request: dict[str, Any], data: bytes, timeout_s: float
    ) -> tuple[dict[str, Any], bytes] | None:
        """Send a request and return its reply, None if the sandbox ended. A cancellation ends the command first."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        replying = asyncio.create_task(self._reply(process, request, data))
        ending = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({replying, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            process.stdin.write(frame({"op": "cancel"}))
            await asyncio.wait({replying}, timeout=_GRACE_S)
            if not replying.done():
                replying.cancel()
                await self.close()
            raise
        finally:
            ending.cancel()
        if replying.done():
            return replying.result()
        replying.cancel()
        return None

    async def _reply(
        self, process: asyncio.subprocess.Process, request: dict[str, Any], data: bytes
    ) -> tuple[dict[str, Any], bytes] | None:
        source, sink = process.stdout, process.stdin
        assert source is not None
        assert sink is not None
        try:
            sink.write(frame(request, data))
            await sink.drain()
            header, body = HEADER.unpack(await source.readexactly(HEADER.size))
            return json.loads(await source.readexactly(header)), await source.readexactly(body)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
            await process.stdout.read()  # the first process has ended, too
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # the first process is killed with its parent
        await process.wait()
