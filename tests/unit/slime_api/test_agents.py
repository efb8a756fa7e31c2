"""Agents of slime's examples: their sandboxes, harnesses and the texts of messages."""

from __future__ import annotations

import asyncio
import re
import sys
from types import SimpleNamespace

import coding_agents
import pytest
from coding_agents import (
    EXIT_TIME_BUDGET_EXCEEDED,
    ClaudeCodeHarness,
    CodexHarness,
    E2BAgentSandbox,
    HarnessContext,
    exec_and_wait,
    install_node22,
)

from furlong.core import slime_modules
from furlong.errors import RolloutError
from furlong.slime_api import agent_adapters

slime_modules.install()


class LocalSandbox:
    """Runs commands on this machine; paths in /tmp and /home are in a folder. Commands of root are not run."""

    sandbox_id = "local"

    def __init__(self, root):
        self.root, self.commands = root, []

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    def at(self, text):
        return re.sub(r"(?<![\w/])/(tmp|home|work)\b", rf"{self.root}/\1", text)

    async def exec(self, cmd, *, user="root", env=None, timeout=120, check=False, idempotent=True):
        self.commands.append(cmd)
        if "chown" in cmd:
            return 0, "", ""
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", self.at(cmd), env=None if env is None else {"PATH": "/usr/bin:/bin", **env},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert not check or process.returncode == 0, (cmd, err)
        return process.returncode, out.decode(), err.decode()

    async def write_file(self, sandbox_path, content, *, user="root"):
        with open(self.at(sandbox_path), "w") as file:
            file.write(self.at(content))

    async def read_file(self, sandbox_path, *, user="root"):
        with open(self.at(sandbox_path)) as file:
            return file.read()


@pytest.fixture
def sandbox(tmp_path):
    for folder in ("tmp", "home/agent", "work/.harness"):
        (tmp_path / folder).mkdir(parents=True)
    return LocalSandbox(tmp_path)


def test_a_detached_command_returns_its_code_and_output_and_may_run_again(sandbox, monkeypatch):
    monkeypatch.setattr(coding_agents, "FIRST_POLL_S", 0.01)

    async def main():
        wait = {"time_budget_sec": 60, "tag": "t"}
        assert await exec_and_wait(sandbox, cmd="echo $WHO; exit 3", env={"WHO": "me"}, **wait) == (3, "me\n")
        assert await exec_and_wait(sandbox, cmd="echo other", want_output=True, **wait) == (0, "other\n")
        assert await exec_and_wait(sandbox, cmd="pwd", workdir="/work", **wait) == (0, "")
        assert await sandbox.read_file("/tmp/.t.out") == f"{sandbox.root}/work\n"
        late = await exec_and_wait(sandbox, cmd="true", time_budget_sec=0, tag="late")
        assert late[0] == EXIT_TIME_BUDGET_EXCEEDED

    asyncio.run(main())


@pytest.mark.parametrize(
    ("harness", "key", "url", "command"),
    [
        (ClaudeCodeHarness, "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "/usr/local/bin/claude -p 'fix it'"),
        (CodexHarness, "OPENAI_API_KEY", "OPENAI_BASE_URL", "codex exec --skip-git-repo-check 'fix it'"),
    ],
)
def test_a_harness_gives_its_agent_the_address_and_the_session(harness, key, url, command, sandbox, monkeypatch):
    name = "SLIME_AGENT_CC_EXTRA_ENVS" if harness is ClaudeCodeHarness else "SLIME_AGENT_CODEX_EXTRA_ENVS"
    monkeypatch.setenv(name, '{"EXTRA": "1"}')
    seen = {}

    async def no_wait(*_, cmd, env, **__):
        seen.update(env, command=cmd)
        return 0, ""

    monkeypatch.setattr("coding_agents.exec_and_wait", no_wait)
    context = HarnessContext("/work", "sid-1", "http://host:18001")
    assert asyncio.run(harness().launch_and_wait(sandbox, context, "fix it", 30)) == 0
    assert (seen[key], seen["EXTRA"]) == ("sid-1", "1")
    assert seen[url].startswith("http://host:18001")
    assert seen["command"].startswith(command)
    monkeypatch.setenv(name, "no json")
    with pytest.raises(RolloutError, match=f"{name} is not JSON"):
        asyncio.run(harness().launch_and_wait(sandbox, context, "fix it", 30))


def test_the_configuration_of_codex_names_the_adapter(sandbox):
    asyncio.run(CodexHarness().write_config(sandbox, HarnessContext("/work", "sid-1", "http://host:18001")))
    (command,) = sandbox.commands
    assert 'base_url = "http://host:18001/v1"' in command


def test_an_archive_that_is_not_there_is_named(sandbox, monkeypatch):
    monkeypatch.delenv("SLIME_AGENT_NODE_TARBALL", raising=False)
    with pytest.raises(RolloutError, match="SLIME_AGENT_NODE_TARBALL"):
        asyncio.run(ClaudeCodeHarness().install_cli(sandbox))


def test_a_compressed_archive_is_decompressed_on_this_machine(tmp_path, monkeypatch):
    import lzma

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    archive = tmp_path / "node.tar.xz"
    archive.write_bytes(lzma.compress(b"content"))
    written = {}

    async def write_file(path, content, **_):
        written[path] = content.read_bytes()

    async def run(*_, **__):
        return 0, "", ""

    asyncio.run(install_node22(SimpleNamespace(write_file=write_file, exec=run), archive))
    assert written == {"/tmp/node22.tar": b"content"}


class LostError(Exception):
    pass


class Service:
    """A stand-in of the package e2b: the first calls fail, and commands exit with a code."""

    failures = 2
    created: dict = {}  # noqa: RUF012  shared on purpose
    sandbox_id = "sb-1"

    def __init__(self):
        self.commands = self.files = self

    @classmethod
    async def create(cls, **options):
        cls.created = options
        if cls.failures:
            cls.failures -= 1
            raise type("SandboxException", (Exception,), {})("the gateway hung up")
        return cls()

    async def run(self, cmd, **_):
        if cmd == "false":
            raise type("CommandExitException", (Exception,), {"exit_code": 1, "stdout": "", "stderr": "no"})
        return SimpleNamespace(exit_code=0, stdout=cmd, stderr="")

    async def read(self, path, **_):
        raise type("NotFoundException", (Exception,), {})

    async def write(self, path, content, **_):
        raise LostError("lost")

    async def kill(self):
        raise LostError("lost")


def test_a_sandbox_of_e2b_repeats_calls_and_reports_codes(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "e2b", SimpleNamespace(AsyncSandbox=Service))
    monkeypatch.setattr(coding_agents, "LONGEST_WAIT_S", 0.0)
    monkeypatch.delenv("SWE_SANDBOX_IMAGE_METADATA_KEY", raising=False)
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "my/image")

    async def main():
        async with E2BAgentSandbox("img", size="lg", timeout=9) as sandbox:
            assert Service.created == {"timeout": 9, "metadata": {"my/image": "img", "my/size": "lg"}}
            assert await sandbox.exec("ls") == (0, "ls", "")
            assert await sandbox.exec("false") == (1, "", "no")
            with pytest.raises(RolloutError, match="exit code 1 of 'false'"):
                await sandbox.exec("false", check=True)
            assert await sandbox.read_file("/x") == ""
            with pytest.raises(LostError):
                await sandbox.write_file("/x", "text")
        with pytest.raises(RolloutError, match="not running"):
            await sandbox.exec("ls")

    asyncio.run(main())
    assert "could not be killed" in caplog.text


def test_a_sandbox_of_e2b_says_what_it_needs(monkeypatch):
    for name in ("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "SWE_SANDBOX_IMAGE_METADATA_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RolloutError, match="IMAGE_METADATA_KEY is not set"):
        asyncio.run(E2BAgentSandbox("img").__aenter__())
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(RolloutError, match=r"pip install .furlong-rl\[e2b\]"):
        asyncio.run(E2BAgentSandbox("img", image_metadata_key="image").__aenter__())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        (["a", {"type": "text", "text": "b"}, {"type": "output_text", "text": "c"}], "a\nb\nc"),
        (
            [{"type": "tool_result", "content": [{"type": "text", "text": "d"}]}, {"type": "image"}],
            "d\n[image omitted]",
        ),
        ([{"type": "thinking", "text": "e"}, {"type": "other"}, 7], "e\n7"),
    ],
)
def test_the_text_of_a_content(content, text):
    assert agent_adapters.flatten_content(content) == text


def test_an_adapter_names_wrong_uses():
    adapter = agent_adapters.AnthropicAdapter(tokenizer=None, sglang_url="http://unused", tool_parser="qwen25")
    with pytest.raises(RolloutError, match="run_app_in_thread"):
        adapter.open_session("a")
    with pytest.raises(RolloutError, match="running event loop"):
        agent_adapters.run_app_in_thread(adapter.app)
    with pytest.raises(RolloutError, match=r"aiohttp\.web\.AppRunner"):
        agent_adapters.run_app_in_thread(object())  # pyright: ignore[reportArgumentType]
    with pytest.raises(RolloutError, match="debug_callback"):
        agent_adapters.OpenAIAdapter(debug_callback=print)
