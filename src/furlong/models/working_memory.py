"""What training takes of a device beside what rests there: trainers plan by it, and `tools.memory_phases` predicts by it."""

from __future__ import annotations

HEADROOM_FRAC = 0.04  # of the device: fragmentation, and what estimates do not see
BACKWARD_ROWS = 6  # of the MLP's intermediate width that exist at once in a layer's backward pass
COMPILED_FROM = 250_000_000  # parameters from which on compiling the decoder layers on a GPU is worth its minute


def logits_bytes(*, on_cpu: bool) -> int:
    """Float32 logits that exist at a time, where --log-probs-chunk-size is left to choose."""
    return 2**27 if on_cpu else 2**30


def chunk_rows(chosen: int, vocab_size: int, *, on_cpu: bool) -> int:
    """Response tokens whose logits of `vocab_size` words exist at a time; `chosen` of them, if that is positive.

    >>> chunk_rows(-1, 151_936, on_cpu=False), chunk_rows(-1, 151_936, on_cpu=True), chunk_rows(64, 8, on_cpu=True)
    (1766, 220, 64)
    """
    return chosen if chosen > 0 else max(logits_bytes(on_cpu=on_cpu) // (4 * vocab_size), 1)
