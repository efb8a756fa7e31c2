"""Read Adam's states from a Megatron-LM checkpoint (torch_dist).

    fully_reshardable   optimizer.state.exp_avg.KEY, ...exp_avg_sq.KEY and ...param.KEY, in the shape of the weight KEY
    dp_reshardable      optimizer.distributed.dp_group_idx_0...: flat buffers in the layout of the run that saved them

The first does not depend on a layout, so a run with any other can resume from it. Megatron-LM writes it with
--dist-ckpt-optim-fully-reshardable. Without a distributed optimizer the form is the same, except that master weights
are `fp32_param`, or the weights themselves. Step counts are in `common.pt`. The second is Megatron-LM's default; it is
refused, because the order of the parameters in a buffer is not stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from furlong.errors import CheckpointError
from furlong.training.megatron_lm.dist_files import ITERATION, DistReader, common_of

Kind = Literal["master", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, Kind] = ("exp_avg", "exp_avg_sq")
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<key>.+)")
KINDS: dict[str, Kind] = {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
BUFFER = re.compile(r"(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx_\d+\..+")
SAVE_AGAIN = "have Megatron-LM save it again with --dist-ckpt-optim-fully-reshardable"
FRESH = "or start from its weights with a fresh optimizer: --no-load-optim"


def optimizer_to_continue(folder: Path, *, loads_states: bool, start: int | None) -> Path | None:
    """Return the Megatron-LM checkpoint whose optimizer states --load resumes; None if it has none.

    loads_states: without --no-load-optim. start: --start-rollout-id. Raises CheckpointError if a checkpoint of a later
    iteration would restart at rollout 0, or if its states are flat buffers (dp_reshardable).
    """
    match = ITERATION.fullmatch(folder.name)
    iteration = 0 if match is None else int(match[1])
    if iteration and start is None:
        raise CheckpointError(
            f"--load {folder} was saved by Megatron-LM at iteration {iteration} and does not record a position in the "
            f"prompts; add --start-rollout-id {iteration} to resume there (slime: {iteration + 1}) with the first "
            "prompts, or --finetune to start at 0 with its weights alone"
        )
    if not loads_states:
        return None
    reader = DistReader(folder)
    _refuse_buffers(reader)
    return folder if reader.has_optimizer else None


def _refuse_buffers(reader: DistReader) -> None:
    if any(map(BUFFER.fullmatch, reader.names)):
        raise CheckpointError(
            f"{reader.folder}: its optimizer states are flat buffers in the layout of the run that saved them "
            f"(dp_reshardable, Megatron-LM's default), which are not read; {SAVE_AGAIN}, {FRESH} or --finetune"
        )


class DistOptimizer:
    """Master weights, moments and step count of Adam, by the name of the weight.

    step: optimizer steps taken. keys: names of the weights that were trained. Raises CheckpointError for another format
    or optimizer.
    """

    def __init__(self, reader: DistReader) -> None:
        self._reader = reader
        self._names: dict[Kind, dict[str, str]] = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
        self._others: set[str] = set()
        for match in filter(None, map(STATE.fullmatch, reader.names)):
            if match["kind"] in KINDS:
                self._names[KINDS[match["kind"]]][match["key"]] = match.string
            else:
                self._others.add(match["kind"])
        self.keys = frozenset(self._names["exp_avg"])
        _refuse_buffers(reader)
        if problem := self._problem():
            raise CheckpointError(f"{reader.folder}: {problem}, {FRESH}")
        self.step = self._one_step(common_of(reader.folder).get("optimizer"))

    def read(self, kind: Kind, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a box of the master weight or a moment of the weight `key`."""
        return self._reader.read(self._names[kind].get(key, key), offset, shape)

    def _problem(self) -> str:
        if self._others:
            return f"its optimizer has {', '.join(sorted(self._others))}, which Adam does not; use another checkpoint"
        if not self.keys:
            return f"its optimizer states are not stored by parameter (fully_reshardable); {SAVE_AGAIN}"
        for kind, names in self._names.items():
            for key, name in names.items():
                if key not in self._reader.names:
                    return f"{name} belongs to no weight; use another checkpoint"
                shape, expected = self._reader.shape(name), self._reader.shape(key)
                if shape != expected:
                    return (
                        f"{name} has shape {shape}, its weight {expected}: an older format "
                        f"(fully_sharded_model_space); {SAVE_AGAIN}"
                    )
            for key in sorted(self.keys - names.keys()):
                if kind != "master":
                    return f"{key} has no {kind}; use another checkpoint"
                if self._reader.dtype(key) != torch.float32:
                    return f"{key} is {self._reader.dtype(key)} without a float32 master weight; use another checkpoint"
        return ""

    def _one_step(self, saved: Any) -> int:
        steps = sorted({int(step) for step in _steps(saved) if isinstance(step, int | float)})
        if len(steps) != 1:
            counts = f"several step counts, {', '.join(map(str, steps))}," if steps else "no step count"
            raise CheckpointError(
                f"{self._reader.folder}: common.pt has {counts} for its optimizer; use another checkpoint, {FRESH}"
            )
        return steps[0]


def _steps(saved: Any) -> Iterator[Any]:
    """Yield every `step` that `common.pt` has for one or several optimizers, per parameter group or for all."""
    if isinstance(saved, dict):
        for name, value in saved.items():
            if name in ("step", "common_step"):
                yield value
            else:
                yield from _steps(value)
    elif isinstance(saved, list):
        for value in saved:
            yield from _steps(value)
