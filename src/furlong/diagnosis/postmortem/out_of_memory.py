"""Facts for out-of-memory errors: the predicted and measured memory of the run, and flags with which it fits."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from furlong.config.sections import Config
from furlong.core.model_config import read_json
from furlong.machine import MemoryUse
from furlong.models.model_facts import HEADROOM_FRAC
from furlong.tools.gpu_memory import local_device
from furlong.tools.memory_formulas import ModelSize, usable
from furlong.tools.memory_plan import change_after, size_text

LARGEST = 6  # tensors to list
PROCESS_BYTES = 2**28  # of a run's process without trainer and engine (heaps, caches), as measured
HOST_ERRORS = ("can't allocate memory", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether GPU or host memory ran out."""
    is_typed = any(isinstance(each, MemoryError) for each in (error, error.__cause__))
    return is_typed or "OutOfMemory" in type(error).__name__ or any(words in str(error) for words in HOST_ERRORS)


class OutOfMemoryReport:
    """Compares the memory that a run used, measured from a baseline, with the prediction."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._baseline: MemoryUse | None = None

    def record_baseline(self) -> None:
        """Measure the memory in use before the run is built."""
        self._baseline = MemoryUse.of_process()

    def facts(self, error: BaseException) -> dict[str, Any]:
        """Return the sizes of the micro-batch, `measured`, `predicted` and `smallest_change`.

        The last two refer to the GPU that trains, or to host memory on a machine without GPUs.
        """
        facts = _micro_batch_facts(error)
        device = local_device()
        is_on_gpu = "OutOfMemory" in type(error).__name__
        if is_on_gpu and (tensors := _largest_tensors()):
            facts["largest_tensors"] = tensors
        if not is_on_gpu and (measured := self._measured()):
            facts["measured"] = measured
        if is_on_gpu == (device is None):  # host memory ran out in a run that trains on a GPU, or no GPU is known
            return facts
        folder = Path(str(self._config.rollout.hf_checkpoint))
        model_config = read_json(folder / "config.json")
        room = self._room(ModelSize.read(model_config)) if device is None else usable(device[1])
        if room is not None:
            sizes = {"longest": facts.get("longest_sample"), "tokens": facts.get("micro_batch_tokens")}
            prediction = change_after(self._config, model_config, room, **sizes, on_cpu=device is None)
            facts["predicted"], facts["smallest_change"] = prediction
        return facts

    def _measured(self) -> str:
        now = MemoryUse.of_process()
        if now is None or self._baseline is None:
            return ""
        base = self._baseline.used
        return f"the run uses {size_text(now.used - base)} of {size_text(now.limit - base)} ({now.whose})"

    def _room(self, model: ModelSize) -> int | None:
        if self._baseline is None:
            return None
        free = self._baseline.limit - self._baseline.used - 4 * model.parameters - PROCESS_BYTES
        return int(free * (1 - HEADROOM_FRAC))


def _micro_batch_facts(error: BaseException) -> dict[str, Any]:
    from furlong.core.batch import MicroBatch

    frame = error.__traceback__
    facts: dict[str, Any] = {}
    while frame is not None:
        for value in frame.tb_frame.f_locals.values():
            if isinstance(value, MicroBatch):
                facts |= {
                    "longest_sample": value.max_seqlen,
                    "micro_batch_tokens": len(value.tokens_T),
                    "micro_batch_samples": value.num_sequences,
                }
        frame = frame.tb_next
    return facts


def _largest_tensors() -> list[str]:
    import torch

    if not torch.cuda.is_initialized():
        return []
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.is_cuda]
    storages = {t.untyped_storage().data_ptr(): t for t in tensors}.values()
    largest = sorted(storages, key=lambda t: -t.untyped_storage().nbytes())[:LARGEST]
    return [
        f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} {t.untyped_storage().nbytes() / 2**20:,.0f} MiB"
        for t in largest
    ]
