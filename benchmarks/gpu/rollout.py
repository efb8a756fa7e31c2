"""Compare generation throughput through furlong with SGLang called directly, on the same server settings.

    python benchmarks/gpu/rollout.py                                   # Qwen3-0.6B shape, 256 prompts x 4 samples
    python benchmarks/gpu/rollout.py --shapes 0.6b:160 1.7b:128 4b:64 --rounds 6 -- --attention-backend fa3
    python benchmarks/gpu/rollout.py --policies cache_aware round_robin manual --rounds 2
    python benchmarks/gpu/rollout.py --engine embedded --shapes tiny:16  # check the script on a CPU, with furlong serve

furlong's launcher starts one server per shape, all at the same time, with generated random weights and the options
after `--`. Each server's KV cache is 1.15 times what the requests need, so that several servers fit on one GPU. The
servers are measured one after another. The requests have fixed prompt and response lengths, ignore_eos and log-probs of
every token. They are sent in several ways, whose order changes with each round:

    raw       all requests in one batch to the server, like SGLang's offline engine, at no cost for the client
    direct    furlong's HttpEngine without a router, one request per sample
    POLICY    HttpEngine through sglang-router, one row for each of `--policies`

Time runs from the first request to the last response. The ratio is tokens per second relative to `raw` in the same
round (median over rounds); 1.00 means no overhead. furlong's rows also show the time of the first response and the CPU
time of this process. All rows show the share of prompt tokens read from the server's cache: the samples of a prompt
share it if the first of them is prefilled before the others.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import torch
from train_mfu import SHAPES
from transformers import GenerationConfig

from furlong.config.passthrough import find, value_of
from furlong.inference.sglang.engine import HttpEngine, sampling_json
from furlong.inference.sglang.server import ServerInfo, SglangServer
from furlong.inference.supervisor.launch import Launch, ServeLaunch, SglangLaunch
from furlong.inference.supervisor.process import HostGpus, LocalHost, ServerProcess
from furlong.inference.supervisor.replica import SglangRouter, start_server
from furlong.interfaces import SamplingParams
from furlong.models.hf_model import build_model, save_model
from furlong.models.tokenizer import build_tokenizer

Way = Callable[[list[list[int]], SamplingParams], Awaitable[int]]


def write_model(shape: str, folder: Path, device: str) -> Path:
    """Write a random model of the shape as a Hugging Face checkpoint."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = build_model(SHAPES[shape].config(), seed=0, dtype=dtype)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    save_model(model, folder)
    if device == "cpu":  # furlong serve needs a tokenizer
        build_tokenizer("0123456789+=").save_pretrained(folder)
    return folder


def options_from(words: list[str]) -> dict[str, object]:
    """Parse options written as on SGLang's command line."""
    found: dict[str, object] = {}
    while words:
        option = find("--sglang-" + words.pop(0).removeprefix("--"))
        values = []
        while words and not words[0].startswith("--"):
            values.append(words.pop(0))
        found[option.name.replace("-", "_")] = value_of(option, values)
    return found


def raw_way(url: str) -> Way:
    """Return a way that sends all requests in one batch."""

    async def way(prompts: list[list[int]], params: SamplingParams) -> int:
        body = {"input_ids": prompts, "sampling_params": sampling_json(params), "return_logprob": True}
        async with httpx.AsyncClient(timeout=3600, trust_env=False) as client:
            reply = await client.post(f"{url}/generate", json=body)
        metas = [one["meta_info"] for one in reply.raise_for_status().json()]
        print(f"{'':9s}{cached_share(sum(meta['cached_tokens'] for meta in metas), prompts)}", flush=True)
        return sum(len(meta["output_token_logprobs"]) for meta in metas)

    return way


def cached_share(num_cached: int, prompts: list[list[int]]) -> str:
    """Format the share of prompt tokens read from the cache, at most 75 % with 4 samples per prompt."""
    return f"{100 * num_cached / sum(map(len, prompts)):.0f} % of prompts cached"


def furlong_way(engine: HttpEngine) -> Way:
    """Return a way that sends one request per sample through an HttpEngine."""

    async def way(prompts: list[list[int]], params: SamplingParams) -> int:
        cpu_s = time.process_time()
        done = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        seconds = sorted(completion.latency_s for completion in done)
        cpu_s = time.process_time() - cpu_s
        share = cached_share(sum(completion.cached_tokens for completion in done), prompts)
        print(
            f"{'':9s}responses after {seconds[0]:.2f} .. {seconds[-1]:.2f} s, client {cpu_s:.2f} CPU s, {share}",
            flush=True,
        )
        return sum(len(completion.tokens) for completion in done)

    return way


async def client_of(engine: ServerProcess, concurrency: int) -> SglangServer:
    """Return a client that sends up to `concurrency` requests at a time."""
    server = SglangServer(engine.url, ServerInfo.read({}), concurrency=concurrency)
    server.info = ServerInfo.read(await server.ask("/server_info"))
    return server


async def measure(
    served: ServerProcess, host: LocalHost, shape: str, prompts: int, args: argparse.Namespace, folder: Path
) -> dict[str, list[float]]:
    """Return the tokens per second of each way, one value per round."""
    total = prompts * args.samples
    draw, vocab = random.Random(0), SHAPES[shape].vocab_size
    params = SamplingParams(max_new_tokens=args.response_len, ignore_eos=True)
    rounds: dict[str, list[float]] = {}
    routers: list[SglangRouter] = []
    opened: list[HttpEngine] = []
    try:
        ways: dict[str, Way] = {"raw": raw_way(served.url)}
        opened.append(HttpEngine([await client_of(served, total)]))
        ways["direct"] = furlong_way(opened[-1])
        for policy in args.policies if importlib.util.find_spec("sglang_router") is not None else ():
            routers.append(SglangRouter(host, policy, folder / f"{shape}-{policy}.log", concurrency=total))
            client = await routers[-1].start()
            behind = await client_of(served, total)
            await routers[-1].add(behind)
            opened.append(HttpEngine([behind], router=client))
            ways[policy] = furlong_way(opened[-1])
        for number in range(args.rounds + 1):
            first = number % len(ways)
            for name in [*ways][first:] + [*ways][:first]:
                drawn = [[draw.randrange(2, vocab) for _ in range(args.prompt_len)] for _ in range(prompts)]
                requests = [prompt for prompt in drawn for _ in range(args.samples)]
                begun = time.perf_counter()
                tokens = await ways[name](requests, params)
                seconds = time.perf_counter() - begun
                if tokens != total * args.response_len:
                    raise SystemExit(f"{name}: received {tokens} tokens, expected {total * args.response_len}")
                if number:  # the first round warms up
                    rounds.setdefault(name, []).append(tokens / seconds)
                    print(f"{shape:5s} {name:12s} {tokens / seconds:10.0f} tokens/s  {seconds:6.2f} s", flush=True)
    finally:
        for engine in opened:
            await engine.close()
        for router in routers:
            await router.close()
    return rounds


async def measure_all(
    launches: dict[str, Launch], prompts: dict[str, int], args: argparse.Namespace, folder: Path
) -> dict[str, dict[str, list[float]]]:
    """Start the servers of all shapes, then measure them one after another."""
    host, started = LocalHost(), time.perf_counter()
    found: dict[str, dict[str, list[float]]] = {}
    servers: dict[str, ServerProcess] = {}
    try:
        for index, (shape, launch) in enumerate(launches.items()):
            servers[shape] = await start_server(launch, index, [HostGpus(host, 0, 1)], log_dir=folder)
        await asyncio.gather(
            *(each.while_starting(each.wait_until_ready(), args.start_timeout) for each in servers.values())
        )
        print(f"{len(servers)} servers up after {time.perf_counter() - started:.0f} s", flush=True)
        for shape, server in servers.items():
            if args.engine == "sglang":
                await (await client_of(server, 1)).freeze_objects()  # as in training runs
            found[shape] = await measure(server, host, shape, prompts[shape], args, folder)
            report(shape, found[shape])
            await server.stop()
    finally:
        for server in servers.values():
            await server.stop()
    return found


def report(shape: str, rounds: dict[str, list[float]]) -> None:
    """Print the median rates and ratios."""
    for name, values in rounds.items():
        ratios = sorted(value / raw for value, raw in zip(values, rounds["raw"], strict=True))
        print(
            f"{shape:5s} {name:12s} median {statistics.median(values):8.0f} tokens/s  ratio to raw "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})",
            flush=True,
        )


def main() -> None:
    """Generate the models, measure and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--shapes", nargs="+", default=["0.6b:256"], help=f"SHAPE:PROMPTS; shapes: {', '.join(SHAPES)}")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--response-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", nargs="*", default=["cache_aware"], help="sglang-router policies to measure")
    parser.add_argument("--start-timeout", type=float, default=600.0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("options", nargs="*", help="options of the SGLang server, after `--`")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompts = {name: int(number) for name, number in (word.split(":") for word in args.shapes)}
    gc.freeze()
    gc.set_threshold(100 * max(prompts.values()) * args.samples, 10, 10)  # as in training runs
    with tempfile.TemporaryDirectory() as scratch:
        launches: dict[str, Launch] = {}
        for shape, number in prompts.items():
            model = write_model(shape, Path(scratch, shape), device)
            if args.engine == "sglang":
                tokens = number * args.samples * (args.prompt_len + args.response_len)
                options = {"max_total_tokens": tokens * 115 // 100, **options_from(list(args.options))}
                launches[shape] = SglangLaunch(model, num_gpus=1, has_text=False, options=options)
            else:
                dtype = "bfloat16" if device == "cuda" else "float32"
                launches[shape] = ServeLaunch(model, dtype=dtype, device=device, num_slots=256)
        rounds = asyncio.run(measure_all(launches, prompts, args, Path(scratch, "logs")))
    if args.json is not None:
        args.json.write_text(json.dumps({"settings": vars(args) | {"json": None}, "rounds": rounds}, default=str))


if __name__ == "__main__":
    main()
