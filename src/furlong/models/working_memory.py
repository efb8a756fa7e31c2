"""What training takes of a device beside what rests there: trainers plan by it, and `doctor.memory` predicts by it."""

from __future__ import annotations

HEADROOM_FRAC = 0.04  # of the device: fragmentation, and what estimates do not see
BACKWARD_ROWS = 6  # of the MLP's intermediate width that exist at once in a layer's backward pass
COMPILED_FROM = 250_000_000  # parameters from which on compiling the decoder layers on a GPU is worth its minute
LOGITS_BYTES = 2**30  # float32 logits of one chunk, where --log-probs-chunk-size is left to choose
LOGITS_CPU_BYTES = 128 * 2**20  # on a CPU
