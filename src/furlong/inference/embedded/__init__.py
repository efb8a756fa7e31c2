"""The engine inside this process: continuous batching over a slot KV cache."""

from furlong.inference.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
