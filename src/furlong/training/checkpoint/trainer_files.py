"""Files of trainer checkpoints and models: tensors in safetensors, the rest in JSON, nothing pickled.

trainer.json                  format, step count, contents, random states of Python and numpy
trainer_weights.safetensors   all parameters and buffers of the policy, as float32 master weights if there are any
trainer_optimizer.safetensors moments
trainer_rng.safetensors       torch random states; trainer_rng_<rank>.safetensors has all random states of another rank
trainer_<role>.safetensors    another model of the run: a trained one, or a frozen one that differs from its folder
trainer_<role>_optimizer.safetensors   moments of another trained model

Large files are split: trainer_weights-1.safetensors and so on. Tensors are stored unsharded, so any number of ranks can
read a checkpoint; each rank reads only its slices. To write, every rank iterates all full tensors. Files are assigned
to ranks in turn; each rank writes its file while the next one is filled, and buffers the tensors of at most two files.
All ranks share the file system.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from furlong.core.algorithms import Role
from furlong.core.weights import host_copy
from furlong.errors import CheckpointError
from furlong.files.atomic import PendingFiles, save_tensors
from furlong.files.checkpoint_folder import read_object
from furlong.models import hf_model as hf
from furlong.models.hf_config import load_config
from furlong.models.stored_tensors import with_untrained
from furlong.training.checkpoint.tensor_reader import TensorReader, open_reader
from furlong.training.ranks import Ranks

logger = logging.getLogger(__name__)

FORMAT = 1
META = "trainer.json"
WEIGHTS = "trainer_weights"
OPTIMIZER = "trainer_optimizer"
FILE_BYTES = 4 * 2**30
META_TYPES = {"files": dict, "has_optimizer": bool, "roles": list, "python_random": list, "numpy_random": list}


def weights_stem(role: Role) -> str:
    """Return the stem of the files with a model's weights."""
    return WEIGHTS if role == "actor" else f"trainer_{role}"


def optimizer_stem(role: Role) -> str:
    """Return the stem of the files with a model's moments."""
    return OPTIMIZER if role == "actor" else f"trainer_{role}_optimizer"


def is_optimizer(stem: str) -> bool:
    """Return whether files of this stem have moments."""
    return stem.endswith("_optimizer")


def step_counts(steps: Mapping[Role, int]) -> dict[str, Any]:
    """Return the entries of `trainer.json` for the optimizer steps of each trained model."""
    return {("num_steps" if role == "actor" else f"{role}_num_steps"): count for role, count in steps.items()}


def step_count(meta: Mapping[str, Any], role: Role) -> int:
    """Return the optimizer steps of a model from `trainer.json`."""
    return int(meta["num_steps" if role == "actor" else f"{role}_num_steps"])


def check_roles(folder: Path, meta: Mapping[str, Any], trained: Iterable[Role]) -> None:
    """Raise CheckpointError if a checkpoint lacks a trained model; warn of one that this run does not train."""
    for role in trained:
        if weights_stem(role) not in meta["files"] or (role != "actor" and f"{role}_num_steps" not in meta):
            raise CheckpointError(
                f"{folder} has no {role}: it was saved by a run that trains none. Resume with the "
                "--advantage-estimator of that run, or start a new run from its weights with --finetune"
            )
    if ignored := [role for role in meta["roles"] if f"{role}_num_steps" in meta and role not in trained]:
        logger.warning("%s has a trained %s, which this run does not train: ignored", folder, ", ".join(ignored))


def frozen_roles(meta: Mapping[str, Any]) -> list[Role]:
    """Return the frozen models of a checkpoint."""
    return [role for role in meta["roles"] if f"{role}_num_steps" not in meta]


def reader(folder: Path, meta: Mapping[str, Any], stem: str) -> AbstractContextManager[TensorReader]:
    """Open the files of `stem`. Raises CheckpointError if one is missing or damaged, also from the body."""
    return open_reader(folder, [file_name(stem, number) for number in range(int(meta["files"][stem]))])


def file_name(stem: str, number: int) -> str:
    """Return the name of file `number` of `stem`."""
    return f"{stem}-{number}.safetensors" if number else f"{stem}.safetensors"


def save(
    folder: Path,
    tensors: Mapping[str, Iterable[tuple[str, Tensor]]],
    ranks: Ranks,
    *,
    meta: Mapping[str, Any],
    later: PendingFiles | None = None,
) -> None:
    """Write a checkpoint: the tensors of each stem, random states, and `trainer.json` with `meta`. A collective.

    With `later`, only copy them to host memory.
    """
    counts: dict[str, int] = {}
    for stem, named in tensors.items():
        written = write(folder, partial(file_name, stem), named, ranks, later=later)
        counts[stem] = len({name for name, _ in written.values()}) or 1
    contents = {
        "has_optimizer": OPTIMIZER in tensors,
        "roles": [stem.removeprefix("trainer_") for stem in tensors if stem != WEIGHTS and not is_optimizer(stem)],
        "files": counts,
        "num_ranks": ranks.world_size,
    }
    _write_meta(folder, {**meta, **contents}, ranks, later)
    ranks.wait()


def _write_meta(folder: Path, meta: dict[str, Any], ranks: Ranks, later: PendingFiles | None = None) -> None:
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
    meta = read_object(folder.parent, f"{folder.name}/{META}")
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {meta.get('format')}, but this version reads {FORMAT}; use the version that wrote it"
        )
    if wrong := [name for name, kind in META_TYPES.items() if not isinstance(meta.get(name), kind)]:
        raise CheckpointError(f"{path} has no usable {', '.join(wrong)}; use another --ckpt-step")
    return meta


def restore_random(folder: Path, meta: dict[str, Any], ranks: Ranks) -> None:
    """Restore the global random states from a checkpoint.

    A rank that did not exist in the saving run keeps its states, with a warning.
    """
    path = folder / _rng_file(ranks.rank)
    if ranks.rank and not path.exists():
        logger.warning("%s has no random states of rank %d; the rank keeps its current ones", folder, ranks.rank)
        return
    with open_reader(folder, [path.name], is_own=True) as reader:
        states = {name: reader.read(name) for name in reader.names}
        texts = reader.texts
    try:
        _set_random(states, json.loads(texts["random"]) if ranks.rank else meta, ranks)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the random states in {path} and {META} are damaged ({type(error).__name__}: {error}); use another "
            "--ckpt-step, or --no-load-rng"
        ) from error


def _set_random(states: Mapping[str, Tensor], meta: Mapping[str, Any], ranks: Ranks) -> None:
    torch.set_rng_state(states["torch"])
    cuda = [states[f"cuda_{i}"] for i in range(len(states)) if f"cuda_{i}" in states]
    if cuda and torch.cuda.is_available():
        if ranks.world_size > 1 or len(cuda) == 1:
            torch.cuda.set_rng_state(cuda[0])
        elif len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
    version, internal, next_gauss = meta["python_random"]
    random.setstate((version, tuple(internal), next_gauss))
    kind, position, has_gauss, gauss = meta["numpy_random"]
    np.random.set_state((kind, states["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))


def write(
    folder: Path,
    name_of: Callable[[int], str],
    tensors: Iterable[tuple[str, Tensor]],
    ranks: Ranks,
    *,
    later: PendingFiles | None = None,
    for_manifest: bool = True,
) -> dict[str, tuple[str, int]]:
    """Write tensors to `name_of(0)`, `name_of(1)`, ... of at most FILE_BYTES each; a larger tensor gets its own file.

    With `later` this rank's files are only copied to host memory and added there. for_manifest: leave checksums beside
    them. A collective. Returns file and bytes of each tensor. Raises CheckpointError on all ranks if one cannot write.
    """
    written: dict[str, tuple[str, int]] = {}
    buffered: dict[str, Tensor] = {}
    number = size = 0
    save = partial(save_tensors, for_manifest=for_manifest)
    with ThreadPoolExecutor(max_workers=1) as thread:
        pending: list[Future[None]] = []

        def end_file() -> None:
            if number % ranks.world_size != ranks.rank:
                return
            path, metadata = folder / name_of(number), {"format": "pt"}
            if later is not None:
                later.add_tensors(path, buffered, metadata)
            else:
                if pending:
                    pending[-1].exception()  # wait; errors are reported at the end
                pending.append(thread.submit(save, path, dict(buffered), metadata))
            buffered.clear()

        for name, tensor in tensors:
            if size and size + tensor.nbytes > FILE_BYTES:
                end_file()
                number, size = number + 1, 0
            size += tensor.nbytes
            written[name] = (name_of(number), tensor.nbytes)
            if number % ranks.world_size == ranks.rank:
                buffered[name] = tensor.detach().cpu().contiguous() if later is None else host_copy(tensor)
        end_file()
        failed = next((error for future in pending if (error := future.exception()) is not None), None)
    if problem := ranks.first("" if failed is None else f"cannot write into {folder}: {failed}"):
        raise CheckpointError(f"{problem}; free space or raise `ulimit -f`, or use another folder") from failed
    return written


def write_model(
    folder: Path,
    build: Callable[[], PreTrainedModel],
    tensors: Iterable[tuple[str, Tensor]],
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    companions: Path,
) -> int:
    """Write a folder that transformers can load; returns the bytes of its tensors, in `dtype`. A collective.

    The first rank writes the config of the model that `build` returns, and the tokenizer and other files of
    `companions`, a model's folder, whose tensors that are not trained are added unchanged (`untrained_tensors`). Ranks
    write tensor files in turn; none buffers the whole model.
    """
    if ranks.rank == 0:
        hf.write_config(build(), folder, dtype=dtype, companions=companions)
    ranks.wait()
    tensors = with_untrained(tensors, companions, load_config(companions))
    written = write(folder, hf.part_name, tensors, ranks, for_manifest=False)
    if ranks.rank == 0:
        hf.write_index(folder, written)
    ranks.wait()
    return sum(size for _, size in written.values())
