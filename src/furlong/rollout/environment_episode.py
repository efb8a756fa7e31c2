"""Environments of `--environment`: one instance plays one episode with the policy.

`generate` is the custom generate function of such runs. Prompts, turns, masks, budgets and the parsing of replies are
those of `policy().chat`; the environment gets messages and returns messages.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import xxhash

from furlong.config.checks.environment_specs import EnvironmentSpec, parse_environments
from furlong.config.hooks import load_function
from furlong.core.daemon_calls import call_in_thread
from furlong.core.sample import Sample
from furlong.core.user_code import is_async
from furlong.environments.protocol import Message, Observation, Step, Task
from furlong.environments.sample_keys import ENVIRONMENT, INFO, STEP_REWARDS
from furlong.errors import RolloutError
from furlong.rollout.agent import policy
from furlong.rollout.agent_function import record_result
from furlong.rollout.episode_limits import LIMIT


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:  # noqa: ARG001  slime's signature
    """Play one episode of the sample's environment. Raises RolloutError for what the environment did wrong."""
    spec = spec_of(parse_environments(args.environment), sample)
    made: Any = load_function(spec.path)
    sample.metadata[ENVIRONMENT] = spec.name
    rubric = getattr(made, "rubric", None)
    is_scored = bool(args.custom_rm_path or args.rm_type or sample.custom_rm_path or sample.metadata.get("rm_type"))
    if rubric is not None and not is_scored:
        is_scored = True
        sample.custom_rm_path = spec.rubric_path + (".of_group" if getattr(rubric, "has_group_parts", False) else "")
    player = _Player(spec, args.environment_workers)
    await player.call(_Maker(made, spec.arguments), "make")
    try:
        if hasattr(player.instance, "run"):
            record_result(sample, await player.call(player.instance, "run", policy(), sample))
        else:
            await _play(player, sample, seed_of_task(args.rollout_seed, sample.group_index), is_scored=is_scored)
    finally:
        if hasattr(player.instance, "close"):
            await player.call(player.instance, "close")
    return sample


def spec_of(specs: Sequence[EnvironmentSpec], sample: Sample) -> EnvironmentSpec:
    """Return the environment of a sample, which its metadata name in a mixture. Raises RolloutError."""
    name = sample.metadata.get(ENVIRONMENT)
    if len(specs) == 1:
        return specs[0]
    for spec in specs:
        if spec.name == name:
            return spec
    raise RolloutError(
        f"sample {sample.index} has metadata.environment {name!r}, which is none of "
        f"{', '.join(spec.name for spec in specs)}; give an evaluation set the name of its environment, or set it in "
        "the metadata of its rows"
    )


def seed_of_task(rollout_seed: int, group_index: int | None) -> int:
    """Return the seed of an episode: equal for the samples of a group, also when it is issued again."""
    return xxhash.xxh64_intdigest(struct.pack("<qq", rollout_seed, group_index or 0)) & 0x7FFFFFFF


@dataclass(frozen=True)
class _Maker:
    """Makes the instance of an episode, in a thread as other calls."""

    made: Any
    arguments: Mapping[str, Any]

    def make(self) -> Any:
        """Return the instance."""
        return self.made(**self.arguments)


_permits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()  # of the threads


class _Player:
    """The environment of one episode. Methods that are not async run in threads."""

    def __init__(self, spec: EnvironmentSpec, num_workers: int) -> None:
        self.spec, self.instance = spec, cast("Any", None)
        self._permits = _permits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(num_workers))

    async def call(self, owner: Any, name: str, *values: Any) -> Any:
        """Call a method of the environment."""
        method = getattr(owner, name)
        if is_async(method):
            return await method(*values)
        async with self._permits:
            value, error = await call_in_thread(lambda: method(*values), name=f"environment {self.spec.name}")
        if error is not None:
            raise error
        if isinstance(owner, _Maker):
            self.instance = value
        return value


async def _play(player: _Player, sample: Sample, seed: int, *, is_scored: bool) -> None:
    """Alternate between the policy and the environment until one of them ends the episode."""
    prompt = sample.prompt
    task = Task(prompt if isinstance(prompt, str) else list(prompt), sample.label, sample.metadata, sample.tools)
    observation = _observation(await player.call(player.instance, "reset", task, seed), player.spec)
    messages = list(observation.messages)
    rewards: list[float] = []
    info: dict[str, Any] = {}
    try:
        while True:
            reply = await policy().chat(messages, tools=observation.tools)
            if not reply.tokens:  # a limit has ended the episode
                break
            step = _step(await player.call(player.instance, "step", reply.message), player.spec)
            info.update(step.info)
            if step.reward is not None:
                rewards += [0.0] * (len(policy().sampled) - 1 - len(rewards)) + [float(step.reward)]
            if step.truncated:
                sample.metadata[LIMIT] = "environment"
            if step.done or step.truncated or reply.finish_reason == "abort":
                break
            added = [{"role": "user", "content": step.messages}] if isinstance(step.messages, str) else step.messages
            messages += [reply.message, *added]
    finally:
        sample.metadata[STEP_REWARDS], sample.metadata[INFO] = rewards, info
        if not is_scored:
            sample.reward = sum(rewards)
    if not (is_scored or rewards or policy().watch.reached):
        raise RolloutError(
            f"--environment {player.spec.path}: no step returned a reward, and the class has no rubric; return "
            "Step(reward=...), set rubric = Rubric(...), or give --custom-rm-path or --rm-type"
        )


def _observation(value: Any, spec: EnvironmentSpec) -> Observation:
    """Return what `reset` returned as an observation. Raises RolloutError."""
    if isinstance(value, Observation):
        return value
    if isinstance(value, str):
        return Observation([{"role": "user", "content": value}])
    if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in cast("list[Any]", value)):
        return Observation(cast("list[Message]", value))
    raise RolloutError(
        f"--environment {spec.path}: reset returned {value!r:.200}; return an Observation, a list of messages, or text"
    )


def _step(value: Any, spec: EnvironmentSpec) -> Step:
    """Return what `step` returned. Raises RolloutError."""
    where = f"--environment {spec.path}: step returned"
    if not isinstance(value, Step):
        raise RolloutError(f"{where} {value!r:.200}; return a furlong.environments.Step")
    if not (value.done or value.truncated or value.messages):
        raise RolloutError(f"{where} no messages, and done is False; return messages, or done=True")
    reward: Any = value.reward
    if reward is not None and (not isinstance(reward, int | float) or not abs(reward) < float("inf")):
        raise RolloutError(f"{where} the reward {reward!r:.80}; return a finite number, or None")
    return value
