"""Reinforcement-learning post-training of language models: one loop, from a CPU laptop to a GPU cluster.

    import furlong

    run = furlong.train(hf_checkpoint="model", prompt_data="sums.jsonl", rm_type="math", ...)
    print(run.folder, run.rows[-1]["rollout/raw_reward"])

The public API is `furlong.__all__`:

- `train`, `configure`, `Run`, `Config`: start a run from keywords, check keywords, read a run's folder.
- `Sample`, `Group`, `Args`, `policy`, `get_model_url`: what functions named by flags receive and call.
- `GenerateFunction`, `RewardFunction`, `GroupRewardFunction`, `GroupFilter`, `RolloutFunction`: their types.
- `FurlongError` and its subclasses: every error that furlong raises on purpose.

Names are imported on first use, so that `import furlong` is fast and does not import torch. Modules below `furlong`
are private, except for those named in docs/reference/api.md: they may change in any release.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from furlong.version import __version__

if "ipykernel" in sys.modules:  # a red block in the first cell that imports transformers without ipywidgets
    warnings.filterwarnings("ignore", message="IProgress not found")

if TYPE_CHECKING:
    from furlong.config.args_view import Args, get_model_url
    from furlong.config.hooks import (
        GenerateFunction,
        GroupFilter,
        GroupRewardFunction,
        RewardFunction,
        RolloutFunction,
    )
    from furlong.config.sections import Config
    from furlong.core.sample import Group, Sample
    from furlong.errors import (
        CheckpointError,
        ClusterError,
        ConfigError,
        DataError,
        DiagnosisError,
        EngineError,
        FurlongError,
        HookError,
        InfraError,
        RewardError,
        RolloutError,
        SyncError,
        TrainerError,
    )
    from furlong.rollout.agent import policy
    from furlong.run.python_api import Run, configure, train

__all__ = [
    "Args",
    "CheckpointError",
    "ClusterError",
    "Config",
    "ConfigError",
    "DataError",
    "DiagnosisError",
    "EngineError",
    "FurlongError",
    "GenerateFunction",
    "Group",
    "GroupFilter",
    "GroupRewardFunction",
    "HookError",
    "InfraError",
    "RewardError",
    "RewardFunction",
    "RolloutError",
    "RolloutFunction",
    "Run",
    "Sample",
    "SyncError",
    "TrainerError",
    "__version__",
    "configure",
    "get_model_url",
    "policy",
    "train",
]

_HOME = {
    "Args": "config.args_view",
    "Config": "config.sections",
    "GenerateFunction": "config.hooks",
    "Group": "core.sample",
    "GroupFilter": "config.hooks",
    "GroupRewardFunction": "config.hooks",
    "RewardFunction": "config.hooks",
    "RolloutFunction": "config.hooks",
    "Run": "run.python_api",
    "Sample": "core.sample",
    "configure": "run.python_api",
    "get_model_url": "config.args_view",
    "policy": "rollout.agent",
    "train": "run.python_api",
}  # module of each public name; errors are in `furlong.errors`


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'furlong' has no attribute {name!r}")
    return getattr(importlib.import_module(f"furlong.{_HOME.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return __all__
