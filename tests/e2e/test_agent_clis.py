"""Agents from npm and PyPI, unmodified and with their own defaults, in a session: the programs of their guides.

A package is installed once a week, into a cache folder.
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
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
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

pytestmark = pytest.mark.nightly
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "furlong-test-agents"
INSTALL_S, AGENT_S = 600, 180
TASK = "What is 13 times 2000?"
PROGRAM = re.compile(r"<<'(SH|PY|JS)'\n(.*?)^\1$", re.DOTALL | re.MULTILINE)  # of the page in docs/guides/agents
FILES = {"SH": "agent.sh", "PY": "agent.py", "JS": "agent.mjs"}
# As `--agent-function-path agent.py:solve` calls it, in a process that imports the agent's packages.
FUNCTION = """
import asyncio, json, os, sys
from agent import solve
url, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["OPENAI_API_KEY"]
print(json.dumps(asyncio.run(solve(url, key, json.load(sys.stdin)["prompt"], {"model": "actor"}, {}))))
"""


def call(tool: str, arguments: str) -> str:
    """Return a call in the tags of the template. `arguments` is JSON, as the model wrote it."""
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'


def shell(tool: str, argument: str) -> tuple[str, ...]:
    """Return answers that compute in two commands."""
    commands = "echo $((13 * 2000)) > a.txt", "cat a.txt"
    calls = [call(tool, json.dumps({argument: command})) for command in commands]
    return f"I calculate.\n{calls[0]}", calls[1], "It is 26000."


PRODUCTS = (
    call("multiply", '{"a": 13.0, "b": 2}'),
    call("multiply", '{"b": 1e3, "a": 26}'),
)  # JavaScript writes 13, 1000
IN_SCHEMA = tuple(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") for text in PRODUCTS)


@dataclass(frozen=True)
class Agent:
    """An agent, its packages, three answers of the policy, and texts of its prompt. is_json: answers with a schema."""

    packages: tuple[str, ...]
    answers: tuple[str, ...]
    instructions: tuple[str, ...] = ("You calculate with the tool.",)
    is_json: tuple[bool, ...] = (False, False, False)
    is_npm: bool = False


AGENTS = {
    "claude-code": Agent(
        ("@anthropic-ai/claude-code",), shell("Bash", "command"), ("You are an interactive agent",), is_npm=True
    ),
    "codex": Agent(
        ("@openai/codex",),
        shell("exec_command", "cmd"),
        ("You are a coding agent running in the Codex CLI",),
        is_npm=True,
    ),
    "ai-sdk": Agent(("ai", "@ai-sdk/openai", "zod"), (*PRODUCTS, "It is 26000."), is_npm=True),
    "openai-agents": Agent(("openai-agents",), (*IN_SCHEMA, '{"answer": 26000}'), is_json=(True, True, True)),
    "pydantic-ai": Agent(
        ("pydantic-ai-slim[openai]",),
        (*IN_SCHEMA, '{"name": "final_result", "arguments": {"answer": 26000}}'),
        is_json=(True, True, True),
    ),
    "langgraph": Agent(("langgraph", "langchain-openai"), (*PRODUCTS, "It is 26000.")),
    "mini-swe-agent": Agent(
        ("mini-swe-agent",),
        (
            *shell("bash", "command")[:2],
            call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo It is 26000."}'),
        ),
        ("You are a helpful assistant",),
    ),
}


@functools.cache
def installed(name: str) -> Path:
    """Return the folder with the packages of an agent; skip the test if they cannot be installed."""
    agent, folder = AGENTS[name], CACHE / f"{name}-{time.strftime('%G-%V')}"
    if folder.exists():
        return folder
    for old in CACHE.glob(f"{name}-*"):
        shutil.rmtree(old)
    new = CACHE / f"new-{name}"
    npm = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(new)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(new)]
    command = [*(npm if agent.is_npm else pip), *agent.packages]
    try:
        subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"npm installs {name}: apt install npm")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{' '.join(agent.packages)} cannot be installed: {error}; {str(error.stderr)[-300:]}")
    return new.rename(folder)


async def run_agent(name: str, opened: OpenSession, folder: Path) -> tuple[int, str]:
    """Run the program of the guide, as the flags of the guide do; return its exit code and its output."""
    ((language, program),) = PROGRAM.findall((REPOSITORY / f"docs/guides/agents/{name}.md").read_text())
    (folder / FILES[language]).write_text(program)
    packages = installed(name)
    if AGENTS[name].is_npm:
        (folder / "node_modules").symlink_to(packages / "node_modules")
    commands = {"SH": ["bash", "agent.sh"], "PY": [sys.executable, "-c", FUNCTION], "JS": ["node", "agent.mjs"]}
    variables = {
        "PATH": f"{packages}/node_modules/.bin:{packages}/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{folder}:{packages}",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "OPENAI_BASE_URL": f"{opened.url}/v1",
        "OPENAI_API_KEY": opened.key,
        "OPENAI_MODEL": "actor",
        "ANTHROPIC_BASE_URL": opened.url,
        "ANTHROPIC_API_KEY": opened.key,
        "ANTHROPIC_MODEL": "actor",
    }
    process = await asyncio.create_subprocess_exec(
        *commands[language],
        cwd=folder,
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


@pytest.mark.parametrize("name", AGENTS)
def test_three_turns_of_an_unmodified_agent(name, tmp_path):
    agent, tokenizer = AGENTS[name], bpe_tokenizer("qwen")
    script = Script(tokenizer, *agent.answers, *["no more"] * 5)
    session, code, output = with_session(tokenizer, script, name, tmp_path, SamplingParams(max_new_tokens=4096))
    assert (code, "26000" in output) == (0, True), output
    assert len(script.asked) == 3, output
    prompt = tokenizer.decode(script.asked[0])
    assert [text for text in (*agent.instructions, TASK) if text not in prompt] == []
    assert "26000" in tokenizer.decode(session.tree.nodes[2].added)
    assert tuple(node.params.json_schema is not None for node in session.tree.nodes) == agent.is_json
    check_ids(session, script.asked)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_ends_at_the_limit_of_turns(name, tmp_path):
    tokenizer = bpe_tokenizer("qwen")
    script = Script(tokenizer, AGENTS[name].answers[0])
    session, code, output = with_session(
        *(tokenizer, script, name, tmp_path, SamplingParams(max_new_tokens=4096)),
        limit=lambda: "turns" if script.asked else "",
    )
    assert (len(session.tree.nodes), code != 0) == (1, True), output
    assert 1 <= session.counts["limited"] <= 20, output


@pytest.mark.parametrize("name", AGENTS)
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
