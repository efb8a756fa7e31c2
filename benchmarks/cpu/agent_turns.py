"""Measure turns of agents: sessions over HTTP against `policy().chat`, and the prefix cache against none.

    python benchmarks/cpu/agent_turns.py sessions
    python benchmarks/cpu/agent_turns.py cache

`sessions`: --count episodes of --turns turns, --at-a-time of them; a stand-in engine takes --engine-ms. The agents over
HTTP are in another process (`lean_clients.py`); the HTTP server is a thread. The first two rows have no time between
turns, so that they show how many turns a second the process manages. In the other pairs a tool takes --tool-ms on
average after each turn, and episodes do not begin at once, so that they show the time of a turn at the same load.
Columns: turns per second, CPU time of this process per turn, median and 99th percentile of a turn in ms, longest time
in ms by which the event loop was late, memory in MiB before, and after by before.

`cache`: 8 episodes of --turns turns (2 sampled and 8 observed tokens) with a random model in the embedded engine, once
for each hidden size of --widths. Columns: prefilled tokens by new ones, ms of the first turns after the first and of
the last ones, and their ratio.
"""

# ruff: noqa: ARG002  stand-ins have the signatures of the interfaces

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from lean_clients import QUESTION, next_question, start_time, tool_time
from transformers import AutoConfig, AutoModelForCausalLM

from furlong.chat.template_boundary import ChatFormat
from furlong.core.garbage import raise_gc_threshold
from furlong.core.outcome import Outcome
from furlong.core.sample import Sample
from furlong.core.weights import WeightSource
from furlong.inference.embedded import EmbeddedEngine
from furlong.interfaces import Completion, Engine, PauseMode, SamplingParams
from furlong.models.tokenizer import load_tokenizer
from furlong.quickstart.quickstart import model_folder
from furlong.rollout.generate import Generation, policy_of_sample
from furlong.rollout.policy import Policy
from furlong.sessions.session_server import SessionServer

OBSERVED, SAMPLED, EPISODES = 8, 2, 8
WATCH_S = 0.002  # between two looks at the event loop


async def _longest_block(stop: asyncio.Event) -> float:
    """Return the longest time in ms by which a callback was late: other callbacks, or a garbage collection, ran."""
    longest = 0.0
    while not stop.is_set():
        due = time.perf_counter() + WATCH_S
        await asyncio.sleep(WATCH_S)
        longest = max(longest, time.perf_counter() - due)
    return longest * 1e3


class TimedEngine(Engine):
    """Answers each request with the same tokens after `turn_s`. A pause waits for the requests."""

    def __init__(self, turn_s: float, answer: Sequence[int] = (7,)) -> None:
        self.turn_s, self.answer, self.version, self._busy = turn_s, list(answer), 0, 0
        self._gate = asyncio.Event()
        self._gate.set()

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        """Return the answer."""
        await self._gate.wait()
        self._busy += 1
        version = self.version
        try:
            await asyncio.sleep(self.turn_s)
        finally:
            self._busy -= 1
        size = len(self.answer)
        return Completion(
            list(self.answer), [-0.5] * size, [version] * size, "stop" if size > 1 else "length", text="x"
        )

    async def pause(self, mode: PauseMode) -> None:
        """Wait for the requests."""
        self._gate.clear()
        while self._busy:
            await asyncio.sleep(0.001)

    async def resume(self) -> None:
        """Accept requests again."""
        self._gate.set()

    async def abort(self, sessions: Collection[str]) -> None:
        """Do nothing: no rollout over-samples."""

    async def load_weights(self, source: WeightSource, version: int) -> dict[str, str]:
        """Do nothing."""
        return {}

    async def close(self) -> None:
        """Do nothing."""


class _Clients:
    """A process of `lean_clients.py`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._waiting = process, dict[str, asyncio.Future[list[float]]]()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, arguments: argparse.Namespace) -> _Clients:
        """Start the process."""
        command = [sys.executable, str(Path(__file__).with_name("lean_clients.py"))]
        command += ["--turns", str(arguments.turns), "--tool-ms", str(arguments.tool_ms)]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24))

    async def play(self, url: str) -> list[float]:
        """Let it play an episode; return the seconds of the turns."""
        assert self._process.stdin is not None
        done = self._waiting[url] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(url.encode() + b"\n")
        return await done

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            url, seconds = json.loads(line)
            self._waiting.pop(url).set_result(seconds)
        for waiting in self._waiting.values():
            waiting.set_exception(RuntimeError("the process of the clients has ended"))

    async def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reading


class _FixedReward:
    """Needed by a run, and not called here."""

    async def __call__(self, group: Sequence[Sample]) -> list[Outcome]:
        """Score 0."""
        return [Outcome.scored(0.0) for _ in group]


class _SessionBench:
    """Plays episodes against a stand-in engine, over HTTP from another process or with `policy().chat`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        tokenizer: Any = load_tokenizer(model_folder())
        answer = [*tokenizer.encode("12", add_special_tokens=False), tokenizer.eos_token_id]
        self.arguments = arguments
        self.server, self.clients = SessionServer(), None
        self.generation = Generation(
            TimedEngine(arguments.engine_ms / 1000, answer), tokenizer, _FixedReward(), SamplingParams(),
            chat_format=ChatFormat(tokenizer), session_server=self.server,
        )  # fmt: skip

    async def chat(self, policy: Policy) -> list[float]:
        """Play an episode in process; return the seconds of its turns."""
        messages, seconds = list[Any]([{"role": "user", "content": QUESTION}]), list[float]()
        await asyncio.sleep(start_time(self.arguments.tool_ms / 1000))
        for turn in range(self.arguments.turns):
            began = time.perf_counter()
            message = (await policy.chat(messages)).message
            seconds.append(time.perf_counter() - began)
            messages += [message, {"role": "user", "content": next_question(turn)}]
            await asyncio.sleep(tool_time(self.arguments.tool_ms / 1000))
        return seconds

    async def episodes(self, count: int) -> list[float]:
        """Play `count` episodes; return the seconds of all turns."""
        permits, seconds = asyncio.Semaphore(self.arguments.at_a_time), list[float]()

        async def episode(number: int) -> None:
            async with permits:
                sample, params = Sample(index=number), self.generation.params
                sample.session_id = str(number)
                policy = policy_of_sample(sample, self.generation, params, lambda: True)
                url = policy.open_session().url_with_key
                seconds.extend(await (self.chat(policy) if self.clients is None else self.clients.play(url)))
                await policy.end_session()

        await asyncio.gather(*(episode(i) for i in range(count)))
        return seconds


async def measure_sessions(arguments: argparse.Namespace, *, over_http: bool) -> list[float]:
    """Run the episodes after a warm-up; return the columns."""
    bench = _SessionBench(arguments)
    await bench.server.start()
    if over_http:
        bench.clients = await _Clients.start(arguments)
    await bench.episodes(arguments.at_a_time)
    gc.collect()
    gc.freeze()
    raise_gc_threshold(arguments.count)  # as in a run
    before = psutil.Process().memory_info().rss / 2**20
    stop = asyncio.Event()
    watch = asyncio.create_task(_longest_block(stop))
    began, cpu_s = time.perf_counter(), time.process_time()
    seconds = sorted(await bench.episodes(arguments.count))
    whole, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    stop.set()
    blocked = await watch
    gc.collect()
    after = psutil.Process().memory_info().rss / 2**20
    if bench.clients is not None:
        await bench.clients.close()
    await bench.server.close()
    tail = seconds[int(len(seconds) * 0.99)]
    rates = len(seconds) / whole, cpu_s / len(seconds) * 1e3
    return [*rates, statistics.median(seconds) * 1e3, tail * 1e3, blocked, before, after / before]


def compare_sessions(arguments: argparse.Namespace) -> None:
    """Print one line for each way to talk to the policy, without and with tools that take time."""
    names = ("turns/s", "CPU ms", "median ms", "p99 ms", "blocked ms", "MiB before", "after")
    print(f"{'':26}" + "".join(f"{name:>12}" for name in names))
    for tool_ms in dict.fromkeys((0.0, *arguments.tool_ms)):
        chosen = argparse.Namespace(**{**vars(arguments), "tool_ms": tool_ms})
        rates, tails = list[float](), list[float]()
        for name, over_http in (("policy().chat", False), ("session over HTTP", True)):
            *columns, after = asyncio.run(measure_sessions(chosen, over_http=over_http))
            rates.append(columns[0])
            tails.append(columns[3])
            label = name + (f", {tool_ms:.0f} ms" if tool_ms else "")
            print(f"{label:26}" + "".join(f"{column:12.2f}" for column in columns) + f"{after:12.3f}", flush=True)
        ratio, more_ms = rates[1] / rates[0], tails[1] - tails[0]
        print(f"HTTP / policy(): {ratio:.2f} of the turns a second, {more_ms:+.0f} ms at p99", flush=True)


def _engine(arguments: argparse.Namespace, width: int) -> EmbeddedEngine:
    length = 64 + arguments.turns * (OBSERVED + SAMPLED)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=arguments.layers,
        num_attention_heads=max(2, width // 32), num_key_value_heads=2, head_dim=32, max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    state = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    dtype = getattr(torch, arguments.dtype)
    return EmbeddedEngine(config=config, state_dict=state, dtype=dtype, num_slots=EPISODES, kv_tokens=1 << 19)


async def measure_cache(arguments: argparse.Namespace, width: int, *, is_kept: bool) -> tuple[list[str], list[Any]]:
    """Run the episodes; return the columns and all log-probs."""
    engine, turns = _engine(arguments, width), arguments.turns
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
    """Print a line with the cache and one without for each width, and whether the log-probs are the same bits."""
    torch.set_num_threads(arguments.threads)
    print(f"{'':18}{'prefilled':>12}{'turn 2 ms':>12}{'last ms':>12}{'ratio':>8}")
    for width in arguments.widths:
        seen: list[list[Any]] = []
        for name, is_kept in (("cache", True), ("none", False)):
            columns, log_probs = asyncio.run(measure_cache(arguments, width, is_kept=is_kept))
            seen.append(log_probs)
            label = f"{name}, width {width}"
            print(f"{label:18}" + "".join(map(str.rjust, columns, (12, 12, 12, 8))), flush=True)
        print("log-probs are", "bitwise equal" if seen[0] == seen[1] else "DIFFERENT", flush=True)


def add_commands(commands: Any) -> None:
    """Add `sessions` and `cache` to the commands of a parser."""
    sessions = commands.add_parser("sessions", help="sessions over HTTP against policy().chat")
    sessions.add_argument("--count", type=int, default=2000)
    sessions.add_argument("--at-a-time", type=int, default=512)
    sessions.add_argument("--turns", type=int, default=6)
    sessions.add_argument("--engine-ms", type=float, default=5.0)
    sessions.add_argument("--tool-ms", type=float, nargs="*", default=(1000.0, 400.0))
    sessions.set_defaults(run=compare_sessions)
    cache = commands.add_parser("cache", help="the prefix cache against none")
    cache.add_argument("--turns", type=int, default=200)
    cache.add_argument("--widths", type=int, nargs="+", default=(8, 128))
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
