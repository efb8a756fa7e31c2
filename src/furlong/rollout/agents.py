"""Black-box agents, which talk to their session over HTTP, and the functions `setup`, `teardown` and `abort`.

`generate` is the custom generate function of runs with `--agent-function-path` or `--agent-command`. It opens a
session, runs the agent, and returns the sample; the samples to train on are those of the session.
`generate_online` is that of runs with `--online-sessions`: an application outside of the run talks to the policy, and
sets the reward.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextvars import Context
from typing import TYPE_CHECKING, Any, cast

from furlong.core.event_loop import call_in_thread
from furlong.core.process_environment import agent_environment
from furlong.core.sample import (
    FIRST_PROMPT,
    OTHER_CONTEXT,
    ROLE,
    ROLE_GROUP,
    STEP_REWARDS,
    TURN_ENDS,
    UNSAMPLED,
    Sample,
)
from furlong.core.supervised_process import ProcessLimits, ending_of, run_supervised
from furlong.core.user_code import describe_exception, is_async, is_raised_by_user, with_hook_errors
from furlong.core.user_functions import accepted_keywords, load_function
from furlong.core.user_modules import import_module_of
from furlong.environments.protocol import AGENT_ERROR, ENVIRONMENT, FAILED_PARTS, INFO, PARTS
from furlong.errors import HookError, InfraError, RolloutError
from furlong.rollout.agent import policy
from furlong.rollout.environments import (
    call_agent_function,
    close_environment_workers,
    has_reward_function,
    record_result,
)
from furlong.rollout.episodes import LIMIT, REISSUED, SILENT
from furlong.sessions.samples import EPISODE, LEAF, MESSAGES, ROLES, TURNS

if TYPE_CHECKING:  # imports a web server, which most runs do not need
    from furlong.sessions.open_session import OpenSession


SHOWN_TEXT = 80  # characters of a result in a message
SHOWN_ERRORS = 2000  # characters of stderr in a message
MAX_NESTING = 100  # of what a command prints
MODEL = "default"
RECORDED = {  # keys of metadata that furlong writes, or reads for metrics
    *(MESSAGES, TURNS, EPISODE, LEAF, ROLE, ROLES, ROLE_GROUP, LIMIT, SILENT, REISSUED, UNSAMPLED, OTHER_CONTEXT),
    FIRST_PROMPT,
    *(AGENT_ERROR, ENVIRONMENT, INFO, PARTS, FAILED_PARTS, STEP_REWARDS, TURN_ENDS, "raw_reward", "round_number"),
}
REMIND_S = 60.0  # without an application, after which the log says how to open a session

logger = logging.getLogger(__name__)

KILLED = {-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGTERM}  # codes, as the shell has them


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Run the agent of the flags on one sample. Raises RolloutError if it fails or never asks the policy."""
    try:
        result = await _run(args, sample, sampling_params)
    except BaseException as error:
        watch = policy().watch
        if isinstance(error, asyncio.CancelledError) and watch.reached is not None:
            _score_without_result(args, sample)  # it hangs
        if isinstance(error, asyncio.CancelledError) and watch.is_overdue and policy().session_tree.tree.nodes:
            late = TimeoutError(f"not finished within {watch.timeout_s:g} s (--generate-timeout)")
            _record_error(args, sample, late)
        if isinstance(error, InfraError) or not is_raised_by_user(error) or not policy().session_tree.tree.nodes:
            if policy().open_session().refusal:
                error.add_note(f"the last request of its session was refused with {policy().open_session().refusal}")
            raise
        _record_error(args, sample, error)
        return sample
    if args.agent_function_path is not None:
        record_result(sample, result)
    else:
        record_command_result(args, sample, result)
    if isinstance(result, str) and not has_reward_function(args, sample):
        raise RolloutError(
            f"the agent returned the text {result[:SHOWN_TEXT]!r}, which is not a reward; return a number or an object "
            "with `reward`, or add a reward function"
        )
    record_posted_result(sample, policy().open_session())
    if not policy().session_tree.tree.nodes:
        sample.metadata[SILENT] = True
        refusal = policy().open_session().refusal
        address = "base_url" if args.agent_function_path else "OPENAI_BASE_URL"
        raise RolloutError(
            f"the agent of sample {sample.index} ended without an answer of the policy; "
            + (f"its last request was refused with {refusal}" if refusal else f"let it call {address}")
        )
    return sample


async def _run(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    opened = policy().open_session()
    if args.agent_function_path is not None:
        function = load_function(args.agent_function_path)
        sends_key = "api_key" in inspect.signature(function).parameters
        values = {
            "base_url": opened.url if sends_key else opened.url_with_key,
            "api_key": opened.key,
            "prompt": sample.prompt,
            "label": sample.label,
            "request_kwargs": request_kwargs(sampling_params),
            "metadata": sample.metadata,
        }
        accepted = accepted_keywords(function, tuple(values))
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
    memory_gib = args.agent_memory_limit
    limits = ProcessLimits(memory_bytes=None if memory_gib is None else int(memory_gib * 2**30))
    variables = {**agent_environment(os.environ, args.agent_env or ()), **variables}
    try:
        return await run_command(args.agent_command, json.dumps(task), variables, limits)
    except InfraError as error:
        if REISSUED in sample.metadata:  # a policy whose commands can kill the agent must not drop bad episodes
            raise RolloutError(f"{error}, twice") from None
        raise


def _record_error(args: Any, sample: Sample, error: BaseException) -> None:
    """Keep the episode of an agent that failed: the reward function decides, and the reward is 0 without one.

    An agent that fails because a limit ended its conversation has not failed.
    """
    if policy().session_tree.counts["full_contexts"]:
        sample.metadata[LIMIT] = "context"
    elif policy().watch.reached is None:
        sample.metadata[AGENT_ERROR] = describe_exception(error)
    _score_without_result(args, sample)


def _score_without_result(args: Any, sample: Sample) -> None:
    if sample.reward is None and not has_reward_function(args, sample):
        sample.reward = 0.0


def request_kwargs(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of chat completion requests for the run's sampling parameters."""
    names = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"}
    return {"model": MODEL, **{name: sampling_params[key] for key, name in names.items() if key in sampling_params}}


def record_command_result(args: Any, sample: Sample, result: Any) -> None:
    """Store what a command printed, which may be text of the policy: nothing that furlong records itself.

    With a reward function it can neither set the reward nor change the metadata that the reward is computed from: new
    keys are added, for built-in verifiers nothing.
    """
    is_scored = has_reward_function(args, sample)
    if not isinstance(result, Mapping):
        record_result(sample, str(result) if is_scored and result is not None else result)
        return
    values = cast("Mapping[str, Any]", result)
    refused = RECORDED & values.keys()
    if is_scored:
        is_own = bool(args.custom_rm_path or sample.custom_rm_path)
        refused |= values.keys() & {"reward", "rm_type", *sample.metadata} if is_own else values.keys()
    record_result(sample, {key: value for key, value in values.items() if key not in refused})
    if refused:
        _warn_refused(tuple(sorted(refused)))


@functools.cache
def _warn_refused(names: tuple[str, ...]) -> None:
    logger.warning(
        "--agent-command printed %s, which is ignored: furlong records it itself, or the run has a reward function, "
        "whose input and result an agent cannot set; print other names, or remove the reward function if the command "
        "computes the reward",
        ", ".join(names),
    )


def record_posted_result(sample: Sample, opened: OpenSession) -> None:
    """Store what a controller posted at the end of the session. Raises RolloutError for an error that it reported."""
    if opened.result is None:
        return
    if opened.result["error"] is not None:
        raise RolloutError(f"an application ended the session of sample {sample.index}: {opened.result['error']}")
    record_result(sample, {**opened.result["metadata"], "reward": opened.result["reward"]})


async def run_command(command: str, task: str, variables: Mapping[str, str], limits: ProcessLimits) -> Any:
    """Run a command, and return the last line of its stdout, decoded if JSON.

    It gets a temporary directory, which is deleted when it ends, and its processes are killed then.
    Raises RolloutError if it exits with another code than 0 or exceeds a limit, InfraError if a signal from outside
    (the out-of-memory killer, a scheduler, a person) ends it.
    """
    ended = await run_supervised(
        ["/bin/sh", "-c", command],
        stdin=task.encode() + b"\n",
        directory=os.getcwd(),
        environment=variables,
        limits=limits,
        temporary=tempfile.gettempdir(),
    )
    if ended.code in KILLED:
        raise InfraError(f"--agent-command was {ending_of(ended.code, '')} from outside")
    if ended.code != 0:
        shown = ended.stderr.decode("utf-8", "replace")[-SHOWN_ERRORS:].strip()
        raise RolloutError(f"--agent-command ended ({ended.ending}): {shown or 'it wrote nothing to stderr'}")
    lines = ended.stdout.decode("utf-8", "replace").strip().splitlines()
    if not lines:
        return None
    try:
        value = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return lines[-1]
    level = [value]
    for _ in range(MAX_NESTING):  # sample files do not store more
        lists = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in lists for each in values]
    return lines[-1] if level else value


async def generate_online(
    args: Any,
    sample: Sample,
    sampling_params: dict[str, Any],  # noqa: ARG001  slime's signature
    evaluation: bool = False,
) -> Sample:
    """Offer one episode. Raises InfraError if the application leaves, RolloutError if it reports an error."""
    from furlong.sessions.session_offers import SessionOffer

    current = policy()
    opened = current.open_session()
    offers = None if current.server is None else current.server.offers
    if offers is None:
        raise RolloutError("this run does not offer sessions; add --online-sessions")
    task = {
        "prompt": sample.prompt,
        "label": sample.label,
        "metadata": sample.metadata,
        "tools": sample.tools,
        "group": sample.group_index,
        "sample": sample.index,
        "evaluation": evaluation,
    }
    offer = SessionOffer(opened, task, needs_reward=not has_reward_function(args, sample))
    current.watch.pause()
    await offers.add(offer)
    try:
        if not await _is_set_within(offer.is_taken, REMIND_S):
            server = opened.url.rpartition("/")[0]
            logger.info("sample %s waits for an application: POST %s", sample.index, server)
            await offer.is_taken.wait()
        current.watch.restart()
        idle_s, watch = args.session_idle_timeout, current.watch
        while not await _is_set_within(offer.is_ended, idle_s - watch.idle_s):
            if watch.idle_s >= idle_s:
                reason = f"it was not used for {idle_s:g} s (--session-idle-timeout)"
                opened.session.end(reason)
                raise InfraError(f"the session of an application expired: {reason}")
    finally:
        offers.withdraw(offer)
    record_posted_result(sample, opened)
    if not current.session_tree.tree.nodes:
        sample.metadata[SILENT] = True
        refused = f"; its last request was refused with {opened.refusal}" if opened.refusal else ""
        raise RolloutError(f"the application ended sample {sample.index} without an answer of the policy{refused}")
    return sample


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event. The event loop keeps cancelled timers, so this one has no context with the episode."""
    waiting = asyncio.create_task(event.wait())
    timer = asyncio.get_running_loop().call_later(max(seconds, 0.0), waiting.cancel, context=Context())
    try:
        await asyncio.wait({waiting})
    finally:
        timer.cancel()
        waiting.cancel()
    return event.is_set()


class AgentHooks:
    """Calls `setup` of each module or class before the first episode, and `teardown` at the end of the run.

    owners: by the flag that names them, for messages. Functions may be async; others run in a thread. `tear_down` is
    also called if the run fails or gets SIGTERM. Errors are HookErrors. has_processes: whether episodes run in other
    processes, which do not see what `setup` assigns.
    """

    def __init__(self, owners: Mapping[str, Any], args: Any, *, has_processes: bool = False) -> None:
        self._owners, self._args, self._has_processes = dict(owners), args, has_processes
        self._done: list[str] = []

    async def set_up(self) -> None:
        """Call `setup(args)` of each owner."""
        for name, owner in self._owners.items():
            self._done.append(name)  # what a failed setup has started needs its teardown
            before = _assigned(owner)
            await self._call(name, owner, "setup")
            after = _assigned(owner)
            changed = [key for key, value in after.items() if key not in before or before[key] is not value]
            if self._has_processes and changed:
                raise HookError(
                    f"{name}: setup assigned {', '.join(changed)}, which the processes of --env-workers do not see; "
                    "pass values in os.environ or a file, or use --env-workers thread"
                )

    async def tear_down(self) -> None:
        """End the processes of environments, then call `teardown(args)` of the owners that were set up, last one first.

        The first error is raised.
        """
        await close_environment_workers()
        names, self._done = self._done[::-1], []
        results = [
            (await asyncio.gather(self._call(name, self._owners[name], "teardown"), return_exceptions=True))[0]
            for name in names
        ]
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def _call(self, name: str, owner: Any, method: str) -> None:
        if callable(function := getattr(owner, method, None)):
            await call_hook(with_hook_errors(function, f"{name}: {method}"), self._args)


def _assigned(owner: Any) -> dict[str, Any]:
    module = sys.modules.get(str(getattr(owner, "__module__", "")))
    return dict(vars(owner)) | ({} if module is None else dict(vars(module)))


def hook_beside(path: str, name: str) -> Callable[..., Any] | None:
    """Return a function of the module of `path`, None if it has none of that name."""
    function = getattr(import_module_of(path), name, None)
    return function if callable(function) else None


async def call_hook(function: Callable[..., Any], *values: Any) -> None:
    """Call a function that may be async; others run in a thread."""
    if is_async(function):
        await function(*values)
        return
    _, error = await call_in_thread(lambda: function(*values), name=getattr(function, "__name__", "hook"))
    if error is not None:
        raise error
