"""Compare a decode step of the embedded engine with one of SGLang on the same GPU and model.

    python benchmarks/gpu/decode_step.py --shape 0.6b --requests 256 -- --attention-backend fa3
    python benchmarks/gpu/decode_step.py --shape tiny --requests 4 --engines embedded --new 8 24     # on a CPU

Both engines run one after the other, with the same random weights and prompts, `--requests` requests at once and
log-probs of every token. Each set of requests is generated with two response lengths (`--new`); the difference of the
times over the difference of the lengths is the time of a step, without prefill, HTTP and the start of the requests.
Prints the median of `--rounds` and the ratio of the engines. Options of the SGLang server follow `--`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from rollout import client_of, options_from, write_model
from train_mfu import SHAPES

from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.supervisor.launch import SglangLaunch
from furlong.inference.supervisor.process import HostGpus, LocalHost
from furlong.inference.supervisor.replica import start_server
from furlong.interfaces import Engine, SamplingParams


async def seconds_of(engine: Engine, prompts: list[list[int]], new: int) -> float:
    """Return the seconds that the engine takes for all requests."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    began = time.perf_counter()
    done = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    seconds = time.perf_counter() - began
    if any(len(each.tokens) != new for each in done):
        raise RuntimeError(f"an answer has not {new} tokens")
    return seconds


async def step_ms(engine: Engine, options: argparse.Namespace) -> list[float]:
    """Return the milliseconds of a decode step, one value per round."""
    rng = random.Random(0)
    short, long = options.new
    values: list[float] = []
    for number in range(options.rounds + 1):
        prompts = [[rng.randrange(2, 100) for _ in range(options.prompt_len)] for _ in range(options.requests)]
        few, many = await seconds_of(engine, prompts, short), await seconds_of(engine, prompts, long)
        if number:  # the first round warms up
            values.append(1e3 * (many - few) / (long - short))
    return values


async def embedded_ms(model: Path, options: argparse.Namespace) -> list[float]:
    """Measure the embedded engine."""
    on_gpu = torch.cuda.is_available()
    engine = EmbeddedEngine(
        model,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        device="cuda" if on_gpu else "cpu",
        num_slots=options.requests,
        context_len=options.prompt_len + options.new[1],
    )
    try:
        return await step_ms(engine, options)
    finally:
        await engine.close()


async def sglang_ms(model: Path, options: argparse.Namespace, folder: Path) -> list[float]:
    """Measure SGLang, with CUDA graphs for this number of requests."""
    tokens = options.requests * (options.prompt_len + options.new[1])
    values: dict[str, Any] = {
        "max_total_tokens": tokens * 115 // 100,
        "cuda_graph_bs_decode": [options.requests],
        "disable_prefill_cuda_graph": True,
        **options_from(list(options.options)),
    }
    launch = SglangLaunch(model, num_gpus=1, has_text=False, options=values)
    began = time.perf_counter()
    served = await start_server(launch, 0, [HostGpus(LocalHost(), 0, 1)], log_dir=folder)
    try:
        await served.while_starting(served.wait_until_ready(), options.start_timeout)
        print(f"SGLang is up after {time.perf_counter() - began:.0f} s", flush=True)
        server = await client_of(served, options.requests)
        await server.freeze_objects()
        engine = HttpEngine([server])
        try:
            return await step_ms(engine, options)
        finally:
            await engine.close()
    finally:
        await served.stop()


def main() -> None:
    """Measure both engines and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new", type=int, nargs=2, default=[64, 320], help="the two response lengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=["embedded", "sglang"], default=["embedded", "sglang"])
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--out", type=Path, help="folder for the server's log and decode_step.json")
    parser.add_argument("options", nargs="*", help="options of the SGLang server, after `--`")
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch, "logs")
        out.mkdir(parents=True, exist_ok=True)
        model = write_model(options.shape, Path(scratch, "model"), "cuda" if torch.cuda.is_available() else "cpu")
        for name in options.engines:
            try:
                measured = embedded_ms(model, options) if name == "embedded" else sglang_ms(model, options, out)
                found[name] = asyncio.run(measured)
            except Exception:  # noqa: BLE001  the other engine is measured
                print(f"{name} failed:\n{traceback.format_exc()}", flush=True)
                continue
            rounds = ", ".join(f"{value:.3f}" for value in found[name])
            print(f"{name}: {statistics.median(found[name]):.3f} ms a step ({rounds})", flush=True)
        (out / "decode_step.json").write_text(json.dumps(found) + "\n")
    if len(found) == 2:
        ratio = statistics.median(found["embedded"]) / statistics.median(found["sglang"])
        print(f"a step of the embedded engine takes {ratio:.2f} times as long as one of SGLang (goal: at most 1.5)")


if __name__ == "__main__":
    main()
