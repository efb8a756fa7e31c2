"""Black-box agents: `--agent-function-path` and `--agent-command`, which talk to their session over HTTP.

`generate` is the custom generate function of such runs. It opens a session, runs the agent, and returns the sample; the
samples to train on are those of the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from typing import Any, cast

from furlong.config.hooks import accepted_keywords, load_function
from furlong.core.sample import Sample
from furlong.core.user_code import is_async
from furlong.errors import RolloutError
from furlong.rollout.agent import policy

RESULT = "agent_result"  # sample metadata: what the agent returned
MAX_OUTPUT = 1 << 20  # bytes of stdout that are kept, from the end
SHOWN_ERRORS = 2000  # characters of stderr in a message
MODEL = "default"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Run the agent of the flags on one sample. Raises RolloutError if it fails or never asks the policy."""
    opened = policy().open_session()
    if args.agent_function_path is not None:
        function = load_function(args.agent_function_path)
        values = {
            "base_url": opened.url,
            "prompt": sample.prompt,
            "request_kwargs": request_kwargs(sampling_params),
            "metadata": sample.metadata,
        }
        keywords = {name: values[name] for name in accepted_keywords(function, tuple(values))}
        result = await function(**keywords) if is_async(function) else await asyncio.to_thread(function, **keywords)
    else:
        variables = {
            "OPENAI_BASE_URL": f"{opened.url}/v1",
            "OPENAI_API_KEY": opened.key,
            "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": opened.url,
            "ANTHROPIC_API_KEY": opened.key,
            "ANTHROPIC_MODEL": MODEL,
        }
        task = {"prompt": sample.prompt, "metadata": sample.metadata, "tools": sample.tools}
        result = await run_command(args.agent_command, json.dumps(task), variables)
    record_result(sample, result)
    if not policy().session_tree.tree.nodes:
        raise RolloutError(
            f"the agent of sample {sample.index} ended without an answer of the policy; let it call "
            f"{'base_url' if args.agent_function_path else 'OPENAI_BASE_URL'}"
        )
    return sample


def request_kwargs(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of chat completion requests for the run's sampling parameters."""
    names = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"}
    return {"model": MODEL, **{name: sampling_params[key] for key, name in names.items() if key in sampling_params}}


def record_result(sample: Sample, result: Any) -> None:
    """Store what an agent returned: a number is the reward, an object is metadata and may have a `reward`."""
    if result is None:
        return
    if isinstance(result, Mapping):
        values = dict(cast("Mapping[str, Any]", result))
        reward = values.pop("reward", None)
        sample.metadata.update(values)
        if reward is not None:
            sample.reward = reward
    elif isinstance(result, int | float):
        sample.reward = float(result)
    else:
        sample.metadata[RESULT] = result if isinstance(result, str) else repr(result)[:1000]


async def run_command(command: str, task: str, variables: Mapping[str, str]) -> Any:
    """Run a command in a session of processes of its own, and return the last line of its stdout, decoded if JSON.

    Raises RolloutError if it exits with another code than 0. Its processes are killed when it ends or is cancelled.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_shell(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **variables}, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [asyncio.create_task(_tail(stream)) for stream in (process.stdout, process.stderr)]
    try:
        with contextlib.suppress(ConnectionError):  # an agent need not read its task
            process.stdin.write(task.encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        code = await process.wait()
        _kill_group(process.pid)  # what it left running would keep the pipes open
        output, errors = await asyncio.gather(*readers)
    finally:
        _kill_group(process.pid)
        for reader in readers:
            reader.cancel()
        if process.returncode is None:
            await process.wait()
    if code != 0:
        shown = errors.decode("utf-8", "replace")[-SHOWN_ERRORS:].strip()
        raise RolloutError(f"--agent-command exited with code {code}: {shown or 'it wrote nothing to stderr'}")
    lines = output.decode("utf-8", "replace").strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        return lines[-1]


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end, and return its last `MAX_OUTPUT` bytes."""
    kept = bytearray()
    while part := await stream.read(1 << 16):
        kept += part
        del kept[:-MAX_OUTPUT]
    return bytes(kept)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
