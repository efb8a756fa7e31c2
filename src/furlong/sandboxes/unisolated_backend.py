"""Sandbox without isolation: a private directory, and commands with the rights of this user, within limits."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from furlong.core.process_supervisor import delete_tree
from furlong.core.supervised_process import ProcessLimits, run_supervised
from furlong.errors import DataError, InfraError
from furlong.sandboxes.box_init import read_file, write_file
from furlong.sandboxes.code_sandbox import Executed, SandboxSpec

PREFIX = "furlong-sandbox-"
_MISSING = {
    "processes": "commands can signal other processes of this user and read their environment",
    "files": "commands can read and write all files of this user",
    "network": "commands can reach the network and servers of this machine",
}

logger = logging.getLogger(__name__)
_warned: list[bool] = []


class UnisolatedSandbox:
    """What `--sandbox-isolation none` makes of sandboxes on this machine."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.missing: dict[str, str] = dict(_MISSING)
        self._spec = spec
        self._root = ""
        self._folder = -1  # descriptor of it, so that a command cannot replace it by a link

    async def open(self) -> None:
        """Make the directory. Raises InfraError, also if the limits require a kind of isolation."""
        if required := self._spec.limits.require:
            raise InfraError(f"--sandbox-isolation none does not isolate {', '.join(required)}, which limits require")
        if not _warned:
            _warned.append(True)
            logger.warning("--sandbox-isolation none: sandboxes isolate nothing: %s", "; ".join(_MISSING.values()))
        try:
            self._root = tempfile.mkdtemp(prefix=PREFIX)
            self._folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise InfraError(f"a sandbox needs a temporary directory: {error}; free space, or set TMPDIR") from error

    async def exec(self, command: str, timeout: float | None = None, *, stdin: str = "") -> Executed:
        """Run a shell command. Raises InfraError if the sandbox is closed or the machine cannot start processes."""
        self._check_open()
        limits = self._spec.limits
        started = time.monotonic()
        ended = await run_supervised(
            ["/bin/sh", "-c", command],
            stdin=stdin.encode(),
            directory=self._root,
            environment=self._spec.variables(self._root, self._root),
            limits=ProcessLimits(
                limits.memory_bytes, limits.max_processes, limits.cpu_s, limits.file_bytes, limits.open_files
            ),
            timeout_s=limits.timeout_s if timeout is None else timeout,
            output_bytes=limits.output_bytes,
        )
        out, err = [output.decode("utf-8", "replace") for output in (ended.stdout, ended.stderr)]
        return Executed(ended.code, out, err, time.monotonic() - started, ended.reason)

    async def write(self, path: str, content: str | bytes) -> None:
        """Write a file, without following links that a command made. Raises DataError for a path outside."""
        data = content.encode() if isinstance(content, str) else content
        await self._access(lambda: write_file(self._folder, path, data))

    async def read(self, path: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError, and DataError for a path outside or another kind."""
        return await self._access(lambda: read_file(self._folder, path, self._spec.limits.file_bytes))

    async def close(self) -> None:
        """Delete the directory."""
        root, self._root = self._root, ""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1
        if root:
            try:
                await asyncio.to_thread(delete_tree, root)
            except OSError as error:
                logger.warning("the folder of a sandbox could not be deleted: %s", error)

    def _check_open(self) -> None:
        if not self._root:
            raise InfraError("the sandbox is closed; use it in the body of `async with sandbox()`")
        os.fchmod(self._folder, 0o700)  # commands may have taken the rights away

    async def _access(self, use: Callable[[], Any]) -> Any:
        self._check_open()
        try:
            return await asyncio.to_thread(use)
        except ValueError as error:
            raise DataError(str(error)) from error
