"""Reinforcement-learning post-training of language models: one loop, from a CPU laptop to a GPU cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Sample", "__version__", "get_model_url"]

if TYPE_CHECKING:
    from furlong.config.args_view import get_model_url
    from furlong.core.sample import Sample


def __getattr__(name: str) -> Any:
    # `from furlong import Sample` works without making `import furlong` pay for torch.
    if name == "Sample":
        from furlong.core.sample import Sample

        return Sample
    if name == "get_model_url":
        from furlong.config.args_view import get_model_url

        return get_model_url
    raise AttributeError(f"module 'furlong' has no attribute {name!r}")
