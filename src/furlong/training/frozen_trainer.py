"""A trainer that leaves the weights alone: `--debug-rollout-only`."""

from __future__ import annotations

from pathlib import Path

from furlong.core.batch import RolloutBatch
from furlong.core.metric import Metrics
from furlong.core.pending_files import PendingFiles
from furlong.core.weights import WeightSource
from furlong.errors import TrainerError
from furlong.interfaces import Trainer


class FrozenTrainer(Trainer):
    """Implements `interfaces.Trainer` without a model: the engine serves the weights that it was started with."""

    async def train(self, batch: RolloutBatch) -> Metrics:  # noqa: ARG002  the port's signature
        """Do nothing; a rollout-only run has nothing to report of training."""
        return {}

    def weights(self) -> WeightSource:
        """Raise TrainerError: there are none."""
        raise TrainerError("a --debug-rollout-only run has no trainer weights to publish")

    async def save(self, folder: Path) -> None:
        """Write nothing: there is no training state."""

    async def snapshot(self, folder: Path) -> PendingFiles:  # noqa: ARG002  the port's signature
        """Hold nothing: there is no training state."""
        return PendingFiles()

    async def load(self, folder: Path) -> None:
        """Read nothing: there is no training state."""

    async def save_hf(self, folder: Path) -> None:
        """Raise TrainerError: there are no weights."""
        raise TrainerError(f"--debug-rollout-only has no trained weights to write to {folder}; drop --save-hf")

    async def close(self) -> None:
        """Release nothing."""
