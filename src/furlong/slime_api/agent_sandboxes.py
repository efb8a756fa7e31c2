"""Sandboxes of agents: `slime.agent.sandbox`, with the environment variables that slime reads."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import random
import shlex
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from furlong.errors import RolloutError

logger = logging.getLogger(__name__)

T = TypeVar("T")
ExecResult = tuple[int, str, str]  # exit code, stdout, stderr
FileContent = str | bytes | Path

EXIT_TIME_BUDGET_EXCEEDED = -1
FIRST_POLL_S, LONGEST_POLL_S = 0.1, 5.0
LIFETIME_S, ATTEMPTS, SIZE = 3600, 6, "md"  # of E2B sandboxes, unless the environment sets others
LONGEST_WAIT_S = 32.0  # between two attempts
UPLOAD_S = 600
_GONE = ("does not exist", "STOPPED state")  # in errors of E2B that no other attempt repairs


@runtime_checkable
class AgentSandbox(Protocol):
    """What harnesses and tasks need of a sandbox. `idempotent` says that a command may run twice."""

    sandbox_id: str

    async def __aenter__(self) -> AgentSandbox: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: int = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """Run a shell command, and return exit code, stdout and stderr. With `check`, a failure is an error."""
        ...

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Write text, bytes or a file of this machine."""
        ...

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Return the text of a file, "" if it cannot be read."""
        ...


async def exec_and_wait(
    sb: AgentSandbox,
    *,
    cmd: str,
    time_budget_sec: int,
    tag: str,
    user: str = "root",
    env: dict[str, str] | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> tuple[int, str]:
    """Run a command detached from the connection, poll for its end, and return exit code and output.

    Without `want_output` the output is "" after a success, else its last 512 bytes. The code is
    `EXIT_TIME_BUDGET_EXCEEDED` if the command still runs after `time_budget_sec`. A tag may be used again after the
    command has ended.
    """
    out, done, script, lock = (f"/tmp/.{tag}.{kind}" for kind in ("out", "done", "sh", "spawned"))
    out = out_file or out
    prepare = f"cd {shlex.quote(workdir)}\nexport HOME=/home/{user}\n" if workdir else ""
    await sb.write_file(script, f"#!/bin/bash\n{prepare}(\n{cmd}\n)\necho $? > {done}\n", user=user)
    await sb.exec(f"rm -rf {lock} {done} {shlex.quote(out)}", user=user, timeout=30, check=True)
    # the folder is made once, so that a repeated request does not start the command again
    start = f"mkdir {lock} 2>/dev/null || exit 0; setsid bash {script} < /dev/null > {shlex.quote(out)} 2>&1 &"
    await sb.exec(f"chmod +x {script}; {start}", user=user, env=env, timeout=30, check=True)
    code = await _exit_code(sb, done, user, time_budget_sec)
    if want_output:
        return code, await sb.read_file(out, user=user)
    if code == 0:
        return code, ""
    _, tail, _ = await sb.exec(f"tail -c 512 {shlex.quote(out)} 2>/dev/null", user=user, timeout=15)
    return code, tail


async def _exit_code(sb: AgentSandbox, done: str, user: str, time_budget_sec: float) -> int:
    """Wait for the file with the exit code of a command."""
    deadline, pause = time.monotonic() + time_budget_sec, FIRST_POLL_S
    while time.monotonic() < deadline:
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)
        code, text, _ = await sb.exec(f"test -f {done} && cat {done}", user=user, timeout=15)
        if code == 0 and text.strip():
            return int(text)
    return EXIT_TIME_BUDGET_EXCEEDED


async def ensure_agent_user(sb: AgentSandbox, workdir: str) -> None:
    """Create the user `agent`, who owns `workdir`, and let git read repositories of other users."""
    await sb.exec(
        "(id agent >/dev/null 2>&1 || useradd -m -s /bin/bash agent) && "
        f"chown -R agent:agent /home/agent {shlex.quote(workdir)} && "
        "git config --system --add safe.directory '*' && id agent",
        check=True,
        timeout=60,
    )


def _variable(*names: str) -> str | None:
    """Return the first of these environment variables that is set."""
    return next((value for name in names if (value := os.environ.get(name, "").strip())), None)


class E2BAgentSandbox:
    """A sandbox of E2B, or of a service with its API; needs the package `e2b`.

    `SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY` names the metadata that selects the image. Arguments replace
    `SLIME_AGENT_SANDBOX_LIFETIME_SEC`, `SLIME_AGENT_SANDBOX_RPC_RETRIES` and `SLIME_AGENT_E2B_SANDBOX_SIZE`.
    """

    def __init__(
        self,
        image: str,
        *,
        timeout: int | None = None,
        image_metadata_key: str | None = None,
        rpc_retries: int | None = None,
        size: str | None = None,
    ) -> None:
        lifetime = _variable("SLIME_AGENT_SANDBOX_LIFETIME_SEC", "SWE_SANDBOX_LIFETIME_SEC")
        attempts = _variable("SLIME_AGENT_SANDBOX_RPC_RETRIES", "SWE_RPC_RETRIES")
        key = _variable("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "SWE_SANDBOX_IMAGE_METADATA_KEY")
        self.image, self.image_metadata_key = image, image_metadata_key or key
        self.timeout = int(lifetime or LIFETIME_S) if timeout is None else timeout
        self.rpc_retries = int(attempts or ATTEMPTS) if rpc_retries is None else rpc_retries
        self.size = _variable("SLIME_AGENT_E2B_SANDBOX_SIZE", "SWE_E2B_SANDBOX_SIZE") or SIZE if size is None else size
        self.sandbox_id = ""
        self._sandbox: Any = None

    async def __aenter__(self) -> E2BAgentSandbox:
        """Start the sandbox. Raises RolloutError without the package or the metadata key."""
        if self.image_metadata_key is None:
            raise RolloutError(
                "E2BSandbox: SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY is not set; export the metadata key by which your "
                "E2B gateway selects the image"
            )
        try:
            kind: Any = importlib.import_module("e2b").AsyncSandbox
        except ModuleNotFoundError as error:
            raise RolloutError(f"E2BSandbox: {error}; pip install 'furlong[e2b]'") from error
        metadata = {self.image_metadata_key: self.image}
        if self.size:
            folder, slash, _ = self.image_metadata_key.rpartition("/")
            metadata[f"{folder}{slash}size"] = self.size
        self._sandbox = await self._repeated(lambda: kind.create(timeout=self.timeout, metadata=metadata))
        self.sandbox_id = self._sandbox.sandbox_id
        return self

    async def __aexit__(self, *error: object) -> None:
        """Kill the sandbox. A failure is logged, as the service ends the sandbox after its lifetime."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            try:
                await self._repeated(sandbox.kill)
            except Exception as failure:  # noqa: BLE001  the service ends it
                logger.warning(
                    "sandbox %s could not be killed: %s; it ends after %d s", self.sandbox_id, failure, self.timeout
                )

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: int = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """Run a shell command. Raises RolloutError for a failed one with `check`."""
        sandbox = self._started()
        try:
            done: Any = await self._repeated(
                lambda: sandbox.commands.run(cmd, user=user, envs=env, timeout=timeout), is_repeatable=idempotent
            )
        except Exception as error:
            if type(error).__name__ != "CommandExitException":  # its module differs between releases
                raise
            done = error
        if check and done.exit_code:
            raise RolloutError(
                f"sandbox {self.sandbox_id}: exit code {done.exit_code} of {cmd[:120]!r}: {str(done.stderr)[:400]}"
            )
        return done.exit_code, done.stdout or "", done.stderr or ""

    async def write_file(self, sandbox_path: str, content: FileContent, *, user: str = "root") -> None:
        """Write text, bytes or a file of this machine."""
        sandbox = self._started()

        async def write() -> None:
            if isinstance(content, Path):
                with content.open("rb") as file:
                    await sandbox.files.write(sandbox_path, file, user=user, request_timeout=UPLOAD_S)
            else:
                await sandbox.files.write(sandbox_path, content, user=user, request_timeout=UPLOAD_S)

        await self._repeated(write)

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str:
        """Return the text of a file, "" if there is none."""
        sandbox = self._started()
        try:
            return await self._repeated(lambda: sandbox.files.read(sandbox_path, user=user))
        except Exception as error:
            if type(error).__name__ not in ("NotFoundException", "FileNotFoundException"):
                raise
            return ""

    def _started(self) -> Any:
        if self._sandbox is None:
            raise RolloutError("E2BSandbox: it is not running; use `async with E2BSandbox(image) as sandbox`")
        return self._sandbox

    async def _repeated(self, call: Callable[[], Awaitable[T]], *, is_repeatable: bool = True) -> T:
        """Call, and repeat after errors of the connection; the last error is raised."""
        for attempt in range(self.rpc_retries):
            try:
                return await call()
            except Exception as error:
                if not is_repeatable or not _is_transient(error) or attempt + 1 >= self.rpc_retries:
                    raise
            await asyncio.sleep(random.uniform(0, min(LONGEST_WAIT_S, 2.0**attempt)))
        raise RolloutError(f"E2BSandbox: rpc_retries is {self.rpc_retries}; give at least 1")


def _is_transient(error: Exception) -> bool:
    """Whether another attempt may succeed: errors of the connection, and E2B's own that do not name a lost sandbox."""
    if type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "ssl"):
        return True
    return type(error).__name__ == "SandboxException" and not any(text in str(error) for text in _GONE)
