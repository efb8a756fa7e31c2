"""CPU threads and garbage collection of a run's driver process."""

from __future__ import annotations

import gc
import time

from furlong.config.sections import CheckpointFlags, Config
from furlong.core.checkpoint_folder import find_resume_folder, saved_num_threads
from furlong.machine import Threads

YOUNG_OBJECTS = 50_000  # minimum number of new objects between garbage collections
OBJECTS_A_SAMPLE = 100  # the same per sample of a rollout
MOST_OBJECTS = 2**31 - 1  # the largest threshold of the collector
MIN_GAIN = 0.8  # several threads are used if they take at most this fraction of the time of one


def raise_gc_threshold(config: Config) -> None:
    """Raise the garbage-collection threshold to about the number of objects that a rollout creates.

    A rollout creates about a hundred objects per sample, which live until its end. With Python's default threshold of
    700 new objects, traversing them takes half of the driver's time. The threshold stays low for small rollouts, as
    garbage in reference cycles may contain tensors, which count as one object each.
    """
    num_samples = config.data.rollout_batch_size * config.data.n_samples_per_prompt
    gc.set_threshold(min(max(YOUNG_OBJECTS, OBJECTS_A_SAMPLE * num_samples), MOST_OBJECTS), 10, 10)


def resume_thread_count(threads: Threads, flags: CheckpointFlags) -> Threads:
    """Return the thread count of the resumed run, unless --num-threads is given, so that sums keep their order."""
    folder = find_resume_folder(flags.load, step=flags.ckpt_step, finetune=flags.finetune)
    if threads.is_given or folder is None:
        return threads
    count = saved_num_threads(folder, step=flags.ckpt_step)
    return threads if count is None else Threads(count, f"as in {flags.load}, which is resumed", is_given=True)


def set_threads(threads: Threads) -> Threads:
    """Set PyTorch's thread count. Several threads that were not asked for are used only if a short trial is faster."""
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
    """Time matmuls of the size of a tiny model's layers, where threads pay least; the best of several tries."""
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
