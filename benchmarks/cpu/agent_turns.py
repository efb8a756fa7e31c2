"""Measure turns of agents: sessions over HTTP against `policy().chat`, and the prefix cache against none.

    python benchmarks/cpu/agent_turns.py sessions
    python benchmarks/cpu/agent_turns.py cache

`sessions`: --count episodes of --turns turns, --at-a-time of them; a stand-in engine takes --engine-ms. Columns:
turns per second, median and 99th percentile of a turn in ms, longest time in ms that the event loop was held, and
memory in MiB before and after. The client runs in the same process, and its work is part of the HTTP row.

`cache`: 8 episodes of --turns turns (2 sampled and 8 observed tokens) with a random model in the embedded engine.
Columns: prefilled tokens by new ones, ms of the first turns after the first and of the last ones, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import random
import statistics
import time
from typing import Any

import httpx
import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from furlong.chat.template_boundary import ChatFormat
from furlong.inference.embedded import EmbeddedEngine
from furlong.interfaces import Completion, SamplingParams
from furlong.models.tokenizer import load_tokenizer
from furlong.quickstart.quickstart import model_folder
from furlong.sessions.session import Session
from furlong.sessions.session_server import SessionServer

OBSERVED, SAMPLED, EPISODES = 8, 2, 8


async def _nothing() -> None:
    pass


async def _longest_block(stop: asyncio.Event) -> float:
    """Return the longest time in ms for which the event loop ran nothing else than one callback."""
    longest = 0.0
    while not stop.is_set():
        began = time.perf_counter()
        await asyncio.sleep(0)
        longest = max(longest, time.perf_counter() - began)
        await asyncio.sleep(0.002)
    return longest * 1e3


async def measure_sessions(arguments: argparse.Namespace, *, over_http: bool) -> list[str]:
    """Run the episodes; return the columns."""
    tokenizer: Any = load_tokenizer(model_folder())
    chat_format, answer = ChatFormat(tokenizer), [*tokenizer.encode("12", add_special_tokens=False), 3]
    chat_format.proof()
    server = SessionServer()
    await server.start()
    permits, turns, seconds = asyncio.Semaphore(arguments.at_a_time), arguments.turns, list[float]()

    async def complete(ids: list[int], params: SamplingParams, part: int | None) -> Completion:
        del ids, params, part
        await asyncio.sleep(arguments.engine_ms / 1000)
        return Completion(list(answer), [-0.5] * len(answer), [0] * len(answer), "stop", text="12")

    async def episode(number: int, client: httpx.AsyncClient) -> None:
        async with permits:
            session = Session(chat_format, complete, name=str(number), params=SamplingParams())
            opened = server.open(session, _nothing)
            messages: list[Any] = [{"role": "user", "content": "1+2="}]
            for turn in range(turns):
                began = time.perf_counter()
                if over_http:
                    reply = await client.post(f"{opened.url}/v1/chat/completions", json={"messages": messages})
                    message = reply.json()["choices"][0]["message"]
                else:
                    message = (await session.chat(messages)).message
                seconds.append(time.perf_counter() - began)
                messages += [message, {"role": "user", "content": f"{turn}+4="}]
            await server.end(opened)

    gc.collect()
    before = psutil.Process().memory_info().rss / 2**20
    stop = asyncio.Event()
    watch = asyncio.create_task(_longest_block(stop))
    began = time.perf_counter()
    limits = httpx.Limits(max_connections=arguments.at_a_time, max_keepalive_connections=arguments.at_a_time)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        await asyncio.gather(*(episode(i, client) for i in range(arguments.count)))
    whole = time.perf_counter() - began
    stop.set()
    blocked = await watch
    await server.close()
    gc.collect()
    after = psutil.Process().memory_info().rss / 2**20
    ordered = sorted(seconds)
    tail = ordered[int(len(ordered) * 0.99)]
    numbers = (len(seconds) / whole, statistics.median(ordered) * 1e3, tail * 1e3, blocked, before, after)
    return [f"{number:.1f}" for number in numbers]


def compare_sessions(arguments: argparse.Namespace) -> None:
    """Print one line for each way to talk to the policy."""
    names = ("turns/s", "median ms", "p99 ms", "blocked ms", "MiB before", "MiB after")
    print(f"{'':18}" + "".join(f"{name:>12}" for name in names))
    for name, over_http in (("policy().chat", False), ("session over HTTP", True)):
        columns = asyncio.run(measure_sessions(arguments, over_http=over_http))
        print(f"{name:18}" + "".join(f"{column:>12}" for column in columns))


def _engine(arguments: argparse.Namespace) -> EmbeddedEngine:
    width, length = arguments.width, 64 + arguments.turns * (OBSERVED + SAMPLED)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=arguments.layers,
        num_attention_heads=max(2, width // 32), num_key_value_heads=2, head_dim=32, max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    state = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    dtype = getattr(torch, arguments.dtype)
    return EmbeddedEngine(config=config, state_dict=state, dtype=dtype, num_slots=EPISODES, kv_tokens=1 << 19)


async def measure_cache(arguments: argparse.Namespace, *, is_kept: bool) -> tuple[list[str], list[Any]]:
    """Run the episodes; return the columns and all log-probs."""
    engine, turns = _engine(arguments), arguments.turns
    seconds: list[list[float]] = [[] for _ in range(turns)]
    params = SamplingParams(max_new_tokens=SAMPLED, ignore_eos=True)

    async def episode(number: int) -> list[list[float]]:
        rng = random.Random(number)
        prompt, log_probs = [rng.randrange(500) for _ in range(OBSERVED)], list[list[float]]()
        for turn in range(turns):
            key = str(number) if is_kept else None
            began = time.perf_counter()
            own = dataclasses.replace(params, sampling_seed=1000 * number + turn, prefix_key=key)
            done = await engine.generate(prompt, own)
            seconds[turn].append(time.perf_counter() - began)
            log_probs.append(done.log_probs)
            prompt = [*prompt, *done.tokens, *(rng.randrange(500) for _ in range(OBSERVED))]
        return log_probs

    try:
        log_probs = await asyncio.gather(*(episode(i) for i in range(EPISODES)))
        new = EPISODES * (OBSERVED + (turns - 1) * (OBSERVED + SAMPLED))
        prefilled = engine.stats().prefilled_tokens / new
    finally:
        await engine.close()
    medians = [statistics.median(each) * 1e3 for each in seconds]
    first, last = statistics.median(medians[1:6]), statistics.median(medians[-5:])
    return [f"{prefilled:.2f}", f"{first:.2f}", f"{last:.2f}", f"{last / first:.1f}"], log_probs


def compare_cache(arguments: argparse.Namespace) -> None:
    """Print one line with the cache and one without, and whether the log-probs are the same bits."""
    torch.set_num_threads(arguments.threads)
    print(f"{'':10}{'prefilled':>12}{'turn 2 ms':>12}{'last ms':>12}{'ratio':>8}")
    seen: list[list[Any]] = []
    for name, is_kept in (("cache", True), ("none", False)):
        columns, log_probs = asyncio.run(measure_cache(arguments, is_kept=is_kept))
        seen.append(log_probs)
        print(f"{name:10}" + "".join(f"{c:>{w}}" for c, w in zip(columns, (12, 12, 12, 8), strict=True)))
    print("log-probs are", "bitwise equal" if seen[0] == seen[1] else "DIFFERENT")


def add_commands(commands: Any) -> None:
    """Add `sessions` and `cache` to the commands of a parser."""
    sessions = commands.add_parser("sessions", help="sessions over HTTP against policy().chat")
    sessions.add_argument("--count", type=int, default=2000)
    sessions.add_argument("--at-a-time", type=int, default=512)
    sessions.add_argument("--turns", type=int, default=6)
    sessions.add_argument("--engine-ms", type=float, default=5.0)
    sessions.set_defaults(run=compare_sessions)
    cache = commands.add_parser("cache", help="the prefix cache against none")
    cache.add_argument("--turns", type=int, default=200)
    cache.add_argument("--width", type=int, default=64)
    cache.add_argument("--layers", type=int, default=2)
    cache.add_argument("--threads", type=int, default=1)
    cache.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    cache.set_defaults(run=compare_cache)


def main() -> None:
    """Run one comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_commands(parser.add_subparsers(required=True))
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
