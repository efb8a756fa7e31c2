"""`sandbox`: a directory and processes for code that a policy wrote.

from furlong.sandboxes import sandbox

async with sandbox() as s:
    await s.write("solution.py", code)
    done = await s.exec("python -m pytest -q tests.py", timeout=30)
    passed = done.code == 0
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from furlong.core.text import did_you_mean
from furlong.errors import ConfigError, InfraError

ISOLATION = "FURLONG_SANDBOX_ISOLATION"  # environment variable, which worker processes inherit: "none" or "required"
_BACKENDS = {
    "subprocess": "furlong.sandboxes.subprocess_backend:SubprocessSandbox",
    "docker": "furlong.sandboxes.docker_backend:DockerSandbox",
    "e2b": "furlong.sandboxes.e2b_backend:E2BSandbox",
}
_UNISOLATED = "furlong.sandboxes.unisolated_backend:UnisolatedSandbox"  # in place of "subprocess"
SEARCHED = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MIB = 1 << 20
CREATE_ATTEMPTS = 3


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a sandbox.

    timeout_s: of one command, unless `exec` gets another one. memory_bytes: of all processes of a command together.
    storage_bytes: of all files on this machine, in memory: half for the working directory, a quarter each for /tmp and
    /dev/shm. max_processes: at one time. cpu_s: CPU seconds of a process, None for no limit. file_bytes: size of a
    file. open_files: of a process. output_bytes: of stdout and of stderr, of which the end is kept. network: whether
    commands reach the network, and servers of this machine. ttl_s: life of a sandbox on a server, which ends it then.
    require: kinds of isolation ("processes", "files", "network") without which a sandbox is refused.
    readable: files and folders of this machine that commands may read, such as a repository.
    """

    timeout_s: float = 60.0
    memory_bytes: int = 1024 * MIB
    storage_bytes: int = 1024 * MIB
    max_processes: int = 64
    cpu_s: int | None = None
    file_bytes: int = 256 * MIB
    open_files: int = 1024
    output_bytes: int = 64 << 10
    network: bool = False
    ttl_s: float = 3600.0
    require: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kinds = {"processes", "files", "network"}
        if unknown := sorted(set(self.require) - kinds):
            raise ConfigError(f"SandboxLimits.require has {unknown}; the kinds of isolation are {sorted(kinds)}")
        sizes = ("timeout_s", "memory_bytes", "storage_bytes", "max_processes", "file_bytes", "open_files")
        for name in (*sizes, "output_bytes", "ttl_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"SandboxLimits.{name} is {getattr(self, name)!r}; give a number above 0")


@dataclass(frozen=True)
class Executed:
    """The end of a command. code: exit code; None if it was killed because of a limit, which `reason` names.

    stdout, stderr: text, of which the end is kept; bytes that are not UTF-8 become replacement characters.
    """

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    reason: str = ""

    @property
    def is_timeout(self) -> bool:
        """Whether the command was killed because its time was over."""
        return self.code is None and self.reason.startswith("not finished within")


class CodeSandbox(Protocol):
    """A sandbox. Paths are relative to its working directory. `missing`: kinds of isolation that it lacks, and why."""

    missing: Mapping[str, str]

    async def open(self) -> None:
        """Make it ready. Raises InfraError if that fails, ConfigError for a missing package or key."""
        ...

    async def exec(self, command: str, timeout: float | None = None, *, stdin: str = "") -> Executed:
        """Run a shell command in the working directory. Raises InfraError if the sandbox is lost.

        No process of the command is left when this returns (in a container: when the sandbox closes).
        """
        ...

    async def write(self, path: str, content: str | bytes) -> None:
        """Write a file; its folders are made. Raises InfraError."""
        ...

    async def read(self, path: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError, DataError for a path outside, and InfraError."""
        ...

    async def close(self) -> None:
        """End its processes and delete its files. Idempotent."""
        ...


@dataclass(frozen=True)
class SandboxSpec:
    """What a backend builds a sandbox from. environment: variables of its commands, which inherit none."""

    image: str | None
    limits: SandboxLimits
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def variables(self, home: str, temporary: str) -> dict[str, str]:
        """Return all variables of commands on this machine."""
        path = f"{os.path.dirname(sys.executable)}:{SEARCHED}"
        return {"PATH": path, "HOME": home, "TMPDIR": temporary, "LANG": "C.UTF-8", **self.environment}


def build_sandbox(
    image: str | None = None,
    limits: SandboxLimits | None = None,
    *,
    backend: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> CodeSandbox:
    """Return a sandbox that is not open yet. Raises ConfigError for an unknown backend."""
    name = backend or ("subprocess" if image is None else "docker")
    if name not in _BACKENDS:
        _, hint = did_you_mean(name, _BACKENDS)
        known = ", ".join(_BACKENDS)
        raise ConfigError(f"there is no sandbox backend {name!r}; {hint or f'use one of {known}'}")
    if name == "subprocess" and image is not None:
        raise ConfigError(f"the subprocess sandbox has no image, got {image!r}; use backend='docker', or no image")
    isolation = os.environ.get(ISOLATION, "required")
    if isolation not in ("none", "required"):
        raise ConfigError(f"{ISOLATION} is {isolation!r}; set it to none or required")
    is_unisolated = name == "subprocess" and isolation == "none"
    module, _, kind = (_UNISOLATED if is_unisolated else _BACKENDS[name]).partition(":")
    made: Any = getattr(import_module(module), kind)
    return made(SandboxSpec(image, limits or SandboxLimits(), dict(environment or {})))


async def opened(made: CodeSandbox) -> CodeSandbox:
    """Open a sandbox, with a second and third attempt. Raises InfraError and ConfigError."""
    for attempt in range(CREATE_ATTEMPTS):
        try:
            await made.open()
            return made
        except InfraError:
            await made.close()
            if attempt == CREATE_ATTEMPTS - 1:
                raise
        except BaseException:
            await made.close()
            raise
    raise AssertionError


@contextlib.asynccontextmanager
async def sandbox(
    image: str | None = None,
    limits: SandboxLimits | None = None,
    *,
    backend: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> AsyncGenerator[CodeSandbox]:
    """Open a sandbox for the body of an `async with`, and delete it at the end.

    backend: "subprocess" (this machine; the default), "docker" (the default with an `image`) or "e2b" (the `image` is a
    template). Raises InfraError if it cannot be opened, and ConfigError for wrong arguments.
    """
    made = await opened(build_sandbox(image, limits, backend=backend, environment=environment))
    try:
        yield made
    finally:
        await made.close()
