"""Measure model FLOPs utilization (MFU) of training on one GPU, against plain transformers on the same tokens.

    python benchmarks/gpu/train_mfu.py                       # Qwen3 shapes of 0.6B, 1.7B and 4B parameters
    python benchmarks/gpu/train_mfu.py --shapes 4b --profile trace.json --no-rival
    python benchmarks/gpu/train_mfu.py --shapes 4b --mixed --no-rival      # sequences of 1/8 to 1 x --seq-len
    python benchmarks/gpu/train_mfu.py --shapes 4b --backend fsdp megatron --no-rival

A step is `--micro-batches` micro-batches of `--tokens` packed tokens in sequences of `--seq-len`: forward and backward
with the GRPO loss on all response tokens, then the optimizer step on float32 master weights. The time includes packing
micro-batches from the rollout, planning attention and every synchronization. Weights are random and initialized on the
GPU; nothing is downloaded.

    FLOPs per step = 6 (P - E) T + 6 E R + 6 layers heads head_dim sum(L^2)

P is the number of parameters, E those of the embedding (tied to the LM head; the lookup itself counts as zero), T the
number of tokens, R of response tokens, and L the sequence lengths. Causal attention counts half of the score matrix.
Recomputation is not counted, so MFU measures useful work only. The peak is 989 TFLOP/s: the dense bf16 rate in the data
sheet of an H100 or H200 SXM.

The baseline is the same model in transformers with SDPA attention, sequences in a dense batch, the model's own loss
(full logits, cross-entropy in float32), and parameters and AdamW states in bfloat16. That is less precise than float32
master weights and needs a quarter of their memory. The script tries full micro-batches and single sequences, with
gradient checkpointing if they do not fit without, and reports the fastest that fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags, MegatronFlags, MoeFlags, OptimFlags, TrainFlags
from furlong.core.batch import RolloutBatch, pack_micro_batch
from furlong.core.routing import Routes
from furlong.models import hf_model as hf
from furlong.models.packed_attention import IMPLEMENTATION
from furlong.training.checkpoint import trainer_files
from furlong.training.fsdp.backend import FsdpBackend
from furlong.training.ranks import Ranks
from furlong.training.settings import BackendSettings

PEAK_FLOPS = 989e12
WARMUP_STEPS = 2
RIVAL_STEPS = 2


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen3 model."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    tie_word_embeddings: bool = True

    def config(self) -> Qwen3Config:
        """Return the transformers config."""
        return Qwen3Config(
            **vars(self),
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )


@dataclass(frozen=True)
class MoeShape:
    """Dimensions of Qwen3-30B-A3B with fewer layers, or of a smaller MoE model."""

    num_hidden_layers: int
    hidden_size: int = 2048
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128
    vocab_size: int = 151936

    def config(self) -> Qwen3MoeConfig:
        """Return the transformers config."""
        return Qwen3MoeConfig(
            **vars(self),
            intermediate_size=3 * self.hidden_size,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            tie_word_embeddings=False,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )


AnyShape = Shape | MoeShape

SHAPES: dict[str, Any] = {  # AnyShape
    "tiny": Shape(64, 160, 2, 4, 2, 16, 512),
    "0.6b": Shape(1024, 3072, 28, 16),
    "1.7b": Shape(2048, 6144, 28, 16),
    "4b": Shape(2560, 9728, 36, 32),
    "8b": Shape(4096, 12288, 36, 32, tie_word_embeddings=False),
    "30b-a3b": MoeShape(48),
    "tiny-moe": MoeShape(2, 64, 32, 8, 2, 4, 2, 16, 512),
}


@dataclass(frozen=True)
class Task:
    """The tokens of one step."""

    tokens: int
    seq_len: int
    prompt_len: int
    micro_batches: int
    mixed: bool = False

    def lengths(self) -> list[list[int]]:
        """Return the sequence lengths of each micro-batch; each list sums to `tokens`."""
        rng = np.random.default_rng(1)
        batches: list[list[int]] = []
        for _ in range(self.micro_batches):
            left, lengths = self.tokens, list[int]()
            while left:
                length = int(rng.integers(self.seq_len // 8, self.seq_len + 1)) if self.mixed else self.seq_len
                # the remainder must be long enough to contain a response
                length = left if left - length <= self.prompt_len else length
                lengths.append(length)
                left -= length
            batches.append(lengths)
        return batches

    def flops(self, shape: AnyShape, num_parameters: int) -> float:
        """Return the FLOPs of one step (see the module docstring); pass only active parameters for an MoE model."""
        lengths = np.concatenate(self.lengths()).astype(np.float64)
        embedding = shape.vocab_size * shape.hidden_size
        width = shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
        linear = (num_parameters - embedding) * lengths.sum() + embedding * (lengths - self.prompt_len).sum()
        return float(6.0 * linear + 6.0 * width * (lengths**2).sum())

    def batch(self, vocab_size: int) -> RolloutBatch:
        """Return a batch of random samples, each with a different prompt."""
        rng = np.random.default_rng(0)
        lengths = np.concatenate(self.lengths())
        n, response_lengths = len(lengths), lengths - self.prompt_len
        rewards = rng.normal(size=n).astype(np.float32)
        return RolloutBatch(
            rollout_id=0,
            tokens=rng.integers(2, vocab_size, lengths.sum()).astype(np.int32),
            lengths=lengths,
            response_lengths=response_lengths,
            loss_masks=np.ones(response_lengths.sum(), np.uint8),
            rewards=rewards,
            raw_rewards=rewards,
            group_ids=np.arange(n),
            rollout_ids=np.arange(n),
            sample_ids=np.arange(n),
            truncated=np.zeros(n, np.uint8),
            columns={"advantages": np.repeat(rewards, response_lengths)},
        )


@dataclass(frozen=True)
class Result:
    """Seconds of each timed step, and peak memory in bytes.

    imbalance: tokens of the busiest expert over the mean, and of the busiest expert-parallel rank, means over layers.
    """

    seconds: list[float]
    peak_bytes: int
    how: str
    imbalance: tuple[float, float] | None = None

    @property
    def median(self) -> float:
        """Median step time in seconds."""
        return statistics.median(self.seconds)


def settings_of(folder: str, **options: Any) -> BackendSettings:
    """Return settings for either backend."""
    return BackendSettings(hf_checkpoint=Path(folder), **{"optim": OptimFlags(lr=1e-6)} | options)


class RandomBackend(FsdpBackend):
    """FSDP backend that initializes random weights on its device, each rank its shards, instead of loading them."""

    def __init__(self, shape: AnyShape, *, ranks: Ranks | None = None, **options: Any) -> None:
        self._shape = shape
        with tempfile.TemporaryDirectory() as folder:
            shape.config().save_pretrained(folder)
            super().__init__(settings_of(folder, **options), ranks=ranks)

    def _load(self, folder: Path, *, prepare: Any, is_trained: bool = False, role: Any = "actor") -> Any:  # noqa: ARG002
        if not self.sharding.is_sharded:
            model = random_model(self._shape, self.settings.dtype, self.device, IMPLEMENTATION).eval()
            prepare(model)
            return self._pack(model)
        how: dict[str, Any] = {"dtype": self.settings.dtype, "prepare": prepare, "pack": self._pack}
        packed = self.sharding.build(folder, is_trained=is_trained, **how)
        torch.manual_seed(self.ranks.rank)
        packed.model.initialize_weights()
        return packed


def used_parameters(shape: AnyShape) -> int:
    """Return the active parameters per token: inactive experts and an untied input embedding are not counted."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config())
    count = sum(p.numel() for p in model.parameters())
    if isinstance(shape, MoeShape):
        experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        count -= experts - experts * shape.num_experts_per_tok // shape.num_experts
    return count if model.config.tie_word_embeddings else count - shape.vocab_size * shape.hidden_size


def dealt_routes(num_tokens: int, shape: MoeShape) -> Routes:
    """Return routes that deal the experts to the tokens in turn, in every layer: forced balance."""
    order = np.arange(num_tokens * shape.num_experts_per_tok) % shape.num_experts
    return np.repeat(order.reshape(num_tokens, 1, -1), shape.num_hidden_layers, 1).astype(np.int16)


def imbalance_of(routes_lTK: torch.Tensor, num_experts: int, expert_parallel: int) -> tuple[float, float]:
    """Return `Result.imbalance` of the routers' choices."""
    load_lE = torch.stack([torch.bincount(one.flatten().long(), minlength=num_experts) for one in routes_lTK]).float()
    of_ranks = load_lE.unflatten(1, (expert_parallel, -1)).sum(-1)
    return tuple(float((load.amax(1) / load.mean(1)).mean()) for load in (load_lE, of_ranks))  # pyright: ignore[reportReturnType]  two


def megatron_backend(config: Any, ranks: Ranks, **options: Any) -> Any:
    """Return a Megatron backend with Megatron-core's random initial weights."""
    from furlong.training.megatron import megatron_compat as compat

    compat.prepare()
    from furlong.training.megatron import megatron_backend as backend

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(backend, "fill"):  # skip loading weights
        config.save_pretrained(folder)
        return backend.MegatronBackend(settings_of(folder, **options), ranks=ranks)


def random_model(shape: AnyShape, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    """Initialize a random model directly on `device`."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=attention)


def write_random_model(shape: AnyShape, folder: Path, device: torch.device) -> None:
    """Write a folder with random bfloat16 weights, one tensor at a time, so the model need not fit in memory."""
    config = shape.config()
    config.save_pretrained(folder)
    model = hf.build_empty(folder, dtype=torch.bfloat16)
    config.dtype, config.architectures = torch.bfloat16, [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        for name, parameter in hf.named_tensors(model):
            whole = torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)  # norms
            yield from hf.on_disk(model, name, whole if whole.ndim == 1 else whole.normal_(std=0.02))

    hf.write_index(folder, trainer_files.write(folder, hf.part_name, tensors(), Ranks(), for_manifest=False))


def timed(
    step: Callable[[], Any], count: int, device: torch.device, how: Callable[[], str], *, warmup: int = WARMUP_STEPS
) -> Result:
    """Time `count` steps after `warmup` untimed ones."""

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(warmup):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    for _ in range(count):
        start = wait()
        step()
        seconds.append(wait() - start)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Result(seconds, peak, how())


def build(name: str, shape: AnyShape, device: torch.device, ranks: Ranks, **sections: Any) -> Any:
    """Build the furlong backend `name` for one rank. sections: of flags, by their names in `BackendSettings`."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "ranks": ranks, **sections}
    if name == "fsdp":
        return RandomBackend(shape, **options)
    train = TrainFlags(tensor_model_parallel_size=ranks.tensor, sequence_parallel=ranks.tensor > 1)
    defaults: dict[str, Any] = {"train": train, "megatron": MegatronFlags(expert_tensor_parallel_size=1)}
    return megatron_backend(shape.config(), **defaults | options)


def furlong_result(
    name: str,
    shape: AnyShape,
    task: Task,
    steps: int,
    device: torch.device,
    profile: Path | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  frozen
    **sections: Any,
) -> Result:
    """Time training with a furlong backend; with multiple ranks, each processes all of `task`.

    With --use-rollout-routing-replay experts are dealt in turn; with --use-routing-replay the routers choose, and their
    imbalance in the first micro-batch is measured after the timed steps.
    """
    backend = build(name, shape, device, ranks, **sections)
    batch, loss = task.batch(shape.vocab_size), PolicyLoss(AlgoFlags())
    moe: MoeFlags = sections.get("moe", MoeFlags())
    if isinstance(shape, MoeShape) and moe.use_rollout_routing_replay:
        batch = dataclasses.replace(batch, routed_experts=dealt_routes(len(batch.tokens), shape))
    weights = np.full(len(batch.loss_masks), 1 / len(batch.loss_masks), np.float32)
    ends = np.cumsum([len(lengths) for lengths in task.lengths()])
    micro_rows = np.split(np.arange(len(batch)), ends[:-1])

    def step() -> None:
        micros = (pack_micro_batch(batch, rows, weights, device=device) for rows in micro_rows)
        if name == "megatron":
            backend.forward_backward_of(list(micros), loss)
        else:
            for micro in micros:
                backend.forward_backward(micro, loss)
        backend.optim_step()

    def how() -> str:
        layers = backend.recompute if name == "megatron" else backend.actor.layers
        recomputed = f"MLP recomputed in {layers.num_recomputed} of {len(layers.mlps)} layers"
        kept = f"{layers.kept_per_token / 1024:.0f} KiB kept per token"
        return f"{'compiled' if layers.is_compiled else 'eager'}, {recomputed}, {kept}" if layers.mlps else ""

    result = timed(step, steps, device, how)
    routes: Any = None if batch.routed_experts is None else torch.from_numpy(batch.routed_experts).transpose(0, 1)
    if moe.use_routing_replay:
        routes = backend.log_probs(pack_micro_batch(batch, micro_rows[0], weights, device=device)).policy_routes
    if isinstance(shape, MoeShape) and routes is not None:
        expert_parallel = backend.settings.train.expert_model_parallel_size
        result = dataclasses.replace(result, imbalance=imbalance_of(routes, shape.num_experts, expert_parallel))
    if profile is not None:
        write_profile(step, profile)
    return result


def rival_result(shape: Shape, task: Task, device: torch.device) -> Result:
    """Time training with plain transformers; return the fastest configuration that fits."""
    results: list[Result] = []
    for rows in sorted({1, task.tokens // task.seq_len}):
        for checkpointing in (False, True):
            try:
                results.append(plain_transformers(shape, task, device, rows, checkpointing=checkpointing))
            except torch.OutOfMemoryError:
                print(f"  baseline, {rows} sequences, checkpointing {checkpointing}: out of memory", flush=True)
            else:
                print(f"  baseline, {results[-1].how}: {results[-1].median:.3f} s/step", flush=True)
                break  # checkpointing is only slower where it is not needed
            finally:
                free()
    return min(results, key=lambda result: result.median)


def plain_transformers(shape: Shape, task: Task, device: torch.device, rows: int, *, checkpointing: bool) -> Result:
    """Time forward and backward of `rows` sequences at a time with the model's own loss, and AdamW in bfloat16."""
    model = random_model(shape, torch.bfloat16, device, "sdpa").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batch = task.batch(shape.vocab_size)
    tokens = torch.from_numpy(batch.tokens.astype(np.int64)).view(-1, task.seq_len).to(device)
    labels = tokens.clone()
    labels[:, : task.prompt_len] = -100

    def step() -> None:
        for first in range(0, len(tokens), rows):
            part = slice(first, first + rows)
            model(input_ids=tokens[part], labels=labels[part], use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    how = f"{rows} sequences at a time, {'with' if checkpointing else 'no'} checkpointing"
    return timed(step, RIVAL_STEPS, device, lambda: how, warmup=1)


def write_profile(step: Callable[[], Any], path: Path) -> None:
    """Print a breakdown of one step's GPU time and write its trace."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    kinds = {
        "attention": ("flash", "fmha", "sdpa"),
        "GEMMs": ("gemm", "nvjet", "cutlass", "xmma"),
        "optimizer": ("multi_tensor", "adam"),
        "compiled elementwise": ("triton_",),
        "copies": ("memcpy", "memset"),
    }
    sums = dict.fromkeys([*kinds, "other kernels"], 0.0)
    others: dict[str, float] = {}
    for event in prof.key_averages():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.key.lower()
        kind = next((k for k, words in kinds.items() if any(w in name for w in words)), "other kernels")
        sums[kind] += event.self_device_time_total / 1e3
        others[event.key] = event.self_device_time_total / 1e3
    for kind, milliseconds in sums.items():
        print(f"  {milliseconds:9.1f} ms  {kind}")
    for name, milliseconds in sorted(others.items(), key=lambda item: -item[1])[:40]:
        print(f"  {milliseconds:9.1f} ms    {name[:150]}")
    if str(path) != "-":
        prof.export_chrome_trace(str(path))


def free() -> None:
    """Release cached memory between measurements."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def report(name: str, who: str, result: Result, flops: float, tokens: int) -> None:
    """Print one row of the table."""
    mfu = flops / result.median / PEAK_FLOPS
    spread = (max(result.seconds) - min(result.seconds)) / result.median
    print(
        f"{name:>5}  {who:<16} {mfu:6.1%} MFU  {tokens / result.median:9,.0f} tokens/s  "
        f"{result.median:7.3f} s/step (spread {spread:.1%})  {result.peak_bytes / 2**30:6.1f} GiB  {result.how}",
        flush=True,
    )


def main() -> None:
    """Run the measurements and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "1.7b", "4b"])
    parser.add_argument("--backend", nargs="+", choices=["fsdp", "megatron"], default=["fsdp"])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per micro-batch")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--mixed", action="store_true", help="sequence lengths from 1/8 to 1 x --seq-len; requires --no-rival"
    )
    parser.add_argument("--no-rival", action="store_true")
    parser.add_argument("--profile", type=Path, help="also profile one step and write its trace here; `-`: print only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.mixed and not options.no_rival:
        parser.error("--mixed requires --no-rival: the transformers baseline supports only dense batches")
    task = Task(options.tokens, options.seq_len, options.prompt_len, options.micro_batches, options.mixed)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {where}, {task}", flush=True)
    for name in options.shapes:
        shape = SHAPES[name]
        flops, tokens = task.flops(shape, used_parameters(shape)), task.tokens * task.micro_batches
        best = 0.0
        for backend in options.backend:
            ours = furlong_result(backend, shape, task, options.steps, device, options.profile)
            report(name, f"furlong {backend}", ours, flops, tokens)
            best = min(best or ours.median, ours.median)
            free()
        if not options.no_rival:
            rival = rival_result(shape, task, device)
            report(name, "transformers", rival, flops, tokens)
            print(f"{name:>5}  {rival.median / best:.2f} times the tokens/s of transformers", flush=True)


if __name__ == "__main__":
    main()
