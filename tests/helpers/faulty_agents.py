"""Agents and environments with typical faults, and correct versions of them."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import time

import httpx

from furlong.agent import policy, session
from furlong.environments.protocol import Step
from furlong.errors import InfraError

CALLS = itertools.count()


def _messages(sample):
    return [{"role": "user", "content": policy().decode(sample.tokens[-8:])}]


async def _turn_of_ids(opened, ids):
    async with httpx.AsyncClient(timeout=60, headers={"X-Api-Key": opened.key}) as client:
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 4}}
        reply = await client.post(f"{opened.url}/inference/v1/generate", json=body)
    return reply.json()["choices"][0]["token_ids"]


async def sends_text_encoded_again(args, sample, sampling_params):
    opened, ids = session(sample), list(sample.tokens)
    sampled = await _turn_of_ids(opened, ids)
    text = policy().decode([*ids, *sampled]) + "1+2="
    await _turn_of_ids(opened, [id for character in text for id in policy().encode(character)])
    return sample


async def sends_the_sampled_ids(args, sample, sampling_params):
    opened, ids = session(sample), list(sample.tokens)
    sampled = await _turn_of_ids(opened, ids)
    await _turn_of_ids(opened, [*ids, *sampled, *policy().encode("1+2=")])
    return sample


async def _converse(sample, *, numbers: bool, turns: int = 3):
    messages = _messages(sample)
    for turn in range(turns):
        reply = await policy().chat(messages, max_new_tokens=4)
        messages = [*messages, reply.message, {"role": "user", "content": f"{turn}+4="}]
        if numbers:
            messages[0] = {"role": "user", "content": f"turn {turn + 2} of {turns}: 1+1="}
    return sample


async def numbers_its_turns_in_the_first_message(args, sample, sampling_params):
    return await _converse(sample, numbers=True)


async def converses(args, sample, sampling_params):
    return await _converse(sample, numbers=False)


async def loses_its_sandbox_at_times(args, sample, sampling_params):
    if next(CALLS) % 4 == 0:
        raise InfraError("the sandbox was evicted: no space left on the host")
    return await converses(args, sample, sampling_params)


async def gives_up_at_times(base_url, prompt, request_kwargs):
    if next(CALLS) % 4 == 0:
        return
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "1+2="}], **request_kwargs}
        await client.post(f"{base_url}/v1/chat/completions", json=body)


class Sleepy:
    async def reset(self, task, seed):
        return task.prompt

    async def step(self, message):
        time.sleep(0.1)
        return Step(reward=0.5, done=True)


class Crashing(Sleepy):
    steps = 0  # in this process

    async def step(self, message):
        Crashing.steps += 1
        if Crashing.steps == 3:
            ctypes.string_at(0)
        return Step(reward=0.5, done=True)


class Patient(Sleepy):
    async def step(self, message):
        await asyncio.sleep(0.1)
        return Step(reward=0.5, done=True)
