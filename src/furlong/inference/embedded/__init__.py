"""The engine inside the process: continuous batching over a slot KV cache, and its HTTP server."""

from furlong.inference.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
