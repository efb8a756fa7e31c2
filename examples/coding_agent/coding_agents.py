"""Coding agents in sandboxes that call the policy through an adapter: `slime.agent.harness` and `slime.agent.sandbox`.

With this folder on PYTHONPATH, functions written for slime import these names from there. Environment variables are
those that slime reads.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import lzma
import os
import random
import shlex
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from furlong.errors import RolloutError

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_TIME_BUDGET_EXCEEDED = -1
FIRST_POLL_S, LONGEST_POLL_S = 0.1, 5.0
LIFETIME_S, ATTEMPTS, SIZE = 3600, 6, "md"  # of E2B sandboxes, unless the environment sets others
LONGEST_WAIT_S = 32.0  # between two attempts
UPLOAD_S = 600
INSTALL_ATTEMPTS, INSTALL_WAIT_S, INSTALL_S = 3, 2.0, 300


@runtime_checkable
class AgentSandbox(Protocol):
    """What harnesses and tasks need of a sandbox; users have their own classes.

    `exec` returns exit code, stdout and stderr; with `check` a failure is an error, and `idempotent` says that the
    command may run twice. `read_file` returns "" for a file that cannot be read.
    """

    sandbox_id: str

    async def __aenter__(self) -> AgentSandbox: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def exec(  # noqa: D102
        self,
        cmd: str,
        *,
        user: str = "root",
        env: dict[str, str] | None = None,
        timeout: int = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> tuple[int, str, str]: ...

    async def write_file(self, sandbox_path: str, content: str | bytes | Path, *, user: str = "root") -> None: ...  # noqa: D102

    async def read_file(self, sandbox_path: str, *, user: str = "root") -> str: ...  # noqa: D102


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
        def variable(*names: str) -> str | None:
            return next((value for name in names if (value := os.environ.get(name, "").strip())), None)

        key = variable("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "SWE_SANDBOX_IMAGE_METADATA_KEY")
        lifetime = variable("SLIME_AGENT_SANDBOX_LIFETIME_SEC", "SWE_SANDBOX_LIFETIME_SEC")
        attempts = variable("SLIME_AGENT_SANDBOX_RPC_RETRIES", "SWE_RPC_RETRIES")
        self.image, self.image_metadata_key = image, image_metadata_key or key
        self.timeout = int(lifetime or LIFETIME_S) if timeout is None else timeout
        self.rpc_retries = max(1, int(attempts or ATTEMPTS) if rpc_retries is None else rpc_retries)
        self.size = variable("SLIME_AGENT_E2B_SANDBOX_SIZE", "SWE_E2B_SANDBOX_SIZE") or SIZE if size is None else size
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
            raise RolloutError(f"E2BSandbox: {error}; pip install 'furlong-rl[e2b]'") from error
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
    ) -> tuple[int, str, str]:
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

    async def write_file(self, sandbox_path: str, content: str | bytes | Path, *, user: str = "root") -> None:
        """Write text, bytes or a file of this machine."""
        sandbox, data = self._started(), content.read_bytes() if isinstance(content, Path) else content
        await self._repeated(lambda: sandbox.files.write(sandbox_path, data, user=user, request_timeout=UPLOAD_S))

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
        """Call, and repeat after errors of the connection and E2B's own, unless the sandbox is gone."""
        for attempt in range(self.rpc_retries - 1 if is_repeatable else 0):
            try:
                return await call()
            except Exception as error:
                is_gone = any(text in str(error) for text in ("does not exist", "STOPPED state"))
                is_theirs = type(error).__name__ == "SandboxException" and not is_gone
                if not is_theirs and type(error).__module__.partition(".")[0] not in ("httpx", "httpcore", "ssl"):
                    raise
            await asyncio.sleep(random.uniform(0, min(LONGEST_WAIT_S, 2.0**attempt)))
        return await call()


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
    deadline, pause, code = time.monotonic() + time_budget_sec, FIRST_POLL_S, EXIT_TIME_BUDGET_EXCEEDED
    while time.monotonic() < deadline:
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_S)
        is_there, text, _ = await sb.exec(f"test -f {done} && cat {done}", user=user, timeout=15)
        if is_there == 0 and text.strip():
            code = int(text)
            break
    if want_output:
        return code, await sb.read_file(out, user=user)
    if code == 0:
        return code, ""
    _, tail, _ = await sb.exec(f"tail -c 512 {shlex.quote(out)} 2>/dev/null", user=user, timeout=15)
    return code, tail


async def ensure_agent_user(sb: AgentSandbox, workdir: str) -> None:
    """Create the user `agent`, who owns `workdir`, and let git read repositories of other users."""
    await sb.exec(
        "(id agent >/dev/null 2>&1 || useradd -m -s /bin/bash agent) && "
        f"chown -R agent:agent /home/agent {shlex.quote(workdir)} && "
        "git config --system --add safe.directory '*' && id agent",
        check=True,
        timeout=60,
    )


@dataclass(frozen=True)
class HarnessContext:
    """A run of an agent: its folder, its session, the adapter's address, and the name of the model for the CLI."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class BaseHarness(ABC):
    """A coding agent: how it is installed, configured and started."""

    name: str = ""

    @abstractmethod
    async def install_cli(self, sb: AgentSandbox) -> None:
        """Install the agent's command."""

    @abstractmethod
    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None:
        """Write the agent's configuration files."""

    @abstractmethod
    async def launch_and_wait(self, sb: AgentSandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Run the agent on a prompt, and return its exit code."""

    async def run(
        self, sb: AgentSandbox, *, workdir: str, session_id: str, adapter_url: str, time_budget_sec: int, prompt: str
    ) -> int:
        """Create the agent's user, configure the agent, run it, and return its exit code."""
        await ensure_agent_user(sb, workdir)
        context = HarnessContext(workdir, session_id, adapter_url)
        await self.write_config(sb, context)
        return await self.launch_and_wait(sb, context, prompt, time_budget_sec)


class _NpmHarness(BaseHarness):
    """An agent from the npm package at `SLIME_AGENT_{prefix}_TARBALL`.

    `SLIME_AGENT_{prefix}_EXTRA_ARGS` is appended to its command, `..._EXTRA_ENVS` is a JSON object of variables.
    """

    prefix, check_cmd = "", ""

    async def install_cli(self, sb: AgentSandbox) -> None:
        """Install Node and the package. Raises RolloutError."""
        node, package = _tarball("SLIME_AGENT_NODE_TARBALL"), _tarball(f"SLIME_AGENT_{self.prefix}_TARBALL")
        await install_npm_cli(sb, node_runtime=node, npm_package=package, check_cmd=self.check_cmd)

    async def _write(self, sb: AgentSandbox, folder: str, text: str, *files: str) -> None:
        """Write a text into files of the user `agent`."""
        paths = " ".join(files)
        await sb.exec(
            f"mkdir -p {folder} && printf '%s\\n' {shlex.quote(text)} | tee {paths} > /dev/null && "
            f"chown -R agent:agent {folder} {paths}",
            user="root",
            check=True,
            timeout=60,
        )

    async def _run(
        self, sb: AgentSandbox, workdir: str, command: str, env: dict[str, str], time_budget_sec: int
    ) -> int:
        variable = f"SLIME_AGENT_{self.prefix}_EXTRA_ENVS"
        try:
            more = {str(k): str(v) for k, v in json.loads(os.environ.get(variable, "").strip() or "{}").items()}
        except (ValueError, AttributeError) as error:
            raise RolloutError(f"{variable} is not JSON: {error}; give an object of names and values") from error
        command = f"{command} {os.environ.get(f'SLIME_AGENT_{self.prefix}_EXTRA_ARGS', '')}".rstrip()
        return await run_agent(sb, workdir=workdir, start_cmd=command, env=env | more, time_budget_sec=time_budget_sec)


class ClaudeCodeHarness(_NpmHarness):
    """Claude Code (`SLIME_AGENT_CC_*`)."""

    name, prefix, check_cmd = "claude_code", "CC", "/usr/local/bin/claude --version"

    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None:
        """Answer the questions of the first start."""
        del ctx
        settings = json.dumps({"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True})
        folder = "/home/agent/.claude"
        await self._write(sb, folder, settings, "/home/agent/.claude.json", f"{folder}/settings.json")

    async def launch_and_wait(self, sb: AgentSandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Run `claude -p`."""
        flags = "--permission-mode bypassPermissions --output-format stream-json --include-partial-messages --verbose"
        env = {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # changes in every request, so no request would extend another
        }
        command = f"/usr/local/bin/claude -p {shlex.quote(prompt)} {flags}"
        return await self._run(sb, ctx.workdir, command, env, time_budget_sec)


class CodexHarness(_NpmHarness):
    """Codex (`SLIME_AGENT_CODEX_*`)."""

    name, prefix, check_cmd = "codex", "CODEX", "codex --version"

    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None:
        """Name the adapter as provider of the model."""
        text = (
            f'model = {json.dumps(ctx.model_label)}\nmodel_provider = "slime"\n[model_providers.slime]\n'
            f'name = "slime"\n'
            f"base_url = {json.dumps(f'{ctx.adapter_url}/v1')}\n"
            'env_key = "OPENAI_API_KEY"\nwire_api = "chat"'
        )
        await self._write(sb, "/home/agent/.codex", text, "/home/agent/.codex/config.toml")

    async def launch_and_wait(self, sb: AgentSandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Run `codex exec`."""
        env = {"OPENAI_API_KEY": ctx.session_id, "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1"}
        command = f"codex exec --skip-git-repo-check {shlex.quote(prompt)}"
        return await self._run(sb, ctx.workdir, command, env, time_budget_sec)


async def run_agent(
    sb: AgentSandbox, *, workdir: str, start_cmd: str, env: dict[str, str], time_budget_sec: int
) -> int:
    """Run an agent's command as the user `agent` in `workdir`, and return its exit code.

    Its output is written to `.harness/trajectory.jsonl` in that folder.
    """
    folder = f"{workdir}/.harness"
    quoted = shlex.quote(folder)
    await sb.exec(f"mkdir -p {quoted} && chown agent:agent {quoted}", user="root", check=True, timeout=30)
    code, _ = await exec_and_wait(
        sb,
        cmd=start_cmd,
        user="agent",
        env=env,
        workdir=workdir,
        out_file=f"{folder}/trajectory.jsonl",
        time_budget_sec=time_budget_sec,
        tag="run",
    )
    return code


async def install_npm_cli(sb: AgentSandbox, *, node_runtime: Path, npm_package: Path, check_cmd: str) -> None:
    """Install Node and an npm package, and run `check_cmd`. Raises RolloutError if all attempts fail."""
    await install_node22(sb, node_runtime)
    await sb.write_file("/tmp/harness-cli.tgz", npm_package)
    install = f"npm install -g --prefix=/usr/local --no-audit --no-fund /tmp/harness-cli.tgz && {check_cmd}"
    code, output = 0, ""
    for attempt in range(INSTALL_ATTEMPTS):
        if attempt:
            await asyncio.sleep(INSTALL_WAIT_S * attempt)
        code, output = await exec_and_wait(sb, cmd=install, time_budget_sec=INSTALL_S, tag="harness-npm-install")
        if code == 0:
            return
    raise RolloutError(
        f"npm install of {npm_package.name} failed {INSTALL_ATTEMPTS} times, with exit code {code}: {output[-1000:]}"
    )


async def install_node22(sb: AgentSandbox, host_tarball: Path) -> None:
    """Unpack a release of Node in the sandbox; an .xz file is decompressed on this machine first."""
    plain = host_tarball
    if host_tarball.suffix == ".xz":
        plain = Path(tempfile.gettempdir()) / f"furlong-{host_tarball.stem}"
        if not plain.exists():
            part = plain.with_suffix(f".{os.getpid()}.part")
            with lzma.open(host_tarball, "rb") as source, part.open("wb") as target:
                shutil.copyfileobj(source, target)
            part.replace(plain)
    await sb.write_file("/tmp/node22.tar", plain)
    links = " && ".join(f"ln -sf /opt/node22/bin/{name} /usr/local/bin/{name}" for name in ("node", "npm", "npx"))
    await sb.exec(
        f"mkdir -p /opt/node22 && tar xf /tmp/node22.tar -C /opt/node22 --strip-components=1 && {links} && "
        "node --version && npm --version",
        user="root",
        timeout=180,
        check=True,
    )


def _tarball(variable: str) -> Path:
    """Return the file that an environment variable names. Raises RolloutError."""
    value = os.environ.get(variable, "")
    if not value or not Path(value).is_file():
        raise RolloutError(f"{variable} is {value!r}, which is not a file; export the path of the archive to install")
    return Path(value)
