"""Which forward passes a round runs before its first optimizer step."""

from __future__ import annotations

from collections.abc import Iterable

from furlong.config.sections import AlgoFlags, OpdFlags
from furlong.core.algorithms import Pass, Read, find_algorithm


def needed_passes(
    flags: AlgoFlags,
    num_steps_per_rollout: int,
    *,
    opd: OpdFlags | None = None,
    custom_advantages: bool = False,
    also: Iterable[Read] = (),
) -> tuple[Pass, ...]:
    """Return the passes of the algorithm's row that fill something that the run reads.

    With one optimizer step per rollout the old policy is the live one and the ratio is exactly 1, so its log-probs are
    not read. With --use-rollout-logprobs the engine's are the old ones. `custom_advantages`: a user function computes
    advantages; with --kl-coef it receives the log-probs of the KL, whatever the algorithm. `opd`: a penalty of sampled
    tokens reads their log-probs, and a teacher in the trainer its own. `also`: what else is read.
    """
    row = find_algorithm(flags.advantage_estimator)
    reward_kl = (custom_advantages or row.kl_in_reward) and flags.kl_coef != 0
    read: set[Read] = {*also}
    opd = opd or OpdFlags()
    is_penalty = opd.use_opd and opd.opd_loss == "sampled"
    if not flags.use_rollout_logprobs and (num_steps_per_rollout > 1 or reward_kl or is_penalty):
        read.add("old_log_probs")
    if flags.use_kl_loss or reward_kl:
        read.add("ref_log_probs")
    if flags.use_rollout_entropy:
        read.add("entropy")
    if opd.has_teacher_model:
        read |= {"teacher", "top_ids"} if opd.opd_loss == "topk" else {"teacher"}
    return tuple(each for each in row.passes if not each.reads or read.intersection(each.reads))
