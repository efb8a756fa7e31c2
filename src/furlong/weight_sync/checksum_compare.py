"""Compares what the trainer sent with what an engine says it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.core.weights import WeightSource, checksum
from furlong.errors import SyncError


def check_arrived(
    sent: Mapping[str, str], loaded: Mapping[str, str], *, version: int, source: WeightSource | None = None
) -> None:
    """Raise SyncError naming the tensors that differ, are missing, or were not sent (CKPT03).

    With the `source` of what was sent the first of them is described: shape, dtype, norm; and those that are all zero
    where they arrived are told apart (SYNC02).
    """
    different = [name for name in sent if name in loaded and loaded[name] != sent[name]]
    missing = [name for name in sent if name not in loaded]
    extra = [name for name in loaded if name not in sent]
    if not (different or missing or extra):
        return
    if zero := _all_zero(source, {name: loaded[name] for name in different}):
        raise never_arrived(zero, version=version)
    parts = [
        f"{len(names)} {what} (first: {names[0]}{_described(source, names[0])})"
        for what, names in (("differ", different), ("did not arrive", missing), ("were never sent", extra))
        if names
    ]
    difference = diagnosis(
        "CKPT03",
        f"weight_sync version {version}: of {len(sent)} tensors, {', '.join(parts)}; the engine must not serve these "
        "weights",
        remedy="check that trainer and engine read the same --hf-checkpoint, and the name mapping of this model family; "
        "--check-weight-update-equal compares every tensor, --debug-weight-sync 1 logs it",
        evidence={"version": version, "differ": different[:16], "missing": missing[:16], "extra": extra[:16]},
    )
    raise SyncError(difference.text())


def _all_zero(source: WeightSource | None, loaded: Mapping[str, str]) -> list[str]:
    """Of these tensors, with their checksums in the engine, those that hold nothing but zeros there."""
    if source is None or not loaded:
        return []
    return [name for name, tensor in source.open() if loaded.get(name) == checksum(torch.zeros_like(tensor))]


def never_arrived(names: Sequence[str], *, version: int) -> SyncError:
    """The error of tensors that are all zero in the engine and not in the trainer (SYNC02)."""
    problem = Diagnosis(
        "SYNC02",
        f"weight_sync version {version}: {len(names)} tensors are all zero in the engine and not in the trainer: "
        + ", ".join(names[:3]),
        "The engine skips them, because they were quantized under a name that it does not know.",
        "add their patterns to quantization_config.ignore in config.json (`furlong check DIR` prints them: QNT01)",
    )
    return SyncError(problem.text())


def _described(source: WeightSource | None, wanted: str) -> str:
    if source is None:
        return ""
    for name, tensor in source.open():
        if name == wanted:
            dtype = str(tensor.dtype).removeprefix("torch.")
            return f", {tuple(tensor.shape)} {dtype} of norm {float(tensor.float().norm()):.4g} in the trainer"
    return ""
