"""When a run updates weights, saves and evaluates, and how far generation may be ahead of training."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.interfaces import PauseMode


@dataclass(frozen=True)
class RunSchedule:
    """Number of rollouts to train, and the intervals of weight updates, saves and evaluations, in rollouts.

    ahead: rollouts that may be in flight beyond the one in training; 0 is synchronous. staleness_bound: bound of the
    age of tokens, by default that of `ahead`. saves_on_hang: whether to save the last step if the observer stops a
    rollout that hangs.
    """

    num_rollout: int
    ahead: int = 0
    staleness_bound: int | None = None
    update_weights_interval: int = 1
    pause_mode: PauseMode = "finish"
    save_every: int | None = None
    eval_every: int | None = None
    eval_before_train: bool = True
    saves_on_hang: bool = False

    @property
    def max_staleness(self) -> int:
        """Upper bound of `rollout/staleness/max`, in weight versions."""
        if self.staleness_bound is not None:
            return self.staleness_bound
        return self.ahead + self.update_weights_interval - 1

    def eval_due(self, step: int) -> bool:
        """Whether to evaluate the weights after `step` rollouts."""
        if not self.eval_every or (step == 0 and not self.eval_before_train):
            return False
        return step % self.eval_every == 0 or step == self.num_rollout

    def save_due(self, step: int) -> bool:
        """Whether to save after `step` rollouts. If saving at all, the last one is saved."""
        return self.save_every is not None and (step % self.save_every == 0 or step == self.num_rollout)

    def weight_update_due(self, step: int) -> bool:
        """Whether to update weights after `step` rollouts: by interval, before a save or evaluation, and at the end."""
        is_needed = self.save_due(step) or self.eval_due(step)
        return step % self.update_weights_interval == 0 or is_needed or step == self.num_rollout
