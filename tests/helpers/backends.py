"""Training backends of a folder, with the fields of their settings by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from furlong.config.sections.optim import OptimFlags
from furlong.training.fsdp.backend import FsdpBackend
from furlong.training.ranks import Ranks
from furlong.training.settings import BackendSettings, FsdpSettings, MegatronSettings

if TYPE_CHECKING:
    from furlong.training.megatron.megatron_backend import MegatronBackend


def fsdp_backend(folder: Path | str, ranks: Ranks | None = None, **fields: Any) -> FsdpBackend:
    """Train on transformers' model of the folder; `fields` are of both settings."""
    settings, own = _settings(folder, FsdpSettings, fields)
    return FsdpBackend(settings, own, ranks=ranks)


def megatron_backend(folder: Path | str, ranks: Ranks, **fields: Any) -> MegatronBackend:
    """Train on Megatron-core's; `compat.prepare` was called before."""
    from furlong.training.megatron.megatron_backend import MegatronBackend

    settings, own = _settings(folder, MegatronSettings, fields)
    return MegatronBackend(settings, own, ranks=ranks)


def _settings(folder: Path | str, kind: Any, fields: dict[str, Any]) -> tuple[BackendSettings, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    own = kind(**{name: value for name, value in fields.items() if name in names})
    rest = {"optim": OptimFlags()} | {name: value for name, value in fields.items() if name not in names}
    rest["device"] = torch.device(rest.get("device", "cpu"))
    return BackendSettings(hf_checkpoint=Path(folder), **rest), own
