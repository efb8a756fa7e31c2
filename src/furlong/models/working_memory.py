"""Working memory of training steps: constants of trainers and of `tools.memory_phases`. Imports no torch."""

from __future__ import annotations

HEADROOM_FRAC = 0.04  # fraction of the device left free for fragmentation and estimation errors
BACKWARD_ROWS = 6  # rows of the MLP's intermediate width per token that exist at once in a layer's backward pass
COMPILED_FROM = 250_000_000  # parameters; above this, compiling the decoder layers on a GPU (about a minute) pays off


def logits_bytes(*, on_cpu: bool) -> int:
    """Return the bytes of float32 logits that exist at a time if --log-probs-chunk-size is not set."""
    return 2**27 if on_cpu else 2**30


def chunk_rows(chosen: int, vocab_size: int, *, on_cpu: bool) -> int:
    """Return the response tokens whose logits exist at a time: `chosen` if positive, otherwise by memory.

    >>> chunk_rows(-1, 151_936, on_cpu=False), chunk_rows(-1, 151_936, on_cpu=True), chunk_rows(64, 8, on_cpu=True)
    (1766, 220, 64)
    """
    return chosen if chosen > 0 else max(logits_bytes(on_cpu=on_cpu) // (4 * vocab_size), 1)
