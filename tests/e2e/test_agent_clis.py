"""Claude Code and Codex from npm, unmodified and with their own defaults, as agents of a session.

The CLIs are installed once, into a temporary folder, and started by the programs of their guides.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from chat_zoo import Script, bpe_tokenizer
from fakes_engine import tiny_engine, tiny_model
from furlong.chat.template_boundary import ChatFormat
from furlong.core.sample import Sample
from furlong.interfaces import Completion, SamplingParams
from furlong.sessions.open_session import OpenSession
from furlong.sessions.samples import samples_from_session
from furlong.sessions.session import Session
from furlong.sessions.session_server import SessionServer
from runs import REPOSITORY

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm installs the agents; apt install npm"),
]
PACKAGES = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex"}
INSTALL_S, AGENT_S = 300, 180
TASK = "Write hello into a.txt and read it."
PAGES = {"claude": "claude-code.md", "codex": "codex.md"}
PROGRAM = re.compile(r"<<'SH'\n(.*?)^SH$", re.DOTALL | re.MULTILINE)  # of the page in docs/guides/agents


@functools.cache
def installed(name: str) -> str:
    """Return the folder with the command of a CLI."""
    folder = tempfile.mkdtemp(prefix=f"furlong-{name}-")
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", folder, PACKAGES[name]]
    subprocess.run(command, check=True, timeout=INSTALL_S)
    return f"{folder}/node_modules/.bin"


async def run_agent(name: str, opened: OpenSession, folder: Path) -> tuple[int, str]:
    """Run the program of the guide, as `--agent-command` does; return its exit code and its output."""
    (program,) = PROGRAM.findall((REPOSITORY / "docs/guides/agents" / PAGES[name]).read_text())
    variables = {
        "PATH": f"{installed(name)}:{os.environ['PATH']}",
        "TMPDIR": str(folder),
        "OPENAI_BASE_URL": f"{opened.url}/v1",
        "OPENAI_API_KEY": opened.key,
        "OPENAI_MODEL": "actor",
        "ANTHROPIC_BASE_URL": opened.url,
        "ANTHROPIC_API_KEY": opened.key,
        "ANTHROPIC_MODEL": "actor",
    }
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", program),
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(json.dumps({"prompt": TASK}).encode()), AGENT_S)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode or 0, output.decode()


def with_session(
    tokenizer: Any,
    complete: Callable[..., Awaitable[Completion]],
    name: str,
    folder: Path,
    params: SamplingParams,
    limit: Callable[[], str] = str,
) -> tuple[Session, int, str]:
    """Let a CLI work with a session; return the session, the exit code and the output."""

    async def nothing() -> None:
        pass

    async def main() -> tuple[Session, int, str]:
        server = SessionServer()
        session = Session(ChatFormat(tokenizer), complete, name="s", params=params, context_len=1 << 20, limit=limit)
        opened = server.open(session, nothing)
        try:
            return session, *await run_agent(name, opened, folder)
        finally:
            await server.end(opened)
            await server.close()

    installed(name)  # outside of the time limit
    return asyncio.run(main())


def call(tool: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def check_ids(session: Session, asked: Sequence[Sequence[int]]) -> None:
    """Check that each prompt continues the one before and its answer, and that answers are trained as sampled."""
    nodes = session.tree.nodes
    for node, before, after in zip(nodes, asked, asked[1:], strict=False):
        assert list(after[: len(before) + len(node.sampled)]) == [*before, *node.sampled]
    assert (len(session.tree.leaves()), session.tree.branch_reasons.total()) == (1, 0)
    (sample,) = samples_from_session(session, Sample(index=0))
    mask = sample.loss_mask or []
    trained = [
        token for token, is_trained in zip(sample.tokens[sample.prompt_length :], mask, strict=True) if is_trained
    ]
    assert trained == [token for node in nodes for token in node.sampled]


@pytest.mark.parametrize(
    ("name", "tool", "argument", "instructions"),
    [
        ("claude", "Bash", "command", ["You are an interactive agent", TASK]),
        ("codex", "exec_command", "cmd", ["You are a coding agent running in the Codex CLI", TASK]),
    ],
)
def test_three_turns_of_an_unmodified_agent(name, tool, argument, instructions, tmp_path):
    tokenizer = bpe_tokenizer("qwen")
    turns = [f"I write it.\n{call(tool, **{argument: 'echo hello > a.txt'})}", call(tool, **{argument: "cat a.txt"})]
    script = Script(tokenizer, *turns, "The file says hello.", *["no more"] * 5)
    session, code, output = with_session(tokenizer, script, name, tmp_path, SamplingParams(max_new_tokens=4096))
    assert (code, "The file says hello." in output) == (0, True), output
    (written,) = tmp_path.rglob("a.txt")
    assert written.read_text() == "hello\n"
    assert len(script.asked) == 3
    prompt = tokenizer.decode(script.asked[0])
    assert [text for text in instructions if text not in prompt] == []
    assert "hello" in tokenizer.decode(session.tree.nodes[2].added)
    check_ids(session, script.asked)


@pytest.mark.parametrize(
    ("name", "tool", "argument"), [("claude", "Bash", "command"), ("codex", "exec_command", "cmd")]
)
def test_an_agent_ends_at_the_limit_of_turns(name, tool, argument, tmp_path):
    tokenizer = bpe_tokenizer("qwen")
    script = Script(tokenizer, call(tool, **{argument: "echo hello > a.txt"}))
    session, code, output = with_session(
        *(tokenizer, script, name, tmp_path, SamplingParams(max_new_tokens=4096)),
        limit=lambda: "turns" if script.asked else "",
    )
    assert (len(session.tree.nodes), code != 0) == (1, True), output
    assert 1 <= session.counts["limited"] <= 20, output


@pytest.mark.parametrize("name", PACKAGES)
def test_an_unmodified_agent_of_the_embedded_engine(name, tmp_path):
    tokenizer = bpe_tokenizer("qwen")
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}  # for prompts of 60,000 tokens
    config, model = tiny_model("qwen3", vocab_size=416, max_position_embeddings=1 << 17, **small)
    engine = tiny_engine(config, model.state_dict(), tokenizer=tokenizer)
    asked: list[list[int]] = []

    async def complete(ids: list[int], params: SamplingParams, _part: Any, stream: Any = None) -> Completion:
        asked.append(list(ids))
        return await (engine.generate(ids, params) if stream is None else engine.stream(ids, params, stream))

    params = SamplingParams(max_new_tokens=8, sampling_seed=1, prefix_key="s")
    session, _, output = with_session(tokenizer, complete, name, tmp_path, params)
    asyncio.run(engine.close())
    assert session.tree.nodes, output
    assert all(len(node.sampled) == len(node.completion.log_probs) > 0 for node in session.tree.nodes)
    assert [node.ids()[: len(ids)] for node, ids in zip(session.tree.nodes, asked, strict=True)] == asked
