"""What a checkpoint of Megatron-LM (torch_dist) holds of the optimizer that trained it, in two of its forms.

    fully_reshardable   optimizer.state.exp_avg.KEY, ...exp_avg_sq.KEY and ...param.KEY, each as large as the weight KEY
    dp_reshardable      optimizer.distributed.dp_group_idx_0...: buffers, as the ranks of that run shared them

The first says nothing of the layout, and any other can go on from it. It is what Megatron-LM writes with
--dist-ckpt-optim-fully-reshardable, and the same without a distributed optimizer, where masters are `fp32_param`, or
the weights themselves; counted steps are in `common.pt`. `DistOptimizer` reads it. The second is Megatron-LM's default;
what lies where in a buffer, only Megatron-core's modules tell (`training.megatron.megatron_lm.flat_optimizer`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from furlong.errors import CheckpointError
from furlong.training.checkpoint.dist_files import ITERATION, DistFiles, common_of

Kind = Literal["master", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Kind, Kind] = ("exp_avg", "exp_avg_sq")
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<key>.+)")
KINDS: dict[str, Kind] = {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# A buffer's part that is stored as one tensor: of which optimizer and rank, and which of how many.
BUFFER = re.compile(
    r"(?P<prefix>(?:chained_(?P<part>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_.+\.bucket_idx_(?P<bucket>\d+))\.(?P<kind>\w+)"
)
FRESH = "or start from its weights with a fresh optimizer: --no-load-optim"


def optimizer_to_continue(folder: Path, *, wanted: bool, start: int | None) -> Path | None:
    """The folder whose optimizer states a run of --load goes on with; None where it has none, or they are not wanted.

    start: of --start-rollout-id. Raises CheckpointError if it would begin at 0 again what had been trained for a while.
    """
    found = ITERATION.fullmatch(folder.name)
    iteration = 0 if found is None else int(found[1])
    if iteration and start is None:
        raise CheckpointError(
            f"--load {folder} was saved by Megatron-LM at iteration {iteration}, and does not say where in its "
            f"prompts a run would be; add --start-rollout-id {iteration} to go on there (slime: {iteration + 1}) with "
            "the first of the prompts, or --finetune to begin at 0 with its weights alone"
        )
    return folder if wanted and DistFiles(folder).has_optimizer else None


def has_buffers(files: DistFiles) -> bool:
    """Whether the states are kept as buffers (dp_reshardable)."""
    return any(map(BUFFER.fullmatch, files.names))


class DistOptimizer:
    """Masters and moments of Adam by the name of the weight, and its steps. Raises CheckpointError for another form.

    step: how many the optimizer has counted. keys: names of the weights that it trained.
    """

    def __init__(self, files: DistFiles) -> None:
        self._files = files
        self._names: dict[Kind, dict[str, str]] = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
        self._others: set[str] = set()
        for found in filter(None, map(STATE.fullmatch, files.names)):
            if found["kind"] in KINDS:
                self._names[KINDS[found["kind"]]][found["key"]] = found.string
            else:
                self._others.add(found["kind"])
        self.keys = frozenset(self._names["exp_avg"])
        if reason := self._problem():
            raise CheckpointError(f"{files.folder}: {reason}, {FRESH}")
        self.step = one_step(f"{files.folder}: common.pt", common_of(files.folder).get("optimizer"))

    def read(self, kind: Kind, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Read a box of a master, or of a moment of the weight `key`, where the weight has it."""
        return self._files.read(self._names[kind].get(key, key), offset, shape)

    def _problem(self) -> str:
        """Why these states cannot be gone on with, "" if they can."""
        if self._others:
            return f"it has {', '.join(sorted(self._others))} of its optimizer, not Adam's; take another"
        if not self.keys:
            return (
                "its optimizer states are kept neither by parameter nor as buffers (dp_reshardable); have Megatron-LM "
                "save it again with --dist-ckpt-optim-fully-reshardable"
            )
        for kind, names in self._names.items():
            for key, name in names.items():
                if key not in self._files.names:
                    return f"{name} belongs to no weight; take another"
                if self._files.shape(name) != self._files.shape(key):
                    return (
                        f"{name} is {self._files.shape(name)}, and the weight {self._files.shape(key)}: an older form "
                        "(fully_sharded_model_space); save it again with --dist-ckpt-optim-fully-reshardable"
                    )
            for key in sorted(self.keys - names.keys()):
                if kind != "master":
                    return f"{key} has no {kind}; take another"
                if self._files.dtype(key) != torch.float32:
                    return f"{key} is kept in {self._files.dtype(key)}, without a float32 master; take another"
        return ""


def one_step(where: str, noted: Any) -> int:
    """The one number of steps that is noted of all parts of an optimizer. Raises CheckpointError for another count."""
    steps = {int(step) for step in _steps(noted) if isinstance(step, int | float)}
    if len(steps) != 1:
        said = f"several numbers of steps, {', '.join(map(str, sorted(steps)))}" if steps else "no number of steps"
        raise CheckpointError(f"{where} notes {said} for its optimizer; take another, {FRESH}")
    return steps.pop()


def _steps(noted: Any) -> Iterator[Any]:
    """Every `step` in what `common.pt` notes of one or several optimizers: of groups of parameters, or of all."""
    if isinstance(noted, dict):
        for name, value in noted.items():
            if name in ("step", "common_step"):
                yield value
            else:
                yield from _steps(value)
    elif isinstance(noted, list):
        for value in noted:
            yield from _steps(value)
