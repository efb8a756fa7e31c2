"""Checks Megatron-LM checkpoints (torch_dist): files, index, iteration, layers and values.

The index and other metadata are read with a restricted unpickler; tensors are read one part at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.text import abbreviate
from furlong.errors import CheckpointError
from furlong.files.checkpoint_folder import DIST_INDEX, TRACKER, tracker_text
from furlong.tools.model_folder import missing_layers
from furlong.tools.weight_values import value_findings
from furlong.training.megatron_lm.dist_files import ITERATION, OPTIMIZER, DistReader, common_of
from furlong.training.megatron_lm.dist_optimizer import BUFFER

SHOWN = 5
# Vectors, which are matrices when stacked by layer, and moments before the first step.
MAY_BE_ZERO = re.compile(r"(^|\.)optimizer\.|bias$|softmax_offset$")


def dist_folder(folder: Path) -> Path | None:
    """Return the Megatron-LM checkpoint that `folder` is or whose tracker names it; None for other folders."""
    if (folder / DIST_INDEX).is_file() or list(folder.glob("__*_*.distcp")):
        return folder
    if not (text := tracker_text(folder)):
        return None
    named = folder / (f"iter_{int(text):07d}" if text.isdecimal() else text)
    others = [path.parent for path in folder.glob(f"*/{DIST_INDEX}")]
    return named if named in others or (others and not named.exists()) else None


def check_dist(folder: Path, *, with_values: bool = True) -> list[Diagnosis]:
    """Return the diagnoses of a Megatron-LM checkpoint."""
    return list(_findings(folder, with_values))


def _findings(folder: Path, with_values: bool) -> Iterator[Diagnosis]:
    if not folder.is_dir():
        complete = sorted(path.parent.name for path in folder.parent.glob(f"*/{DIST_INDEX}"))
        yield diagnosis(
            "CKPT01",
            f"{folder.parent / TRACKER} names {folder.name}, which does not exist; complete: {', '.join(complete)}",
            remedy=f"select one with --ckpt-step, or write its number into {TRACKER}",
        )
        return
    again = "copy it again, or use an earlier one"
    if not (folder / DIST_INDEX).is_file():
        finding = f"{folder} has no index ({DIST_INDEX}), which is written last: the save was interrupted"
        yield diagnosis("CKPT01", finding, remedy=again)
        return
    try:
        files, common = DistReader(folder), common_of(folder)
        problems = files.problems()
    except CheckpointError as error:
        yield diagnosis("CKPT04", str(error), remedy=again)
        return
    for problem in problems:
        yield diagnosis("CKPT04", f"{folder}: {problem}", remedy=again, evidence={"folder": str(folder)})
    yield from _iteration(folder, common.get("iteration"))
    layers = getattr(common.get("args"), "get", lambda _: None)("num_layers")
    yield from _layers(files, layers)
    if with_values and not problems:
        yield from _values(files)


def _iteration(folder: Path, noted: object) -> Iterator[Diagnosis]:
    named = ITERATION.fullmatch(folder.name)
    if named and isinstance(noted, int) and noted != int(named[1]):
        yield diagnosis(
            "CKPT04",
            f"{folder} is named after iteration {int(named[1])}, but its common.pt has {noted}",
            cause="The folder was renamed, or its files belong to two checkpoints.",
            remedy="copy it again from where it was saved",
            severity="warning",
        )


def _layers(files: DistReader, num_layers: object) -> Iterator[Diagnosis]:
    names = [name for name in files.names if not OPTIMIZER.search(name)]
    remedy = "convert or save the checkpoint again"
    config = {"num_hidden_layers": num_layers}
    if absent := missing_layers(names, config):
        finding = f"{files.folder}: no tensors for layers {', '.join(map(str, absent))} of {num_layers}"
        yield diagnosis("CKPT04", finding, remedy=remedy)
    heights = {name: files.shape(name)[0] for name in names if ".layers.self_attention." in name and files.shape(name)}
    expected = num_layers if isinstance(num_layers, int) else max(heights.values(), default=0)
    if odd := sorted(name for name, height in heights.items() if height != expected):
        finding = f"{files.folder}: {len(odd)} tensors are not stacks of {expected} layers: {abbreviate(odd, SHOWN)}"
        yield diagnosis("CKPT04", finding, remedy=remedy)


def _values(files: DistReader) -> Iterator[Diagnosis]:
    broken: list[str] = []
    zero: list[str] = []
    for name in sorted(files.names):
        is_zero = True
        try:
            for part in files.parts(name):
                is_filled = (
                    BUFFER.fullmatch(name) is None
                )  # Megatron-core stores uninitialized memory between parameters
                if part.is_floating_point() and is_filled and not bool(torch.isfinite(part).all()):
                    broken.append(name)
                    break
                is_zero = is_zero and not bool(part.any())
            else:
                if is_zero and len(files.shape(name)) > 1 and not MAY_BE_ZERO.search(name):
                    zero.append(name)
        except CheckpointError as error:
            yield diagnosis("CKPT04", str(error), remedy="copy it again, or use an earlier one")
    yield from value_findings(files.folder, broken, zero)
