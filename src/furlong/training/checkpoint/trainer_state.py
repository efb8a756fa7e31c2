"""Files of a trainer checkpoint: tensors in safetensors, the rest in JSON, nothing pickled.

trainer.json                  format, step count, contents, random states of Python and numpy
trainer_weights.safetensors   all parameters and buffers of the policy, as float32 master weights if there are any
trainer_optimizer.safetensors moments
trainer_rng.safetensors       torch random states; trainer_rng_<rank>.safetensors has all random states of another rank
trainer_<role>.safetensors    a frozen model that differs from its folder

Large files are split: trainer_weights-1.safetensors and so on. Tensors are stored unsharded, so any number of ranks can
read a checkpoint.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from furlong.core.files import PendingFiles
from furlong.errors import CheckpointError
from furlong.training.checkpoint.tensor_files import TensorReader
from furlong.training.ranks import Ranks

logger = logging.getLogger(__name__)

FORMAT = 1
META = "trainer.json"
WEIGHTS = "trainer_weights"
OPTIMIZER = "trainer_optimizer"


def files(stem: str, count: int) -> list[str]:
    """Return the names of the `count` files of `stem`."""
    return [file_name(stem, number) for number in range(count)]


def reader(folder: Path, meta: Mapping[str, Any], stem: str) -> TensorReader:
    """Open the files of `stem`. Raises CheckpointError if one is missing or damaged."""
    return TensorReader(folder, files(stem, int(meta["files"][stem])))


def file_name(stem: str, number: int) -> str:
    """Return the name of file `number` of `stem`."""
    return f"{stem}-{number}.safetensors" if number else f"{stem}.safetensors"


def write_meta(folder: Path, meta: dict[str, Any], ranks: Ranks, later: PendingFiles | None = None) -> None:
    """Write this rank's random states, and on the first rank `trainer.json`. With `later`, only add them there."""
    files = PendingFiles() if later is None else later
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    states = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64))}
    if torch.cuda.is_available():
        # with several ranks, each uses one GPU
        cuda = torch.cuda.get_rng_state_all() if ranks.world_size == 1 else [torch.cuda.get_rng_state()]
        states |= {f"cuda_{i}": state for i, state in enumerate(cuda)}
    other = {
        "python_random": [version, list(internal), next_gauss],
        "numpy_random": [str(kind), int(position), int(has_gauss), float(gauss)],
    }
    if ranks.rank:
        files.add_tensors(folder / _rng_file(ranks.rank), states, {"random": json.dumps(other)})
    else:
        files.add_tensors(folder / _rng_file(0), states)
        files.add_text(folder / META, json.dumps({"format": FORMAT, **meta, **other}) + "\n")
    if later is None:
        files.write()


def _rng_file(rank: int) -> str:
    return f"trainer_rng_{rank}.safetensors" if rank else "trainer_rng.safetensors"


def read_meta(folder: Path) -> dict[str, Any]:
    """Read `trainer.json`. Raises CheckpointError if it is missing or has another format."""
    path = folder / META
    try:
        meta: dict[str, Any] = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder} is not a trainer checkpoint: {error}") from error
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {meta.get('format')}, but this version reads {FORMAT}; use the version that wrote it"
        )
    return meta


def restore_random(folder: Path, meta: dict[str, Any], ranks: Ranks) -> None:
    """Restore the global random states from a checkpoint.

    A rank that did not exist in the saving run keeps its states, with a warning.
    """
    path = folder / _rng_file(ranks.rank)
    if ranks.rank and not path.exists():
        logger.warning("%s has no random states of rank %d; the rank keeps its current ones", folder, ranks.rank)
        return
    reader = TensorReader(folder, [path.name])
    states = {name: reader.read(name) for name in reader.names}
    if ranks.rank:
        with safe_open(path, framework="pt") as opened:
            meta = json.loads(opened.metadata()["random"])
    torch.set_rng_state(states["torch"])
    cuda = [states[name] for name in sorted(states, key=_device_index) if name.startswith("cuda_")]
    if cuda and torch.cuda.is_available():
        if ranks.world_size > 1 or len(cuda) == 1:
            torch.cuda.set_rng_state(cuda[0])
        elif len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
    version, internal, next_gauss = meta["python_random"]
    random.setstate((version, tuple(internal), next_gauss))
    kind, position, has_gauss, gauss = meta["numpy_random"]
    np.random.set_state((kind, states["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))


def _device_index(name: str) -> int:
    return int(name.removeprefix("cuda_")) if name.startswith("cuda_") else -1
