"""Sandbox on E2B's servers, or on others that speak its protocol (E2B_DOMAIN), through the package `e2b`."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, TypeVar

from furlong.errors import ConfigError, InfraError
from furlong.sandboxes.code_sandbox import Executed, SandboxSpec

T = TypeVar("T")

ATTEMPTS = 3  # of reads and writes of files; commands are never repeated
STDIN = ".furlong-stdin"
_GRACE_S = 15.0  # for the server to report a command that `timeout` has killed
_KILLED = (124, 137, -9)  # exit codes of `timeout` and of what it kills


class E2BSandbox:
    """A virtual machine. The image is a template's name; memory and processes are limited by the template."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.missing: dict[str, str] = {}
        self._spec = spec
        self._remote: Any = None
        try:
            self._library: Any = import_module("e2b")
        except ImportError as error:
            raise ConfigError(
                f"backend 'e2b' needs the package e2b ({error}); pip install 'furlong-rl[e2b]'"
            ) from error
        if not os.environ.get("E2B_API_KEY"):
            raise ConfigError("backend 'e2b' needs an API key; set the environment variable E2B_API_KEY")

    async def open(self) -> None:
        """Start the machine. Raises InfraError."""
        limits = self._spec.limits
        create = self._library.AsyncSandbox.create
        self._remote = await self._infra(
            create(
                template=self._spec.image,
                timeout=int(limits.ttl_s),
                envs=dict(self._spec.environment),
                allow_internet_access=limits.network,
            )
        )

    async def exec(self, command: str, timeout: float | None = None, *, stdin: str = "") -> Executed:
        """Run a shell command; never repeated. Raises InfraError if the machine is lost."""
        limits = self._spec.limits
        seconds = limits.timeout_s if timeout is None else timeout
        if stdin:
            await self.write(STDIN, stdin)
        source = STDIN if stdin else "/dev/null"
        words = f"timeout -s KILL {seconds:g} /bin/sh -c {shlex.quote(command)} < {source}"
        began = time.monotonic()
        remote = self._opened()
        try:
            done = await self._infra(remote.commands.run(words, timeout=seconds + _GRACE_S))
        except self._library.CommandExitException as error:
            done = error
        took, kept = time.monotonic() - began, limits.output_bytes
        out, err = [(text or "")[-kept:] for text in (done.stdout, done.stderr)]
        if done.exit_code in _KILLED and took >= seconds:
            return Executed(None, out, err, took, f"not finished within {seconds:g} s")
        return Executed(int(done.exit_code), out, err, took)

    async def write(self, path: str, content: str | bytes) -> None:
        """Write a file. Raises InfraError."""
        files = self._opened().files
        await self._repeated(lambda: files.write(path, content))

    async def read(self, path: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError and InfraError."""
        files = self._opened().files
        try:
            return bytes(await self._repeated(lambda: files.read(path, format="bytes")))
        except self._library.FileNotFoundException as error:
            raise FileNotFoundError(f"there is no {path} in the sandbox") from error

    async def close(self) -> None:
        """Delete the machine."""
        remote, self._remote = self._remote, None
        if remote is not None:
            with contextlib.suppress(InfraError):  # it ends by itself after its limited life
                await self._infra(remote.kill())

    def _opened(self) -> Any:
        if self._remote is None:
            raise InfraError("the sandbox is closed; use it in the body of `async with sandbox()`")
        return self._remote

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(ATTEMPTS):
            try:
                return await self._infra(call())
            except InfraError:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError

    async def _infra(self, call: Awaitable[T]) -> T:
        """Await a call; errors of the service become InfraError, those of the key ConfigError."""
        library = self._library
        try:
            return await call
        except library.AuthenticationException as error:
            raise ConfigError(f"E2B refuses the key in E2B_API_KEY: {error}") from error
        except (library.CommandExitException, library.FileNotFoundException):
            raise
        except Exception as error:
            raise InfraError(f"the E2B sandbox failed: {type(error).__name__}: {error}") from error
