"""A stand-in of E2B's sandboxes: files in memory, and one agent that asks the policy twice over HTTP."""

from __future__ import annotations

import re
from types import SimpleNamespace

import httpx


class CommandExitException(Exception):  # noqa: N818  the name in that package
    def __init__(self, exit_code):
        super().__init__(f"exit code {exit_code}")
        self.exit_code, self.stdout, self.stderr = exit_code, "", ""


async def agent(env):
    """Ask as Claude Code does, and return the exit code."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "solve it"}]}]
    headers = {"authorization": f"Bearer {env['ANTHROPIC_AUTH_TOKEN']}"}
    async with httpx.AsyncClient(base_url=env["ANTHROPIC_BASE_URL"], headers=headers, trust_env=False) as client:
        for _ in range(2):
            body = {"model": env["ANTHROPIC_MODEL"], "max_tokens": 6, "messages": messages}
            reply = (await client.post("/v1/messages", json=body)).raise_for_status().json()
            messages.append({"role": "assistant", "content": reply["content"]})
            messages.append({"role": "user", "content": [{"type": "text", "text": "continue"}]})
    return 0


class AsyncSandbox:
    number = 0

    def __init__(self):
        AsyncSandbox.number += 1
        self.sandbox_id, self.files_by_path = f"stand-in-{AsyncSandbox.number}", {}
        self.commands = SimpleNamespace(run=self.run)
        self.files = SimpleNamespace(read=self.read, write=self.write)

    @classmethod
    async def create(cls, **_):
        return cls()

    async def kill(self):
        pass

    async def run(self, cmd, *, envs=None, **_):
        launched = re.search(r"setsid bash (\S+)\.sh", cmd)
        polled = re.search(r"test -f (\S+) && cat", cmd)
        if launched:
            is_agent = "claude -p" in self.files_by_path[f"{launched[1]}.sh"]
            self.files_by_path[f"{launched[1]}.done"] = str(await agent(envs) if is_agent else 0)
        elif polled and polled[1] not in self.files_by_path:
            raise CommandExitException(1)
        elif cmd.endswith("&& fails"):
            raise CommandExitException(2)
        stdout = self.files_by_path[polled[1]] if polled else "diff --git a b" if "git diff" in cmd else ""
        return SimpleNamespace(exit_code=0, stdout=stdout, stderr="")

    async def write(self, path, content, **_):
        self.files_by_path[path] = content if isinstance(content, str) else "bytes"

    async def read(self, path, **_):
        return self.files_by_path[path]
