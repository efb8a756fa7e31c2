"""Agents and environments with typical faults, and correct versions of them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import signal
import time

import httpx

from furlong.agent import policy, session
from furlong.chat.parsers import ParsedReply
from furlong.environments.protocol import Step
from furlong.errors import InfraError

CALLS = itertools.count()


def _messages(sample):
    return [{"role": "user", "content": policy().decode(sample.tokens[-8:])}]


async def _turn_of_ids(opened, ids):
    async with httpx.AsyncClient(timeout=60) as client:
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


async def converses_with_tools(args, sample, sampling_params):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    await policy().chat(_messages(sample), tools=[tool], max_new_tokens=4)
    return sample


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


async def asks_once(base_url, prompt, request_kwargs, metadata):
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "1+2="}], **request_kwargs}
        await client.post(f"{base_url}/v1/chat/completions", json=body)


def any_message(message):
    return message["role"]


def all_leaves(leaves):
    return leaves


def no_tools(text, tools):
    return ParsedReply(text)


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


async def cuts_tokens_of_its_history(args, sample, sampling_params):
    opened, ids = session(sample), list(sample.tokens)
    async with httpx.AsyncClient(timeout=60, verify=False) as client:
        for _ in range(2):
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 6}}
            reply = await client.post(f"{opened.url}/generate", json=body)
            text = policy().decode([*ids, *reply.json()["output_ids"]])
            ids = [id for start in range(0, len(text), 3) for id in policy().encode(text[start : start + 3])]
    return sample


async def keeps_the_last_messages(args, sample, sampling_params):
    messages = _messages(sample)
    for turn in range(4):
        reply = await policy().chat(messages[-3:], max_new_tokens=4)
        messages += [reply.message, {"role": "user", "content": f"{turn}+4="}]
    return sample


async def corrects_its_answers(args, sample, sampling_params):
    messages = _messages(sample)
    for turn in range(4):
        reply = await policy().chat(messages, max_new_tokens=4)
        corrected = {**reply.message, "content": f"The answer is {reply.content}."}
        messages += [corrected, {"role": "user", "content": f"{turn}+4="}]
    return sample


async def loses_its_database_after_a_turn(args, sample, sampling_params):
    await policy().chat(_messages(sample), max_new_tokens=4)
    if sample.index % 5 == 0:
        raise InfraError("the database refused the connection")
    return sample


async def hides_that_its_server_refuses(base_url, prompt, request_kwargs):
    url = "http://127.0.0.1:1" if next(CALLS) % 3 == 0 else base_url
    async with httpx.AsyncClient(timeout=60, verify=False) as client:
        with contextlib.suppress(httpx.HTTPError):
            body = {"messages": [{"role": "user", "content": "1+2="}], **request_kwargs}
            await client.post(f"{url}/v1/chat/completions", json=body)


async def answers_by_itself(base_url, prompt, request_kwargs):
    return "3"


def reads_a_truncated_map(base_url, prompt, request_kwargs):
    if next(CALLS) == 2:
        os.kill(os.getpid(), signal.SIGBUS)
    asyncio.run(asks_once(base_url, prompt, request_kwargs, {}))


class Computing(Sleepy):
    async def reset(self, task, seed):
        ended = time.process_time() + 0.1
        while time.process_time() < ended:
            sum(range(1000))
        return task.prompt

    async def step(self, message):
        return Step(reward=0.5, done=True)


class OutOfMemory(Sleepy):
    async def reset(self, task, seed):
        if seed % 8 == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does
        return task.prompt

    async def step(self, message):
        return Step(reward=0.5, done=True)
