"""Sandbox in a container of Docker or Podman, through their command line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import PurePosixPath

from furlong.core.supervised_process import MAX_OUTPUT, Ended, run_supervised
from furlong.errors import ConfigError, DataError, InfraError
from furlong.sandboxes.code_sandbox import Executed, SandboxSpec

WORK_FOLDER = "/work"
LABEL = "furlong.sandbox"
ATTEMPTS = 3  # of calls that may be repeated: reads and writes of files, not commands
_LOST = 125  # exit code of `docker exec` when the daemon or the container fails
_OVERDUE = (124, 137, -9)  # exit codes of `timeout` and of what it kills
_CALL_S = 120.0  # a call of the daemon
_GRACE_S = 15.0  # for the daemon to report a command that `timeout` has killed
_PASSED_ON = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR", "CONTAINER_HOST")


class DockerSandbox:
    """A container without privileges and, unless the limits say otherwise, without a network."""

    def __init__(self, spec: SandboxSpec) -> None:
        if spec.image is None:
            raise ConfigError("the docker sandbox needs an image, such as sandbox('python:3.12-slim')")
        self.missing: dict[str, str] = {}
        self._spec, self._image = spec, spec.image
        self._program = shutil.which("docker") or shutil.which("podman")
        self._container = ""

    async def open(self) -> None:
        """Start the container. Raises ConfigError without Docker and Podman, InfraError if it does not start."""
        if self._program is None:
            raise ConfigError(
                "backend 'docker' needs the program docker or podman, and neither is in PATH; install one, or use "
                "backend='subprocess'"
            )
        limits = self._spec.limits
        words = [
            "run", "--detach", "--rm", "--init", "--label", LABEL, "--workdir", WORK_FOLDER,
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            "--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes),
            "--pids-limit", str(limits.max_processes),
            "--ulimit", f"fsize={limits.file_bytes}", "--ulimit", f"nofile={limits.open_files}",
            *(() if limits.network else ("--network", "none")),
            *(word for path in limits.readable for word in ("--volume", f"{os.path.abspath(path)}:{path}:ro")),
            *(word for name, value in self._spec.environment.items() for word in ("--env", f"{name}={value}")),
            "--entrypoint", "sleep", self._image, str(int(limits.ttl_s)),
        ]  # fmt: skip
        started = await self._call(words)
        if started.code != 0:
            raise InfraError(f"docker run {self._image} failed ({started.ending}): {_shown(started)}")
        self._container = started.stdout.decode().strip().splitlines()[-1]

    async def exec(self, command: str, timeout: float | None = None, *, stdin: str = "") -> Executed:
        """Run a shell command in the container; never repeated. Raises InfraError if the container is lost."""
        limits = self._spec.limits
        seconds, kept = limits.timeout_s if timeout is None else timeout, limits.output_bytes
        began = time.monotonic()
        inner = ["timeout", "-s", "KILL", f"{seconds:g}", "/bin/sh", "-c", command]
        words = ["exec", "-i", self._opened(), *inner]
        done = await self._call(words, stdin.encode(), seconds + _GRACE_S, kept)
        took = time.monotonic() - began
        if done.code is None or done.code == _LOST:
            raise InfraError(f"the container of the sandbox was lost ({done.ending}): {_shown(done)}")
        out, err = [output.decode("utf-8", "replace") for output in (done.stdout, done.stderr)]
        if took >= seconds and done.code in _OVERDUE:
            return Executed(None, out, err, took, f"not finished within {seconds:g} s")
        return Executed(done.code, out, err, took)

    async def write(self, path: str, content: str | bytes) -> None:
        """Write a file. Raises InfraError and DataError."""
        target = _checked(path)
        folder = shlex.quote(str(PurePosixPath(target).parent))
        data = content.encode() if isinstance(content, str) else content
        await self._repeated(f"mkdir -p {folder} && cat > {shlex.quote(target)}", data, path)

    async def read(self, path: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError, DataError and InfraError."""
        target = shlex.quote(_checked(path))
        limit = self._spec.limits.file_bytes
        return await self._repeated(f"test -f {target} || exit 44; head -c {limit} < {target}", b"", path)

    async def close(self) -> None:
        """Remove the container, with its processes and files."""
        container, self._container = self._container, ""
        if container:
            with contextlib.suppress(InfraError):  # `--rm` and the limited life remove it, too
                await asyncio.shield(self._call(["rm", "--force", container]))

    async def _repeated(self, script: str, data: bytes, path: str) -> bytes:
        done, kept = Ended(None, "not started"), self._spec.limits.file_bytes
        for _ in range(ATTEMPTS):
            done = await self._call(["exec", "-i", self._opened(), "/bin/sh", "-c", script], data, output_bytes=kept)
            if done.code == 0:
                return done.stdout
            if done.code == 44:
                raise FileNotFoundError(f"there is no {path} in the sandbox")
            if done.code not in (None, _LOST):
                raise DataError(f"{path} in the sandbox cannot be opened: {_shown(done)}")
        raise InfraError(f"the container of the sandbox was lost ({done.ending}): {_shown(done)}")

    def _opened(self) -> str:
        if not self._container:
            raise InfraError("the sandbox is closed; use it in the body of `async with sandbox()`")
        return self._container

    async def _call(
        self, words: Sequence[str], stdin: bytes = b"", timeout_s: float = _CALL_S, output_bytes: int = MAX_OUTPUT
    ) -> Ended:
        assert self._program is not None
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        return await run_supervised(
            [self._program, *words],
            stdin=stdin,
            directory="/",
            environment=environment,
            timeout_s=timeout_s,
            output_bytes=output_bytes,
        )


def _checked(path: str) -> str:
    if path.startswith("/") or ".." in PurePosixPath(path).parts or not PurePosixPath(path).parts:
        raise DataError(f"{path!r} is not a path in the sandbox; give one relative to its working directory")
    return f"{WORK_FOLDER}/{path}"


def _shown(done: Ended) -> str:
    text = done.stderr.decode("utf-8", "replace").strip()
    return text[-500:] or "it wrote nothing to stderr"
