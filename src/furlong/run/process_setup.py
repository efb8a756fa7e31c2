"""How the process of a run computes: its threads, and when Python looks for garbage."""

from __future__ import annotations

import gc
import time

from furlong.config.sections import CheckpointFlags, Config
from furlong.core.checkpoint_folder import find_resume_folder, saved_num_threads
from furlong.machine import Threads

YOUNG_OBJECTS = 50_000  # new objects between two garbage collections, at least,
OBJECTS_A_SAMPLE = 100  # and for each sample of a rollout,
MOST_OBJECTS = 2**31 - 1  # which is what the collector can count
MIN_GAIN = 0.8  # several threads are used if they take at most this share of the time of one


def collect_rarely(config: Config) -> None:
    """Have the next garbage collection wait until there are about as many new objects as a rollout has.

    A rollout makes some hundred objects a sample that live until its end; going over them at every 700th new one, which
    is Python's default, takes half of the driver's time. Small rollouts keep small numbers: garbage in cycles may hold
    tensors, which count as one object each.
    """
    num_samples = config.data.rollout_batch_size * config.data.n_samples_per_prompt
    gc.set_threshold(min(max(YOUNG_OBJECTS, OBJECTS_A_SAMPLE * num_samples), MOST_OBJECTS), 10, 10)


def as_before(threads: Threads, flags: CheckpointFlags) -> Threads:
    """The threads of the run that this one continues, where nobody asked for a number: sums stay in the same order."""
    folder = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if threads.is_given or folder is None:
        return threads
    count = saved_num_threads(folder, step=flags.ckpt_step)
    return threads if count is None else Threads(count, f"as in {flags.load}, which is continued", is_given=True)


def set_threads(threads: Threads) -> Threads:
    """Apply the choice to PyTorch's pools; several threads that nobody asked for have to pay in a short trial."""
    import torch

    if threads.count > 1 and not threads.is_given:
        one, several = (_small_products_s(count) for count in (1, threads.count))
        if several > MIN_GAIN * one:
            threads = Threads(
                1, f"{threads.reason}; {threads.count} threads take {several / one:.2f} of the time of one"
            )
    torch.set_num_threads(threads.count)
    return threads


def _small_products_s(num_threads: int) -> float:
    """Seconds of products of the size of a tiny model's layers, where threads cost most; the best of several tries."""
    import torch

    torch.set_num_threads(num_threads)
    x, weight = torch.ones(256, 256), torch.ones(768, 256)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.silu(torch.nn.functional.linear(x, weight))
        best = min(best, time.perf_counter() - started)
    return best
