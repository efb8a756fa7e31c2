"""Compare one optimizer step of --train-backend megatron with fsdp, on one rank in one process.

    python benchmarks/cpu/megatron_step.py

Both backends train the same random model on the same micro-batches. Their steps (forward, backward, AdamW) alternate
(A B, A B, ...) after two untimed warm-up steps. Losses and gradient norms of the first step must agree. `x fsdp` is
megatron's step time divided by fsdp's in the same round (median and quartiles); `x cpu` is the same for CPU time.

With prompts `own`, every sample has a different prompt, so both backends do the same work. With `shared`, eight samples
share a prompt, which fsdp computes once for all of them and megatron once per sample.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags, OptimFlags
from furlong.core.batch import MicroBatch, RolloutBatch, pack_micro_batch
from furlong.core.metric import merge
from furlong.models.presets import write_preset
from furlong.training.fsdp.backend import FsdpBackend
from furlong.training.megatron import megatron_compat as compat
from furlong.training.ranks import Ranks
from furlong.training.settings import BackendSettings

SAMPLES, PROMPT, RESPONSE = 32, 64, 64
SETTINGS = AlgoFlags()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "3m"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    compat.prepare()
    print(f"{'model':6} {'dtype':9} {'prompts':8} {'fsdp s':>8} {'x fsdp':>20} {'x cpu':>20}")
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            path = Path(folder) / model
            write_preset(model, path, seed=0)
            for dtype in options.dtypes:
                for prompts in ("own", "shared"):
                    print(
                        f"{model:6} {dtype:9} {prompts:8} {compared(path, dtype, prompts, options.rounds)}", flush=True
                    )


def compared(model: Path, dtype: str, prompts: str, rounds: int) -> str:
    """Time alternating steps and return a table row. Raises SystemExit if the results differ."""
    from furlong.training.megatron.megatron_backend import MegatronBackend

    settings = BackendSettings(hf_checkpoint=model, optim=OptimFlags(lr=1e-4), dtype=getattr(torch, dtype))
    rivals = [FsdpBackend(settings), MegatronBackend(settings, ranks=Ranks())]
    micros = batches(rivals[0].actor.model.config.vocab_size, prompts)
    first = [step(rival, micros) for rival in rivals]
    for name, ours, theirs in zip(("loss", "gradient norm"), first[1][2:], first[0][2:], strict=True):
        if abs(ours - theirs) > (1e-4 if dtype == "float32" else 5e-2) * max(abs(theirs), 1e-3):
            raise SystemExit(f"{name}: megatron {ours}, fsdp {theirs}")
    for rival in rivals:
        step(rival, micros)
    times = [[step(rival, micros)[:2] for rival in rivals] for _ in range(rounds)]
    wall, cpu = ([megatron[i] / fsdp[i] for fsdp, megatron in times] for i in (0, 1))
    return f"{statistics.median(fsdp[0] for fsdp, _ in times):8.3f} {spread(wall):>20} {spread(cpu):>20}"


def step(backend: Any, micros: list[MicroBatch]) -> tuple[float, float, float, float]:
    """Run one step. Return its wall time, CPU time, loss and gradient norm."""
    wall, cpu = time.perf_counter(), time.process_time()
    if isinstance(backend, FsdpBackend):
        metrics = [backend.forward_backward(micro, PolicyLoss(SETTINGS)) for micro in micros]
    else:
        metrics = backend.forward_backward_of(micros, PolicyLoss(SETTINGS))
    norm = backend.optim_step().grad_norm
    return time.perf_counter() - wall, time.process_time() - cpu, merge(metrics)["loss"].total, norm


def batches(vocab_size: int, prompts: str) -> list[MicroBatch]:
    """Return four micro-batches of eight samples each."""
    rng = np.random.default_rng(0)
    heads = rng.integers(4, vocab_size, (SAMPLES, PROMPT))
    if prompts == "shared":
        heads = heads[::8].repeat(8, axis=0)
    tokens = np.concatenate([heads, rng.integers(4, vocab_size, (SAMPLES, RESPONSE))], axis=1)
    num = SAMPLES * RESPONSE
    rewards = rng.normal(size=SAMPLES).astype(np.float32)
    batch = RolloutBatch(
        rollout_id=0,
        tokens=tokens.reshape(-1).astype(np.int32),
        lengths=np.full(SAMPLES, PROMPT + RESPONSE),
        response_lengths=np.full(SAMPLES, RESPONSE),
        loss_masks=np.ones(num, np.uint8),
        rewards=rewards,
        raw_rewards=rewards,
        group_ids=np.arange(SAMPLES) // 8,
        rollout_ids=np.arange(SAMPLES),
        sample_ids=np.arange(SAMPLES),
        truncated=np.zeros(SAMPLES, np.uint8),
        columns={
            "advantages": rng.normal(size=num).astype(np.float32),
            "old_log_probs": np.full(num, -8.0, np.float32),
        },
    )
    weights = np.full(num, 1.0 / num, np.float32)
    return [pack_micro_batch(batch, np.arange(8 * i, 8 * i + 8), weights) for i in range(SAMPLES // 8)]


def spread(ratios: list[float]) -> str:
    """Format the median and quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
