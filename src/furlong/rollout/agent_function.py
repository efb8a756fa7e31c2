"""Black-box agents: `--agent-function-path` and `--agent-command`, which talk to their session over HTTP.

`generate` is the custom generate function of such runs. It opens a session, runs the agent, and returns the sample; the
samples to train on are those of the session.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from furlong.core.sample import Sample
from furlong.core.user_code import describe_exception, is_raised_by_user
from furlong.core.user_functions import accepted_keywords, load_function
from furlong.environments.sample_keys import AGENT_ERROR
from furlong.errors import InfraError, RolloutError
from furlong.rollout.agent import policy
from furlong.rollout.agent_hooks import call_hook, hook_beside
from furlong.rollout.environment_calls import call_agent_function
from furlong.rollout.episode_limits import LIMIT, SILENT
from furlong.sandboxes.supervised_process import ProcessLimits, run_supervised

if TYPE_CHECKING:  # imports a web server, which most runs do not need
    from furlong.sessions.open_session import OpenSession

RESULT = "agent_result"  # sample metadata: what the agent returned
SHOWN_ERRORS = 2000  # characters of stderr in a message
MODEL = "default"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Run the agent of the flags on one sample. Raises RolloutError if it fails or never asks the policy."""
    try:
        result = await _run(args, sample, sampling_params)
    except BaseException as error:
        if isinstance(error, InfraError) or not is_raised_by_user(error) or not policy().session_tree.tree.nodes:
            raise
        _record_error(args, sample, error)
        return sample
    record_result(sample, result)
    record_posted_result(sample, policy().open_session())
    if not policy().session_tree.tree.nodes:
        sample.metadata[SILENT] = True
        raise RolloutError(
            f"the agent of sample {sample.index} ended without an answer of the policy; let it call "
            f"{'base_url' if args.agent_function_path else 'OPENAI_BASE_URL'}"
        )
    return sample


async def _run(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    """Run the agent, and return its result. If it is cancelled, the function `abort` of its module is called."""
    opened = policy().open_session()
    if args.agent_function_path is not None:
        values = {
            "base_url": opened.url,
            "prompt": sample.prompt,
            "request_kwargs": request_kwargs(sampling_params),
            "metadata": sample.metadata,
        }
        accepted = accepted_keywords(load_function(args.agent_function_path), tuple(values))
        keywords = {name: values[name] for name in accepted}
        try:
            return await call_agent_function(args.agent_function_path, keywords, sample, args)
        except asyncio.CancelledError:
            if (abort := hook_beside(args.agent_function_path, "abort")) is not None:
                await asyncio.shield(asyncio.create_task(call_hook(abort, sample)))
            raise
    variables = {
        "OPENAI_BASE_URL": f"{opened.url}/v1",
        "OPENAI_API_KEY": opened.key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": opened.url,
        "ANTHROPIC_API_KEY": opened.key,
        "ANTHROPIC_MODEL": MODEL,
    }
    task = {"prompt": sample.prompt, "metadata": sample.metadata, "tools": sample.tools}
    return await run_command(args.agent_command, json.dumps(task), variables, _limits(args.agent_memory_limit))


def _record_error(args: Any, sample: Sample, error: BaseException) -> None:
    """Keep the episode of an agent that failed: the reward function decides, and the reward is 0 without one.

    An agent that fails because a limit ended its conversation has not failed.
    """
    if policy().session_tree.counts["full_contexts"]:
        sample.metadata[LIMIT] = "context"
    elif policy().watch.reached is None:
        sample.metadata[AGENT_ERROR] = describe_exception(error)
    is_scored = args.custom_rm_path or args.rm_type or sample.custom_rm_path or sample.metadata.get("rm_type")
    if sample.reward is None and not is_scored:
        sample.reward = 0.0


def _limits(memory_gib: float | None) -> ProcessLimits:
    return ProcessLimits(memory_bytes=None if memory_gib is None else int(memory_gib * 2**30))


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


def record_posted_result(sample: Sample, opened: OpenSession) -> None:
    """Store what a client posted at the end of the session. Raises RolloutError for an error that it reported."""
    if opened.result is None:
        return
    if opened.result["error"] is not None:
        raise RolloutError(f"a client ended the session of sample {sample.index}: {opened.result['error']}")
    record_result(sample, {**opened.result["metadata"], "reward": opened.result["reward"]})


async def run_command(command: str, task: str, variables: Mapping[str, str], limits: ProcessLimits) -> Any:
    """Run a command, and return the last line of its stdout, decoded if JSON.

    It gets a temporary directory, which is deleted when it ends, and its processes are killed then.
    Raises RolloutError if it exits with another code than 0 or exceeds a limit.
    """
    folder = tempfile.mkdtemp(prefix="furlong-agent-")
    try:
        ended = await run_supervised(
            ["/bin/sh", "-c", command],
            stdin=task.encode() + b"\n",
            directory=os.getcwd(),
            environment={**os.environ, "TMPDIR": folder, **variables},
            limits=limits,
        )
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    if ended.code != 0:
        shown = ended.stderr.decode("utf-8", "replace")[-SHOWN_ERRORS:].strip()
        raise RolloutError(f"--agent-command ended ({ended.ending}): {shown or 'it wrote nothing to stderr'}")
    lines = ended.stdout.decode("utf-8", "replace").strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        return lines[-1]
