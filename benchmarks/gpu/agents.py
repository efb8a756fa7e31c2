"""Compare schedules of agents on SGLang with a real model: pool against rollouts ahead, session against `policy()`.

    python benchmarks/gpu/agents.py --model SmolLM2-135M-Instruct --out results
    python benchmarks/gpu/agents.py --shape 0.6b --out results -- --attention-backend triton
    python benchmarks/gpu/agents.py --shape tiny --engine embedded --episodes 8 --turns 4 --most-turns 12 --steps 3 \
        --new 8 --out results                                                       # check the script on a CPU

One server, started once, shares the GPU with the trainers of three runs of `furlong train`, one after the other. Each
step trains on --episodes episodes. Agents have log-normal numbers of turns (median --turns, sigma 0.9), drawn by the
number of the sample: the policy samples up to --new tokens, and a tool answers after --tool-ms.

    rollouts ahead    --async-buffer-size 1: each rollout has its own groups
    pool              --async-buffer-size 4 --max-token-staleness 4, --episodes in flight, shared groups
    pool over HTTP    the same; the agent posts to its session instead of calling policy().chat, from the same process

Weights go to the server through files. Columns, over --steps steps after the first two and before the pool runs empty:
episodes and turns trained per second; episodes in flight on average and at most; fraction of the time without a request
in the engine; fraction of the repeated prompt tokens that the engine had cached; oldest token in weight versions;
seconds of a step and of its training. `results/agents.json` has all metrics, and `results/*.log` what the runs and the
server printed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOOL_MS, TURNS, MOST_TURNS = "BENCH_TOOL_MS", "BENCH_TURNS", "BENCH_MOST_TURNS"
SIGMA, SAMPLES, WARM_STEPS = 0.9, 4, 2
POOL = {"async_buffer_size": 4, "max_token_staleness": 4}
ROWS: dict[str, tuple[str, dict[str, int]]] = {
    "rollouts ahead": ("play_with_policy", {"async_buffer_size": 1}),
    "pool": ("play_with_policy", POOL),
    "pool over HTTP": ("play_over_http", POOL),
}


# -- the agents, which `furlong train` loads from this file ------------------------------------------------------------


def turns_of(index: int) -> int:
    """Return the number of turns of an episode."""
    median, most = int(os.environ[TURNS]), int(os.environ[MOST_TURNS])
    return max(1, min(most, round(random.Random(index).lognormvariate(0.0, SIGMA) * median)))


async def _tool(index: int, turn: int) -> dict[str, str]:
    await asyncio.sleep(float(os.environ[TOOL_MS]) / 1000)
    rng = random.Random(1000 * index + turn)
    return {"role": "user", "content": f"Now add {rng.randrange(100)} to it."}


async def play_with_policy(args: Any, sample: Any, sampling_params: Any) -> Any:  # noqa: ARG001
    """Play one episode with `policy().chat`."""
    from furlong import policy

    messages: list[Any] = [{"role": "user", "content": sample.prompt}]
    for turn in range(turns_of(sample.index)):
        reply = await policy().chat(messages)
        messages += [reply.message, await _tool(sample.index, turn)]
    return sample


@functools.cache
def _client() -> Any:
    """With 64 connections in one process, httpx takes 9 ms for each request, longer than all else."""
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600))


async def play_over_http(args: Any, sample: Any, sampling_params: Any) -> Any:  # noqa: ARG001
    """Play the same episode over the chat endpoint of its session."""
    from furlong.agent import session

    url, messages = f"{session(sample).url}/v1/chat/completions", [{"role": "user", "content": sample.prompt}]
    for turn in range(turns_of(sample.index)):
        async with _client().post(url, json={"messages": messages}, raise_for_status=True) as reply:
            message = (await reply.json())["choices"][0]["message"]
        messages += [message, await _tool(sample.index, turn)]
    return sample


# -- the runs ----------------------------------------------------------------------------------------------------------


def write_prompts(path: Path) -> Path:
    """Write sums as prompts."""
    rng = random.Random(0)
    questions = [f"What is {rng.randrange(10, 100)} plus {rng.randrange(10, 100)}?" for _ in range(4096)]
    path.write_text("".join(json.dumps({"prompt": text, "label": "0"}) + "\n" for text in questions))
    return path


def launch_of(model: Path, options: argparse.Namespace, device: str) -> Any:
    """Return how to start the server."""
    from furlong.config.passthrough import find, value_of
    from furlong.inference.supervisor.launch import ServeLaunch, SglangLaunch

    if options.engine == "embedded":
        dtype = "bfloat16" if device == "cuda" else "float32"
        return ServeLaunch(model, dtype=dtype, device=device, num_slots=2 * options.episodes)
    values: dict[str, Any] = {"mem_fraction_static": 0.4, "cuda_graph_max_bs": 2 * options.episodes}
    values |= {"attention_backend": "fa3"} if device == "cuda" else {}
    words = list(options.options)
    while words:
        option, own = find("--sglang-" + words.pop(0).removeprefix("--")), list[str]()
        while words and not words[0].startswith("--"):
            own.append(words.pop(0))
        values[option.name.replace("-", "_")] = value_of(option, own)
    return SglangLaunch(model, num_gpus=1, options=values)


def train(name: str, model: Path, address: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Run one row; return the rows of its metrics.jsonl."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from trl_rival import furlong_words

    function, schedule = ROWS[name]
    folder: Path = options.out / name.replace(" ", "-")
    permits = {} if name == "rollouts ahead" else {"max_concurrent_episodes": options.episodes}
    words = furlong_words(
        model, options.out / "prompts.jsonl", folder, prompts=options.episodes // SAMPLES, samples=SAMPLES,
        new=options.new, lr=1e-7, rollout_max_context_len=options.context_len, max_tokens_per_gpu=options.max_tokens,
        num_rollout=WARM_STEPS + options.steps + schedule["async_buffer_size"],
        custom_generate_function_path=f"{Path(__file__).resolve()}:{function}",
        rollout_external_engine_addrs=address, update_weight_transport="disk", no_use_tensorboard=True,
        **schedule, **permits,
    )  # fmt: skip
    command = [sys.executable, "-m", "furlong", "train", *words]
    shape = {TOOL_MS: str(options.tool_ms), TURNS: str(options.turns), MOST_TURNS: str(options.most_turns)}
    log = options.out / f"{name.replace(' ', '-')}.log"
    with log.open("w") as out:
        out.write(" ".join(command) + "\n")
        out.flush()
        done = subprocess.run(
            command, timeout=options.timeout, stdout=out, stderr=out, check=False, env=os.environ | shape
        )
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{log.read_text()[-4000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def columns(rows: Sequence[Mapping[str, float]], episodes: int, steps: int) -> list[str]:
    """Return the figures of one run."""
    rows = rows[WARM_STEPS:][:steps]
    seconds = sum(row["perf/step_time"] for row in rows)
    turns = sum(row["session/turns"] for row in rows) * episodes

    def average(key: str) -> float:
        found = [row[key] for row in rows if key in row]
        return sum(found) / len(found) if found else float("nan")

    return [
        f"{episodes * len(rows) / seconds:.1f}", f"{turns / seconds:.0f}", f"{average('perf/episodes_in_flight'):.1f}",
        f"{max(row['perf/episodes_in_flight_max'] for row in rows):.0f}", f"{average('perf/engine_idle_frac'):.1%}",
        f"{average('rollout/prefix_cache_hit_frac'):.1%}", f"{max(row['rollout/staleness/max'] for row in rows):.0f}",
        f"{seconds / len(rows):.2f}", f"{average('perf/train_time'):.2f}",
    ]  # fmt: skip


async def compare(model: Path, device: str, options: argparse.Namespace) -> None:
    """Start the server, train each row, and print a line as soon as it is done."""
    from furlong.inference.supervisor.process import HostGpus, LocalHost
    from furlong.inference.supervisor.replica import start_server

    began, found = time.perf_counter(), dict[str, Any]()
    gpus = [HostGpus(LocalHost(), 0, 1)]
    server = await start_server(launch_of(model, options, device), 0, gpus, log_dir=options.out)
    heads = ("episodes/s", "turns/s", "in flight", "at most", "idle", "cached", "oldest", "step s", "train s")
    try:
        await server.while_starting(server.wait_until_ready(), options.timeout)
        print(f"server ready after {time.perf_counter() - began:.0f} s\n", flush=True)
        print(f"{'':16}" + "".join(f"{head:>11}" for head in heads), flush=True)
        for name in options.rows:
            rows = await asyncio.to_thread(train, name, model, server.url.removeprefix("http://"), options)
            found[name] = rows
            (options.out / "agents.json").write_text(json.dumps(found))
            print(
                f"{name:16}" + "".join(f"{each:>11}" for each in columns(rows, options.episodes, options.steps)),
                flush=True,
            )
    finally:
        await server.stop()
    print(f"\n{time.perf_counter() - began:.0f} s in all")


def main() -> None:
    """Write the inputs and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; otherwise random weights of --shape")
    parser.add_argument("--shape", default="0.6b", choices=["tiny", "0.6b", "1.7b", "4b"])
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--episodes", type=int, default=64, help="per step, and in flight in the pool")
    parser.add_argument("--turns", type=int, default=9, help="median")
    parser.add_argument("--most-turns", type=int, default=60)
    parser.add_argument("--new", type=int, default=32, help="tokens of a turn")
    parser.add_argument("--tool-ms", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=8, help="after two steps of warm-up")
    parser.add_argument("--context-len", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch of the trainer")
    parser.add_argument("--timeout", type=float, default=300, help="of the server's start and of each run, in seconds")
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("options", nargs="*", help="options of the SGLang server, after `--`")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import torch
    from grpo_step import write_inputs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = options.model or write_inputs(options.out, options.shape, 1, 8)[0]
    write_prompts(options.out / "prompts.jsonl")
    asyncio.run(compare(model, device, options))


if __name__ == "__main__":
    main()
