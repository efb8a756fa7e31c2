"""What is known of a run's memory once it has run out: predicted, measured, and the flags after which it would fit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from furlong.config.sections import Config
from furlong.machine import MemoryUse
from furlong.models.hf_folder import read_json
from furlong.models.working_memory import HEADROOM_FRAC
from furlong.tools.gpu_memory import local_device
from furlong.tools.memory_model import ModelSize
from furlong.tools.memory_phases import usable
from furlong.tools.memory_plan import change_after, size_text

LARGEST = 6  # tensors that are named
BESIDE_BYTES = 2**28  # of a run's process, beside trainer and engine: its threads' heaps, caches; measured
OF_HOST = ("can't allocate memory", "Cannot allocate memory")  # in an error that is none of a GPU


def is_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: a GPU's, or this machine's."""
    is_own = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
    return is_own or any(words in str(error) for words in OF_HOST)


class OutOfMemoryReport:
    """What this process has of the machine's memory before a run is built, and what that says once it runs out."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._before: MemoryUse | None = None

    def note(self) -> None:
        """Look at what is in use now; what comes later is the run's."""
        self._before = MemoryUse.of_process()

    def facts(self, error: BaseException) -> dict[str, Any]:
        """Facts of an error of memory: the micro-batch that ran, `measured`, `predicted` and `smallest_change`.

        The last two are of the GPU that training runs on, or of this machine's memory where it has none.
        """
        facts = _of_micro_batch(error)
        device = local_device()
        is_on_gpu = "OutOfMemory" in type(error).__name__
        if is_on_gpu and (tensors := _largest_tensors()):
            facts["largest_tensors"] = tensors
        if not is_on_gpu and (measured := self._measured()):
            facts["measured"] = measured
        if is_on_gpu == (device is None):  # the machine's memory, while training is on a GPU: or none is known
            return facts
        folder = Path(str(self._config.rollout.hf_checkpoint))
        model_config = read_json(folder / "config.json")
        room = self._room(ModelSize.read(model_config)) if device is None else usable(device[1])
        if room is not None:
            sizes = {"longest": facts.get("longest_sample"), "tokens": facts.get("micro_batch_tokens")}
            said = change_after(self._config, model_config, room, **sizes, on_cpu=device is None)
            facts["predicted"], facts["smallest_change"] = said
        return facts

    def _measured(self) -> str:
        """What the run has of what there was for it."""
        now = MemoryUse.of_process()
        if now is None or self._before is None:
            return ""
        begun = self._before.used
        return f"the run has {size_text(now.used - begun)} of {size_text(now.limit - begun)} ({now.whose})"

    def _room(self, model: ModelSize) -> int | None:
        """What of the machine's memory is left for training, beside an engine with its own copy of the weights."""
        if self._before is None:
            return None
        free = self._before.limit - self._before.used - 4 * model.parameters - BESIDE_BYTES
        return int(free * (1 - HEADROOM_FRAC))


def _of_micro_batch(error: BaseException) -> dict[str, Any]:
    """The sizes of the micro-batch that ran."""
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
    """Shape, precision and MiB of the largest tensors on GPUs."""
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
