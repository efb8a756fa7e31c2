"""Predicted against measured memory of the trainer's phases on one GPU.

    python benchmarks/gpu/memory.py                 # a grid of Qwen3 shapes, micro-batch sizes and settings

Prediction: `doctor.memory`, which `furlong plan` shows, from dimensions alone. Measurement: PyTorch's peak of allocated
memory while the phase runs, after a first step has made gradients and moments. The last column is predicted / measured;
the goal is 0.85 to 1.15.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train_mfu import SHAPES, RandomBackend, Shape, Task, free

from furlong.algo.loss import PolicyLoss
from furlong.config.sections.algorithm import AlgoFlags
from furlong.core.batch import micro_batch
from furlong.doctor.memory import GIB, ModelSize, Training, training_phases, usable

GRID = [  # shape, tokens of a micro-batch, options of the backend
    ("0.6b", 8192, {}),
    ("0.6b", 32768, {}),
    ("0.6b", 131072, {}),
    ("0.6b", 32768, {"recompute_activations": True}),
    ("1.7b", 16384, {}),
    ("1.7b", 65536, {}),
    ("1.7b", 65536, {"recompute_activations": True}),
    ("4b", 8192, {}),
    ("4b", 32768, {}),
    ("4b", 32768, {"recompute_activations": True}),
    ("4b", 32768, {"offload_optimizer": True}),
]


def measured(shape: Shape, tokens: int, options: dict[str, Any], device: torch.device) -> dict[str, int]:
    """Peak bytes of each phase in the second step."""
    backend = RandomBackend(shape, dtype=torch.bfloat16, device=device, **options)
    task = Task(tokens, min(8192, tokens), 512, 2)
    batch, loss = task.batch(shape.vocab_size), PolicyLoss(AlgoFlags())
    weights = np.full(len(batch.loss_masks), 1 / len(batch.loss_masks), np.float32)
    micro_rows = np.split(np.arange(len(batch)), 2)
    micros = [micro_batch(batch, rows, weights, device=device) for rows in micro_rows]
    peaks: dict[str, int] = {}

    def peak_of(name: str, work: Callable[[], Any]) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated()

    for _ in range(2):
        peak_of("log-probs", lambda: [backend.log_probs(micro) for micro in micros])
        peak_of("train", lambda: [backend.forward_backward(micro, loss) for micro in micros])
        peak_of("optimizer step", backend.optim_step)
    return peaks


def main() -> None:
    """Measure the grid and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SHAPES, help="shapes of the grid")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to measure")
    device = torch.device("cuda")
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {device_bytes / GIB:.1f} GiB", flush=True)
    rows: list[dict[str, Any]] = []
    for name, tokens, how in GRID:
        if options.only and name not in options.only:
            continue
        model = ModelSize.read(SHAPES[name].config().to_dict())
        whole, offloaded = "recompute_activations" in how, "offload_optimizer" in how
        training = Training(tokens, whole_layers=whole, is_offloaded=offloaded)
        predicted = training_phases(model, training, usable(device_bytes))
        peaks = measured(SHAPES[name], tokens, how, device)
        free()
        for phase in predicted:
            peak = peaks[phase.name]
            ratio = phase.total / peak
            print(
                f"{name:>5} {tokens:>7,} tokens {' '.join(how) or '-':<22} {phase.name:<15} predicted "
                f"{phase.total / GIB:6.1f} GiB  measured {peak / GIB:6.1f} GiB  {ratio:5.2f}  {phase.note}",
                flush=True,
            )
            rows.append({"shape": name, "tokens": tokens, "how": how, "phase": phase.name, "ratio": ratio})
    worst = max(rows, key=lambda row: abs(row["ratio"] - 1))
    print(f"worst: {worst}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
