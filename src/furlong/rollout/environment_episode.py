"""Environments of `--environment`: one instance plays one episode with the policy.

`generate` is the custom generate function of such runs. Prompts, turns, masks, budgets and the parsing of replies are
those of `policy().chat`; the environment gets messages and returns messages.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import xxhash

from furlong.config.checks.environment_specs import EnvironmentSpec, parse_environments
from furlong.core.sample import Sample
from furlong.core.user_functions import load_function
from furlong.environments.protocol import Task
from furlong.environments.sample_keys import ENVIRONMENT, INFO, STEP_REWARDS
from furlong.errors import RolloutError
from furlong.rollout.agent import policy
from furlong.rollout.agent_function import record_result
from furlong.rollout.environment_calls import PlayedEnvironment, opened_environment
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
    async with opened_environment(spec, made, sample, args) as environment:
        if environment.leads:
            record_result(sample, await environment.run(sample))
        else:
            await _play(environment, sample, seed_of_task(args.rollout_seed, sample.group_index), is_scored=is_scored)
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


async def _play(environment: PlayedEnvironment, sample: Sample, seed: int, *, is_scored: bool) -> None:
    """Alternate between the policy and the environment until one of them ends the episode."""
    prompt = sample.prompt
    task = Task(prompt if isinstance(prompt, str) else list(prompt), sample.label, sample.metadata, sample.tools)
    observation = await environment.reset(task, seed)
    messages = list(observation.messages)
    rewards: list[float] = []
    info: dict[str, Any] = {}
    try:
        while True:
            reply = await policy().chat(messages, tools=observation.tools)
            if not reply.tokens:  # a limit has ended the episode
                break
            step = await environment.step(reply.message)
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
            f"--environment {environment.path}: no step returned a reward, and the class has no rubric; return "
            "Step(reward=...), set rubric = Rubric(...), or give --custom-rm-path or --rm-type"
        )
