"""Compare engines in bfloat16, FP8 and INT4 under a bfloat16 trainer: weight updates, rollouts, learning.

    python benchmarks/gpu/low_precision.py --out results --parts updates --shapes 4b moe
    python benchmarks/gpu/low_precision.py --out results --parts learning
    python benchmarks/gpu/low_precision.py --out results --parts updates --shapes tiny --engine embedded --rounds 2
    python benchmarks/gpu/low_precision.py --out results --parts learning --steps 2 --engine embedded

`updates`: for each shape, an SGLang server per precision with random weights; all start at the same time, on one GPU,
and are measured one after another. The trainer's weights are random tensors on this process's GPU, which all change
before each update. Every update is verified. Prints the median time of an update, its parts, the bytes sent, and the
tokens per second of `--requests` requests at once, each with its ratio to bfloat16. Options of the servers follow `--`.

`learning`: the quickstart's task with each precision in the engine, colocated with the trainer, all runs at the same
time on one GPU. FP8 has scales per channel there, because the model's keys and values are narrower than a block.

What fails is reported with the end of its log, and the others go on. SGLang compiles DeepGEMM's FP8 kernels for minutes
at its first start, so servers run here with `SGLANG_ENABLE_JIT_DEEPGEMM=0`, that is with Triton's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rollout import client_of, options_from
from torch import Tensor
from train_mfu import SHAPES, AnyShape, MoeShape
from update_timing import time_updates
from weight_sync import servers_of, transport_context

from furlong.core.weights import WeightSource
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.server import SglangServer
from furlong.inference.supervisor.launch import Launch, ServeLaunch, SglangLaunch
from furlong.inference.supervisor.process import HostGpus, LocalHost, ServerProcess
from furlong.inference.supervisor.replica import start_server
from furlong.interfaces import SamplingParams
from furlong.models.tokenizer import build_tokenizer
from furlong.quantization.fp8 import Fp8Blocks, Fp8Scaled
from furlong.quantization.ignore_list import NEVER_QUANTIZED, is_ignored
from furlong.quantization.int4 import Int4Groups
from furlong.quantization.scheme import QuantizationScheme
from furlong.quantization.weight_format import WeightFormat
from furlong.quickstart.quickstart import model_folder, quickstart_flags
from furlong.sglang_layout.quantized_loading import LOADER
from furlong.tools.quantize_folder import quantization_config, quantize_folder
from furlong.weight_sync.remote_sync import LocalSync
from furlong.weight_sync.transports.ipc import IpcTransport

FORMATS: dict[str, WeightFormat | None] = {
    "bfloat16": None,
    "fp8": Fp8Blocks((128, 128)),
    "fp8-channel": Fp8Scaled("channel", torch.bfloat16),
    "int4": Int4Groups(32),
}
MOE = {"moe": MoeShape(4), "tiny-moe": MoeShape(2, 64, 32, 8, 2, 4, 2, 16, 512)}
ALL_SHAPES: dict[str, AnyShape] = {**SHAPES, **MOE}
GAP = "train/train_rollout_logprob_abs_diff"
NO_DEEPGEMM = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}


def weight_shapes(shape: AnyShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the weights of a Qwen3 or Qwen3-MoE checkpoint."""
    width, head = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head, shape.num_key_value_heads * head
    yield "model.embed_tokens.weight", (shape.vocab_size, width)
    for layer in range(shape.num_hidden_layers):
        start = f"model.layers.{layer}."
        for name, size in (
            ("q", (queries, width)),
            ("k", (keys, width)),
            ("v", (keys, width)),
            ("o", (width, queries)),
        ):
            yield f"{start}self_attn.{name}_proj.weight", size
        for name, size in (
            ("self_attn.q_norm", head),
            ("self_attn.k_norm", head),
            ("input_layernorm", width),
            ("post_attention_layernorm", width),
        ):
            yield f"{start}{name}.weight", (size,)
        blocks, inner = [f"{start}mlp."], getattr(shape, "intermediate_size", 0)
        if isinstance(shape, MoeShape):
            yield f"{start}mlp.gate.weight", (shape.num_experts, width)
            blocks, inner = (
                [f"{start}mlp.experts.{i}." for i in range(shape.num_experts)],
                shape.moe_intermediate_size,
            )
        for block in blocks:
            yield f"{block}gate_proj.weight", (inner, width)
            yield f"{block}up_proj.weight", (inner, width)
            yield f"{block}down_proj.weight", (width, inner)
    yield "model.norm.weight", (width,)
    if isinstance(shape, MoeShape):
        yield "lm_head.weight", (shape.vocab_size, width)


class Weights:
    """Stand-in for a trainer: random weights of a shape."""

    def __init__(self, shape: AnyShape, device: str) -> None:
        self.device = device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.state: dict[str, Tensor] = {}
        for name, size in weight_shapes(shape):
            tensor = torch.empty(size, dtype=dtype, device=device)
            self.state[name] = tensor.fill_(1.0) if len(size) == 1 else tensor.normal_(0, 0.02)
        self._shape = shape

    def weights(self) -> WeightSource:
        """Return a source for one pass over the weights."""
        experts = getattr(self._shape, "num_experts", None)
        heads = self._shape.num_key_value_heads
        return WeightSource(self.state.items, is_live=True, num_kv_heads=heads, num_experts=experts)

    def change(self) -> None:
        """Change every element of every matrix."""
        for tensor in self.state.values():
            if tensor.dim() > 1:
                tensor.mul_(-1.015625)
        if self.device == "cuda":
            torch.cuda.synchronize()


def scheme_of(precision: str, weights: Weights) -> QuantizationScheme | None:
    """Return how engines of a precision store the weights; None for bfloat16."""
    form = FORMATS[precision]
    if form is None:
        return None
    dtype = next(iter(weights.state.values())).dtype
    names = {
        name for name, tensor in weights.state.items() if tensor.dim() == 2 and not is_ignored(name, NEVER_QUANTIZED)
    }
    return QuantizationScheme(form, frozenset(names), dtype)


def write_engine_folder(shape: AnyShape, weights: Weights, precision: str, folder: Path, *, has_weights: bool) -> None:
    """Write the config of an engine's model, and random weights for engines that cannot start without."""
    config = shape.config()
    config.architectures = ["Qwen3MoeForCausalLM" if isinstance(shape, MoeShape) else "Qwen3ForCausalLM"]
    config.dtype = next(iter(weights.state.values())).dtype
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    scheme = scheme_of(precision, weights)
    tensors = weights.state if scheme is None else dict(scheme.quantized(weights.weights()).open())
    if has_weights:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        build_tokenizer("0123456789+=").save_pretrained(folder)
    if scheme is not None:
        path = folder / "config.json"
        matrices = {name for name, tensor in weights.state.items() if tensor.dim() == 2}
        settings = quantization_config(scheme.form, matrices - scheme.names, NEVER_QUANTIZED)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


def launch_of(folder: Path, precision: str, options: argparse.Namespace) -> Launch:
    """Return the launch of a server; SGLang starts with dummy weights, which the first update replaces."""
    if options.engine == "embedded":
        return ServeLaunch(folder, dtype="float32", device="cpu", num_slots=options.requests)
    tokens = options.requests * (options.prompt_len + options.new)
    values: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "attention_backend": "fa3",
        "max_total_tokens": tokens * 115 // 100,
        "mem_fraction_static": 0.85,
        "cuda_graph_bs_decode": [options.requests],
        "disable_prefill_cuda_graph": True,
        **({} if FORMATS[precision] is None else {"custom_weight_loader": [LOADER]}),
        **options_from(list(options.options)),
    }
    return SglangLaunch(folder, num_gpus=1, has_text=False, options=values, env=NO_DEEPGEMM)


async def generated(server: SglangServer, options: argparse.Namespace) -> float:
    """Return the tokens per second of all requests at once, the better of two rounds."""
    engine, rng = HttpEngine([server]), random.Random(0)
    params = SamplingParams(max_new_tokens=options.new, ignore_eos=True)
    best = 0.0
    for _ in range(2):
        prompts = [[rng.randrange(2, 100) for _ in range(options.prompt_len)] for _ in range(options.requests)]
        began = time.perf_counter()
        done = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        best = max(best, sum(len(each.tokens) for each in done) / (time.perf_counter() - began))
    return best


async def measured(
    engine: ServerProcess, weights: Weights, precision: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Update and use one server; return the figures."""
    began = time.perf_counter()
    await engine.while_starting(engine.wait_until_ready(), options.start_timeout)
    print(f"{precision}: up after another {time.perf_counter() - began:.0f} s", flush=True)
    server = await client_of(engine, options.requests)
    try:
        transport = IpcTransport(transport_context(options.bucket_mb << 20))
        sync = LocalSync(weights, servers_of(server), transport, scheme=scheme_of(precision, weights))  # pyright: ignore[reportArgumentType]  only weights() is called
        series = await time_updates(sync, weights.change, precision, options.rounds, "before")
        series.show()
        return {
            "update_s": series.median,
            "updates_s": [round(report.seconds, 4) for report in series.reports],
            "unverified_s": statistics.median(report.seconds - report.verify_s for report in series.reports),
            "gb": series.reports[0].num_bytes / 1e9,
            "stages": series.stages,
            "tokens_s": await generated(server, options),
        }
    finally:
        await server.close()


async def updates(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the servers of one shape."""
    shape, device = ALL_SHAPES[name], "cuda" if options.engine == "sglang" else "cpu"
    logs, found, engines = options.out / f"{name}-logs", dict[str, Any](), dict[str, ServerProcess]()
    with tempfile.TemporaryDirectory() as scratch:
        weights = Weights(shape, device)
        try:
            for index, precision in enumerate(options.precisions):
                folder = Path(scratch, precision)
                write_engine_folder(shape, weights, precision, folder, has_weights=options.engine == "embedded")
                launch, place = launch_of(folder, precision, options), [HostGpus(LocalHost(), 0, 1)]
                engines[precision] = await start_server(launch, index, place, log_dir=logs)
            for precision, engine in engines.items():
                try:
                    found[precision] = await measured(engine, weights, precision, options)
                except Exception:  # noqa: BLE001  the other precisions are measured
                    print(f"{name} {precision} failed:\n{traceback.format_exc()[-3000:]}", flush=True)
                    tails = sorted(logs.glob("*.log"))
                    print("\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in tails), flush=True)
                await engine.stop()
        finally:
            for engine in engines.values():
                await engine.stop()
    return found


def learning(options: argparse.Namespace) -> dict[str, Any]:
    """Run the quickstart's task with each precision, all at the same time."""
    precisions = ["fp8-channel" if name == "fp8" else name for name in options.precisions]
    processes: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for precision in precisions:
            folder, form = options.out / f"learning-{precision}", FORMATS[precision]
            folder.mkdir(parents=True)
            words = quickstart_flags(folder, seed=options.seed, num_rollout=options.steps, is_async=False)
            if form is not None:
                engine = Path(scratch, precision)
                engine.mkdir()
                quantize_folder(model_folder(), engine, form)
                words += ["--hf-checkpoint", str(engine), "--ref-load", str(model_folder())]
            if options.engine == "sglang":
                words += ["--engine", "sglang", "--colocate", "--rollout-num-gpus", "1"]
                words += ["--sglang-attention-backend", "triton", "--sglang-disable-cuda-graph"]
                words += ["--sglang-mem-fraction-static", "0.6", "--sglang-max-total-tokens", "65536"]
            command = [sys.executable, "-m", "furlong", "train", *words]
            with (folder / "log.txt").open("w") as log:
                env = os.environ | NO_DEEPGEMM
                process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
            processes[precision] = process, folder
        deadline = time.monotonic() + options.timeout
        return {name: curve_of(name, *each, deadline=deadline) for name, each in processes.items()}


def curve_of(name: str, process: subprocess.Popen[bytes], folder: Path, *, deadline: float) -> dict[str, Any]:
    """Wait for a run; return its held-out accuracy by step, and the difference of log-probs."""
    try:
        code: object = process.wait(timeout=max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = "stopped at the time limit"
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if code:
        print(
            f"learning, {name}: {code} after {len(rows)} rows\n{(folder / 'log.txt').read_text()[-3000:]}", flush=True
        )
    gaps = [row[GAP] for row in rows if GAP in row]
    seconds = [row["perf/update_weights_time"] for row in rows if "perf/update_weights_time" in row]
    return {
        "held_out": {row["step"]: row["eval/held_out"] for row in rows if "eval/held_out" in row},
        "gap": statistics.fmean(gaps) if gaps else None,
        "update_s": statistics.median(seconds) if seconds else None,
    }


def report(found: dict[str, dict[str, Any]]) -> None:
    """Print the tables."""
    for shape, figures in found.items():
        if shape == "learning":
            print("\n| engine | held-out accuracy by step | mean log-prob difference | update, s |\n|---|---|---|---|")
            for name, each in figures.items():
                curve = ", ".join(f"{step}: {value:.1%}" for step, value in each["held_out"].items())
                print(f"| {name} | {curve} | {each['gap']} | {each['update_s']} |")
            continue
        print(f"\n| {shape} | update, s | of it not verification, s | GB | tokens/s |\n|---|---|---|---|---|")
        for name, each in figures.items():
            base = figures.get("bfloat16", {})
            keys = ("update_s", "unverified_s", "gb", "tokens_s")
            print(f"| {name} | {' | '.join(with_ratio(each[key], base.get(key)) for key in keys)} |")


def with_ratio(value: float, base: float | None) -> str:
    """Format a figure and its ratio to that of bfloat16."""
    return f"{value:.4g}" + (f" ({value / base:.2f} x)" if base else "")


def main() -> None:
    """Run the chosen parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and low_precision.json")
    parser.add_argument("--parts", nargs="+", choices=["updates", "learning"], default=["updates", "learning"])
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--shapes", nargs="+", choices=list(ALL_SHAPES), default=["4b", "moe"])
    parser.add_argument("--precisions", nargs="+", choices=list(FORMATS), default=["bfloat16", "fp8", "int4"])
    parser.add_argument("--rounds", type=int, default=6, help="updates of each server, after one to warm up")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--start-timeout", type=float, default=240.0)
    parser.add_argument("--steps", type=int, default=40, help="rollouts of the learning curve")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--timeout", type=float, default=300.0, help="time limit of all learning runs in seconds")
    parser.add_argument("--verbose", action="store_true", help="print furlong's log, with what verification compared")
    parser.add_argument("options", nargs="*", help="options of the SGLang servers of `updates`, after `--`")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for part in [*(options.shapes if "updates" in options.parts else ()), *{"learning"} & {*options.parts}]:
        try:
            found[part] = learning(options) if part == "learning" else asyncio.run(updates(part, options))
        except Exception:  # noqa: BLE001  the other parts are measured
            print(f"{part} failed:\n{traceback.format_exc()}", flush=True)
        (options.out / "low_precision.json").write_text(json.dumps(found, indent=1) + "\n")
        torch.cuda.empty_cache()
    report(found)


if __name__ == "__main__":
    main()
