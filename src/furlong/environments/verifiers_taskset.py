"""`--environment verifiers:ID`: a taskset of the package verifiers (V1) with its own harness and rewards, unmodified.

Each sample is one episode of verifiers' environment. Its model is the session of the sample, over HTTP, so that the
token ids that the engine sampled are trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any
from weakref import WeakKeyDictionary

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  an extra
from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
    load_environment,
    resolve_env_config,
)

from furlong.core.sample import Sample
from furlong.environments.protocol import INFO, PARTS
from furlong.errors import ConfigError, InfraError, RolloutError

MAX_TASKS = 1_000_000  # that are kept of a taskset
TASKSET = "taskset"
_INFRA = ("SandboxError", "TunnelError", "InterceptionError", "ProviderError")
_servers: set[asyncio.Task[None]] = set()
_served: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[Any]]] = WeakKeyDictionary()


class VerifiersTaskset:
    """One episode of a taskset. target: its id. Row i of the data (`episodes:N`) is its task i modulo their number.

    harness: id of the agent's harness, "taskset" for the taskset's own; null is the one without tools. runtime: type of
    the agent's runtime. options: fields of the taskset's configuration.
    """

    def __init__(self, target: str, harness: str | None = TASKSET, runtime: str = "subprocess", **options: Any) -> None:
        pinned = {} if harness == TASKSET else {"harness": {"id": harness or "null"}}
        agent: dict[str, Any] = {"runtime": {"type": runtime}, **pinned}
        self._target, self._key = target, f"{target} {harness} {runtime} {sorted(options.items())}"
        self._values = {"taskset": {"id": target, **options}, "agent": agent}

    async def run(self, policy: Any, sample: Sample) -> dict[str, Any]:
        """Play the episode, and return its reward with rewards and metrics by name."""
        environment, tasks = await self._environment()
        row = int(sample.metadata.get("episode", sample.group_index or 0))
        opened = policy.open_session()
        client = vf.EvalClientConfig(
            base_url=f"{opened.url}/v1", api_key_var="FURLONG_NO_KEY", headers={"X-Api-Key": opened.key}
        )
        context: Any = vf.ModelContext(model="default", client=client)
        episode: Any = await environment.run_episode(tasks[row % len(tasks)], context)
        self._raise(episode)
        traces = list(episode.traces)
        rewards = {name: each.value for trace in traces for name, each in trace.rewards.items() if each is not None}
        metrics = {name: value for trace in traces for name, value in trace.metrics.items() if value is not None}
        sample.metadata[PARTS] = {name: float(value) for name, value in rewards.items()}
        return {"reward": float(sum(trace.reward for trace in traces)), INFO: metrics, "task": row % len(tasks)}

    def _raise(self, episode: Any) -> None:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not errors:
            return
        text = f"verifiers:{self._target}: {errors[0].type}: {str(errors[0].message)[:500]}"
        raise (InfraError if errors[0].type in _INFRA else RolloutError)(text)

    async def _environment(self) -> tuple[Any, list[Any]]:
        by_key = _served.setdefault(asyncio.get_running_loop(), {})
        if self._key not in by_key:
            by_key[self._key] = asyncio.ensure_future(self._open())
        return await asyncio.shield(by_key[self._key])

    @classmethod
    def check_arguments(cls, target: str, **arguments: Any) -> None:
        """Load the taskset. Raises ConfigError."""
        cls(target, **arguments).load()

    def load(self) -> tuple[Any, list[Any]]:
        """Return verifiers' environment and the tasks. Raises ConfigError."""
        try:
            made: Any = load_environment(resolve_env_config(self._values))
            tasks = [*itertools.islice(made.taskset, MAX_TASKS)]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"--environment verifiers:{self._target} cannot be loaded: {reason}; install the taskset, and check "
                "its options"
            ) from error
        if not tasks:
            raise ConfigError(f"--environment verifiers:{self._target} has no tasks; choose another split or options")
        return made, tasks

    async def _open(self) -> tuple[Any, list[Any]]:
        made, tasks = await asyncio.to_thread(self.load)
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(_serve(made, started))
        _servers.add(task)
        task.add_done_callback(_servers.discard)
        await started
        return made, tasks


async def _serve(made: Any, started: asyncio.Future[None]) -> None:
    """Run the servers of an environment, until the event loop cancels its tasks."""
    try:
        async with made.serving():
            started.set_result(None)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
    except Exception as error:
        if started.done():
            raise
        started.set_exception(InfraError(f"verifiers cannot serve: {type(error).__name__}: {error}"))
