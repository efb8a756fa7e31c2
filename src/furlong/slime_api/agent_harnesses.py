"""Coding agents that run in a sandbox and call the policy through an adapter: `slime.agent.harness`."""

from __future__ import annotations

import asyncio
import json
import lzma
import os
import shlex
import shutil
import tempfile
from abc import ABC, ABCMeta, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.errors import RolloutError
from furlong.slime_api.agent_sandboxes import AgentSandbox, ensure_agent_user, exec_and_wait
from furlong.slime_api.helpers import SingletonMeta

INSTALL_ATTEMPTS, INSTALL_WAIT_S, INSTALL_S = 3, 2.0, 300
NODE_VARIABLE = "SLIME_AGENT_NODE_TARBALL"


class SingletonABCMeta(ABCMeta, SingletonMeta):
    """Metaclass of harnesses: abstract classes with one instance per process."""


@dataclass(frozen=True)
class HarnessContext:
    """A run of an agent: its folder, its session, the adapter's address, and the name of the model for the CLI."""

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"


class BaseHarness(ABC, metaclass=SingletonABCMeta):
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


class ClaudeCodeHarness(BaseHarness):
    """Claude Code, from the npm package at `SLIME_AGENT_CC_TARBALL`.

    `SLIME_AGENT_CC_EXTRA_ARGS` is appended to its command, `SLIME_AGENT_CC_EXTRA_ENVS` is a JSON object of variables.
    """

    name = "claude_code"

    async def install_cli(self, sb: AgentSandbox) -> None:
        """Install Node and the package. Raises RolloutError."""
        await install_npm_cli(
            sb,
            node_runtime=_tarball(NODE_VARIABLE),
            npm_package=_tarball("SLIME_AGENT_CC_TARBALL"),
            check_cmd="/usr/local/bin/claude --version",
        )

    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None:
        """Answer the questions of the first start."""
        del ctx
        settings = shlex.quote(json.dumps({"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True}))
        files = "/home/agent/.claude.json /home/agent/.claude/settings.json"
        await _agent_files(sb, "/home/agent/.claude", f"echo {settings} | tee {files} > /dev/null", files)

    async def launch_and_wait(self, sb: AgentSandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Run `claude -p`."""
        flags = "--permission-mode bypassPermissions --output-format stream-json --include-partial-messages --verbose"
        extra = os.environ.get("SLIME_AGENT_CC_EXTRA_ARGS", "")
        env = {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # changes in every request, so no request would extend another
            **_extra_variables("SLIME_AGENT_CC_EXTRA_ENVS"),
        }
        command = f"/usr/local/bin/claude -p {shlex.quote(prompt)} {flags} {extra}".rstrip()
        return await run_agent(sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=time_budget_sec)


class CodexHarness(BaseHarness):
    """Codex, from the npm package at `SLIME_AGENT_CODEX_TARBALL`.

    `SLIME_AGENT_CODEX_EXTRA_ARGS` and `SLIME_AGENT_CODEX_EXTRA_ENVS` are as for Claude Code.
    """

    name = "codex"

    async def install_cli(self, sb: AgentSandbox) -> None:
        """Install Node and the package. Raises RolloutError."""
        await install_npm_cli(
            sb,
            node_runtime=_tarball(NODE_VARIABLE),
            npm_package=_tarball("SLIME_AGENT_CODEX_TARBALL"),
            check_cmd="codex --version",
        )

    async def write_config(self, sb: AgentSandbox, ctx: HarnessContext) -> None:
        """Name the adapter as provider of the model."""
        lines = (
            f"model = {json.dumps(ctx.model_label)}",
            'model_provider = "slime"',
            "[model_providers.slime]",
            'name = "slime"',
            f"base_url = {json.dumps(f'{ctx.adapter_url}/v1')}",
            'env_key = "OPENAI_API_KEY"',
            'wire_api = "chat"',
        )
        file = "/home/agent/.codex/config.toml"
        await _agent_files(
            sb, "/home/agent/.codex", f"printf '%s\\n' {' '.join(map(shlex.quote, lines))} > {file}", file
        )

    async def launch_and_wait(self, sb: AgentSandbox, ctx: HarnessContext, prompt: str, time_budget_sec: int) -> int:
        """Run `codex exec`."""
        extra = os.environ.get("SLIME_AGENT_CODEX_EXTRA_ARGS", "")
        env = {
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1",
            **_extra_variables("SLIME_AGENT_CODEX_EXTRA_ENVS"),
        }
        command = f"codex exec --skip-git-repo-check {shlex.quote(prompt)} {extra}".rstrip()
        return await run_agent(sb, workdir=ctx.workdir, start_cmd=command, env=env, time_budget_sec=time_budget_sec)


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


async def _agent_files(sb: AgentSandbox, folder: str, write: str, files: str) -> None:
    """Run a command that writes files of the user `agent`."""
    await sb.exec(
        f"mkdir -p {folder} && {write} && chown -R agent:agent {folder} {files}", user="root", check=True, timeout=60
    )


def _tarball(variable: str) -> Path:
    """Return the file that an environment variable names. Raises RolloutError."""
    value = os.environ.get(variable, "")
    if not value or not Path(value).is_file():
        raise RolloutError(f"{variable} is {value!r}, which is not a file; export the path of the archive to install")
    return Path(value)


def _extra_variables(variable: str) -> dict[str, str]:
    """Return the variables of a JSON object in the environment. Raises RolloutError."""
    text = os.environ.get(variable, "").strip()
    try:
        values: Any = json.loads(text or "{}")
    except ValueError as error:
        raise RolloutError(f"{variable} is not JSON: {error}; give an object of names and values") from error
    if not isinstance(values, dict):
        raise RolloutError(f"{variable} is {text[:100]!r}; give a JSON object of names and values")
    return {str(name): str(value) for name, value in values.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
