"""Store a RolloutBatch in one safetensors file: arrays as tensors, the rest as JSON in the header."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metric
from furlong.errors import CheckpointError
from furlong.files.tensor_file import read_arrays

FORMAT = "furlong-rollout-batch-1"
ROUTES = "routed_experts"
ARRAYS = tuple(
    f.name
    for f in dataclasses.fields(RolloutBatch)
    if f.name not in ("rollout_id", "columns", "metadata", "metrics", ROUTES)
)


def save_batch(path: Path, batch: RolloutBatch) -> None:
    """Write `batch` to `path`."""
    arrays = {name: np.asarray(getattr(batch, name)) for name in ARRAYS}
    arrays |= {f"column.{name}": column for name, column in batch.columns.items()}
    if batch.routed_experts is not None:
        arrays[ROUTES] = batch.routed_experts
    header = {
        "format": FORMAT,
        "rollout_id": str(batch.rollout_id),
        "metadata": json.dumps(batch.metadata),
        "metrics": json.dumps({name: (m.total, m.weight, m.rule) for name, m in batch.metrics.items()}),
    }
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path, header)


def load_batch(path: Path | str) -> RolloutBatch:
    """Read a file written by `save_batch`. Raises CheckpointError if it is damaged or has another format."""
    arrays, header = read_arrays(Path(path))
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {header.get('format')!r}, expected {FORMAT!r}")
    try:
        return RolloutBatch(
            rollout_id=int(header["rollout_id"]),
            columns={name.removeprefix("column."): a for name, a in arrays.items() if name.startswith("column.")},
            metadata=json.loads(header["metadata"]),
            metrics={name: Metric(*parts) for name, parts in json.loads(header["metrics"]).items()},
            routed_experts=arrays.get(ROUTES),
            **{name: arrays[name] for name in ARRAYS},
        )
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; use another --ckpt-step") from error
