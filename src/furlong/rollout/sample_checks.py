"""What a sample has to be that a function of the user made, before anything is computed with it."""

from __future__ import annotations

import math
from numbers import Integral, Real

from furlong.core.sample import Sample, Status
from furlong.errors import RolloutError


def check_made(sample: Sample, by: str, vocab_size: int | None) -> None:
    """Check the tokens and per-token lists of a sample; one that is PENDING becomes COMPLETED.

    `by` says in messages who made it. Tokens have to be below `vocab_size`, where it is known. Raises RolloutError.
    """
    n = sample.response_length
    if sample.status is Status.PENDING and not n:
        raise RolloutError(
            f"{by}: sample {sample.index} came back without a response; add one with "
            "Sample.append_response_tokens, or set its status to ABORTED or FAILED"
        )
    if sample.status is Status.PENDING:
        sample.status = Status.COMPLETED
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "token_versions"):
        column = getattr(sample, name)
        if column is not None and len(column) not in (0, n):
            raise RolloutError(
                f"{by}: sample {sample.index} has response_length {n} but {name} has {len(column)} entries; use "
                "Sample.append_response_tokens, which keeps them in step"
            )
    given = [] if sample.rollout_log_probs is None else sample.rollout_log_probs
    if not all(issubclass(kind, Real) for kind in set(map(type, given))) or not all(map(math.isfinite, given)):
        raise RolloutError(
            f"{by}: sample {sample.index} has rollout_log_probs that are not finite numbers; "
            "leave them out (None) where they are not known, and write 0.0 for what the policy did not generate"
        )
    if len(sample.tokens) <= n:
        raise RolloutError(
            f"{by}: sample {sample.index} has {len(sample.tokens)} tokens of which {n} are "
            "response; `tokens` must hold prompt + response"
        )
    _check_tokens(sample, by, vocab_size)


def _check_tokens(sample: Sample, by: str, vocab_size: int | None) -> None:
    """Refuse tokens that the model does not have, which no engine has looked at."""
    if strange := [kind.__name__ for kind in set(map(type, sample.tokens)) if not issubclass(kind, Integral)]:
        raise RolloutError(
            f"{by}: sample {sample.index} has {', '.join(strange)} among its tokens; give token ids "
            "(policy().encode of a generate function makes them)"
        )
    if vocab_size is not None and (min(sample.tokens) < 0 or max(sample.tokens) >= vocab_size):
        raise RolloutError(
            f"{by}: sample {sample.index} has token ids from {min(sample.tokens)} to "
            f"{max(sample.tokens)}, and the model those from 0 to {vocab_size - 1}; encode text with its tokenizer"
        )
