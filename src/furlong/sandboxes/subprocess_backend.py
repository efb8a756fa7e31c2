"""Sandbox on this machine: namespaces of the Linux kernel, resource limits and a private directory.

Commands see this machine's files read-only, without home, the driver's directory, /run and other programs' /tmp. They
have no network but a loopback interface of their own. Where the kernel refuses namespaces (containers with the default
rules of Docker, macOS), `missing` has what is not isolated, and a warning is logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from furlong.core.supervised_process import Isolation, ProcessLimits, run_supervised
from furlong.errors import DataError, InfraError
from furlong.sandboxes.code_sandbox import Executed, SandboxSpec

PREFIX = "furlong-sandbox-"
WORK = "work"
_SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_REACHES = {
    "processes": "it can signal other processes of this user and read their environment",
    "files": "it can read and write files of this user",
    "network": "it can reach the network",
}

logger = logging.getLogger(__name__)
_warned: set[str] = set()


class SubprocessSandbox:
    """A private directory, and commands in namespaces."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.missing: dict[str, str] = {}
        self._spec = spec
        self._root: str | None = None

    async def open(self) -> None:
        """Make the directory, and find out what the kernel isolates. Raises InfraError."""
        try:
            self._root = tempfile.mkdtemp(prefix=PREFIX)
            os.mkdir(os.path.join(self._root, WORK))
        except OSError as error:
            raise InfraError(f"a sandbox needs a temporary directory: {error}; free space, or set TMPDIR") from error
        await self.exec("true")
        if lacking := [kind for kind in self._spec.limits.require if kind in self.missing]:
            reasons = "; ".join(f"{kind}: {self.missing[kind]}" for kind in lacking)
            raise InfraError(f"this machine does not isolate what the sandbox requires ({reasons}); use Docker or E2B")

    async def exec(self, command: str, timeout: float | None = None, *, stdin: str = "") -> Executed:
        """Run a shell command. Raises InfraError if the sandbox is closed or the machine cannot start processes."""
        root, limits = self._opened(), self._spec.limits
        seconds = limits.timeout_s if timeout is None else timeout
        started = time.monotonic()
        ended = await run_supervised(
            ["/bin/sh", "-c", command],
            stdin=stdin.encode(),
            directory=os.path.join(root, WORK),
            environment=self._environment(root),
            limits=ProcessLimits(
                limits.memory_bytes, limits.max_processes, limits.cpu_s, limits.file_bytes, limits.open_files
            ),
            isolation=Isolation(root, _hidden(), _kept(limits.readable, network=limits.network), limits.network),
            timeout_s=seconds,
            output_bytes=limits.output_bytes,
        )
        self._note(ended.missing)
        out, err = [output.decode("utf-8", "replace") for output in (ended.stdout, ended.stderr)]
        return Executed(ended.code, out, err, time.monotonic() - started, ended.reason)

    async def write(self, path: str, content: str | bytes) -> None:
        """Write a file, without following links that a command made. Raises DataError for a path outside."""
        data = content.encode() if isinstance(content, str) else content
        await asyncio.to_thread(self._at, path, lambda folder, name: _write(folder, name, data), makes=True)

    async def read(self, path: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError, and DataError for a path outside or another kind."""
        limit = self._spec.limits.file_bytes
        return await asyncio.to_thread(self._at, path, lambda folder, name: _read(folder, name, path, limit))

    async def close(self) -> None:
        """Delete the directory."""
        root, self._root = self._root, None
        if root is not None:
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)

    def _opened(self) -> str:
        if self._root is None:
            raise InfraError("the sandbox is closed; use it in the body of `async with sandbox()`")
        return self._root

    def _environment(self, root: str) -> dict[str, str]:
        has_files = "files" not in self.missing
        home = f"/tmp/{WORK}" if has_files else os.path.join(root, WORK)
        return {
            "PATH": f"{os.path.dirname(sys.executable)}:{_SEARCHED}",
            "HOME": home,
            "TMPDIR": "/tmp" if has_files else root,
            "LANG": "C.UTF-8",
            **self._spec.environment,
        }

    def _note(self, missing: Any) -> None:
        self.missing = dict(missing)
        for kind, reason in self.missing.items():
            if kind not in _warned:
                _warned.add(kind)
                logger.warning(
                    "sandboxed code is not isolated from this machine's %s: %s (%s); use the docker or e2b backend for "
                    "code that you do not trust", kind, _REACHES[kind], reason,
                )  # fmt: skip

    def _at(self, path: str, use: Callable[[int, str], Any], *, makes: bool = False) -> Any:
        """Call `use` with a descriptor of the file's folder and its name, reached without following links."""
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts:
            raise DataError(f"{path!r} is not a path in the sandbox; give one relative to its working directory")
        folder = os.open(os.path.join(self._opened(), WORK), os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts[:-1]:
                if makes:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                inner = _open(part, os.O_RDONLY | os.O_DIRECTORY, folder, path)
                os.close(folder)
                folder = inner
            return use(folder, parts[-1])
        finally:
            os.close(folder)


def _open(name: str, flags: int, folder: int, path: str) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path} in the sandbox") from None
    except OSError as error:  # a link, or a file where a folder is expected
        raise DataError(
            f"{path} in the sandbox: {name} cannot be opened ({error.strerror}); links are refused"
        ) from error


def _write(folder: int, name: str, data: bytes) -> None:
    number = _open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, folder, name)
    with os.fdopen(number, "wb") as file:
        file.write(data)


def _read(folder: int, name: str, path: str, limit: int) -> bytes:
    number = _open(name, os.O_RDONLY | os.O_NONBLOCK, folder, path)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            raise DataError(f"{path} in the sandbox is not a file of at most {limit} bytes")
        with os.fdopen(number, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(number)


def _hidden() -> list[str]:
    """Return the folders of this machine whose content sandboxes do not see."""
    folders = {os.path.expanduser("~"), os.getcwd(), "/tmp", "/var/tmp", "/run", os.path.realpath("/tmp")}
    return sorted(path for path in folders if path != "/" and os.path.isabs(path))


def _kept(readable: tuple[str, ...], *, network: bool) -> list[str]:
    """Return what they do see, although it may be in a hidden folder: Python with its packages, and `readable`."""
    python = (sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix))
    names = (os.path.realpath("/etc/resolv.conf"),) if network else ()
    return list(dict.fromkeys([*python, *names, *(os.path.abspath(path) for path in readable)]))
