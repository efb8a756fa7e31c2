"""Compare the embedded engine's decode time with its matmuls alone and with transformers' generate.

    OMP_NUM_THREADS=1 python benchmarks/cpu/decode.py [--threads 1] [--slots 32 128] [--prompt-len 32] [--new 64]

The models are random Qwen2-style models with 3.2M and 11.8M parameters (`3m` and `12m` are the presets of
`trl_step.py`). The table has one row per model, dtype (float32, bfloat16) and number of slots, with these columns:

- `step`: CPU time per decode step of the engine, including sampling and bookkeeping. With one thread it equals wall
  time, and other load on the machine affects it less;
- `linear`: only the step's weight matmuls (QKV, output, gate/up, down, head), with the same shapes in the same run;
- `+attn`: `linear` plus the step's attention matmuls (QK and PV, at the step's cached length);
- `blocked`: `+attn` with the weights in oneDNN's blocked layout, which the engine uses on x86 CPUs;
- the ratios of `step` to these three, and tokens per second of CPU time for the engine and for `generate` (static
  batch, same prompts).

Compare ratios, not seconds: steps and matmuls alternate in one run. `--profile` prints a breakdown of the step instead
of the table (`decode_parts.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from typing import Any

import decode_parts
import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from furlong.inference.embedded import EmbeddedEngine
from furlong.inference.embedded.decode_model import DecodeModel, bucketed_length
from furlong.inference.embedded.decode_steps import DecodeLinear, supports_blocks
from furlong.inference.embedded.model_loading import build_model
from furlong.inference.embedded.request import Request
from furlong.inference.embedded.slot_batch import SlotBatch
from furlong.interfaces import SamplingParams

BLOCK = 8
BATCH: dict[str, Any] = {"prefill_tokens": 4096, "tokenizer": None}
MODELS: dict[str, dict[str, int]] = {
    "3.2M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
    "11.8M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8},
    "3m": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "12m": {
        "hidden_size": 384,
        "intermediate_size": 1120,
        "num_hidden_layers": 7,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
}


def build(name: str, vocab_size: int) -> tuple[Qwen2Config, Qwen2ForCausalLM]:
    """Return a random model with head dimension 64. By default, two query heads share a key/value head."""
    shape = MODELS[name]
    config = Qwen2Config(
        **{"num_key_value_heads": shape["num_attention_heads"] // 2, **shape},
        vocab_size=vocab_size,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    config.eos_token_id = None
    torch.manual_seed(0)
    return config, Qwen2ForCausalLM(config).eval()


def best(function: Callable[[], Any], reps: int) -> float:
    """Return the lowest CPU time in seconds over `reps` calls."""
    times: list[float] = []
    for _ in range(reps):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return min(times)


def products(config: Any, n: int, length: int, dtype: torch.dtype) -> list[Callable[[], None]]:
    """Return the matmuls of one decode step of `n` slots: weights only, with attention over `length`, and blocked."""
    E, H, K, inner = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
    )
    D, layers = E // H, config.num_hidden_layers
    shapes = [(E, (H + 2 * K) * D), (H * D, E), (E, 2 * inner), (inner, E)]
    weights = [[torch.randn(out, inp).to(dtype) for inp, out in shapes] for _ in range(layers)]
    inputs = [torch.randn(n, inp).to(dtype) for inp, _ in shapes]
    head = torch.randn(config.vocab_size, E).to(dtype)
    blocked = [[DecodeLinear(weight) for weight in layer] for layer in weights]
    for product in [product for layer in blocked for product in layer] if supports_blocks([head]) else []:
        product.block()
    q = torch.randn(n * K, H // K, D).to(dtype)
    keys = [torch.randn(n * K, length, D).to(dtype) for _ in range(layers)]
    values = [torch.randn(n * K, length, D).to(dtype) for _ in range(layers)]
    p = torch.randn(n * K, H // K, length).to(dtype)

    @torch.inference_mode()
    def linear() -> None:
        for layer in weights:
            for x, weight in zip(inputs, layer, strict=True):
                functional.linear(x, weight)
        functional.linear(inputs[0], head)

    @torch.inference_mode()
    def everything() -> None:
        for layer, key, value in zip(weights, keys, values, strict=True):
            functional.linear(inputs[0], layer[0])
            torch.bmm(q, key.transpose(1, 2))
            torch.bmm(p, value)
            for x, weight in zip(inputs[1:], layer[1:], strict=True):
                functional.linear(x, weight)
        functional.linear(inputs[0], head)

    @torch.inference_mode()
    def everything_blocked() -> None:
        for layer, key, value in zip(blocked, keys, values, strict=True):
            layer[0](inputs[0])
            torch.bmm(q, key.transpose(1, 2))
            torch.bmm(p, value)
            for x, product in zip(inputs[1:], layer[1:], strict=True):
                product(x)
        functional.linear(inputs[0], head)

    return [linear, everything, everything_blocked]


def generate_rate(model: Any, prompts: list[list[int]], new: int, dtype: torch.dtype, reps: int) -> float:
    """Return the tokens per CPU second of transformers' generate on all prompts as one batch."""
    ids = torch.tensor(prompts)
    model = model.to(dtype)

    def call() -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
        )

    return len(prompts) * new / best(call, reps)


def _ignore(_result: Any) -> None:
    """Discard a result of the batch."""


def decode_model(config: Any, state: dict[str, torch.Tensor], dtype: torch.dtype) -> DecodeModel:
    """Return the engine's model on the CPU."""
    return build_model(config, state, dtype=dtype, device=torch.device("cpu"), max_length=1024)


def admit(batch: SlotBatch, args: argparse.Namespace) -> None:
    """Fill all slots with long requests."""
    n, params = batch.num_slots, SamplingParams(max_new_tokens=1000)
    prompts = [tuple((7 * (i // args.samples) + j) % args.vocab for j in range(args.prompt_len)) for i in range(n)]
    batch.add(Request(str(i), prompt, params, (), 1000, (i, 0), _ignore) for i, prompt in enumerate(prompts))
    with torch.inference_mode():
        batch.admit()


def print_profiles(args: argparse.Namespace) -> None:
    """Print a step breakdown for each model, then all step times again with an allocator that retains freed memory."""
    decode_parts.print_machine()
    batches: dict[str, SlotBatch] = {}
    for name in args.models:
        for dtype in args.dtypes:
            config, model = build(name, args.vocab)
            decoder = decode_model(config, model.state_dict(), getattr(torch, dtype))
            for n in args.slots:
                batch = SlotBatch(decoder, num_slots=n, kv_tokens=1 << 30, **BATCH)
                admit(batch, args)
                title = f"{name} {dtype}, {n} slots"
                decode_parts.print_profile(title, batch)
                batches[title] = batch
    if decode_parts.keep_freed_memory():
        print("\nwith an allocator that retains freed memory:")
        for title, batch in batches.items():
            decode_parts.print_step(title, batch)


def step_times(
    config: Any, state: dict[str, torch.Tensor], dtype: torch.dtype, n: int, args: argparse.Namespace
) -> list[float]:
    """Return the seconds of one decode step, its weight matmuls, all its matmuls, and all its matmuls blocked.

    Steps and matmuls alternate in groups of BLOCK calls, and matmuls use the step's cached length. The best time of
    each group counts and groups are averaged, so load on the machine affects steps and matmuls equally.
    """
    batch = SlotBatch(decode_model(config, state, dtype), num_slots=n, kv_tokens=1 << 30, **BATCH)
    sums = [0.0] * 4
    blocks = args.new // BLOCK
    for _ in range(args.reps):
        batch.reset()
        admit(batch, args)
        with torch.inference_mode():
            for block in range(blocks):
                length = bucketed_length(args.prompt_len + (block + 1) * BLOCK)
                timed = [batch._decode_step, *products(config, n, length, dtype)]
                for function in timed:
                    function()
                for i, function in enumerate(timed):
                    sums[i] += best(function, BLOCK - 1)
    return [each / blocks / args.reps for each in sums]


async def engine_rate(engine: EmbeddedEngine, prompts: list[list[int]], new: int, reps: int) -> float:
    """Return the tokens per CPU second of the engine, including prefill and bookkeeping."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    times: list[float] = []
    for _ in range(reps):
        began = time.process_time()
        await asyncio.gather(*[engine.generate(prompt, params) for prompt in prompts])
        times.append(time.process_time() - began)
    return len(prompts) * new / min(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--slots", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--vocab", type=int, default=48)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--no-generate", action="store_true", help="skip transformers' generate")
    parser.add_argument("--profile", action="store_true", help="print a breakdown of the step instead of the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.profile:
        print_profiles(args)
        return
    print(f"threads {args.threads}, prompt {args.prompt_len}, new {args.new}, {args.samples} samples per prompt")
    print(
        "model dtype    slots |  step ms linear ms  +attn ms blocked ms | /linear  /+attn /blocked |"
        " engine tok/s generate tok/s ratio"
    )
    for name in args.models:
        for dtype_name in args.dtypes:
            dtype = getattr(torch, dtype_name)
            config, model = build(name, args.vocab)
            for n in args.slots:
                engine = EmbeddedEngine(config=config, state_dict=model.state_dict(), dtype=dtype, num_slots=n)
                prompts = [
                    [(7 * (i // args.samples) + j) % args.vocab for j in range(args.prompt_len)] for i in range(n)
                ]
                step_s, *alone = step_times(config, model.state_dict(), dtype, n, args)
                ratios = [step_s / seconds for seconds in alone]
                rate = asyncio.run(engine_rate(engine, prompts, args.new, args.reps))
                asyncio.run(engine.close())
                rival = (
                    0.0 if args.no_generate else generate_rate(model, prompts, args.new, dtype, max(1, args.reps // 2))
                )
                print(
                    f"{name:5s} {dtype_name:8s} {n:5d} |"
                    f" {step_s * 1e3:8.2f} {alone[0] * 1e3:9.2f} {alone[1] * 1e3:9.2f} {alone[2] * 1e3:10.2f} |"
                    f" {ratios[0]:7.2f} {ratios[1]:7.2f} {ratios[2]:8.2f} | {rate:12.0f} {rival:14.0f}"
                    f" {rate / rival if rival else float('nan'):5.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
