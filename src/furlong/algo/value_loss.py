"""The loss of a critic on a micro-batch, and what its values explain of the returns.

R response tokens. Like a policy's loss it is a sum of per-token terms times `micro.weight_R`, here one over the trained
tokens of the whole optimizer step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furlong.algo.advantage import Reduce, identity
from furlong.algo.policy_loss import column, loss_metrics
from furlong.core.batch import MicroBatch
from furlong.core.metric import Metrics
from furlong.errors import TrainerError
from furlong.interfaces import TokenStats

ROUNDING = 1e-6  # of float32 sums, relative


class ValueLoss:
    """Clipped squared error of the values (arXiv:1707.06347, as in slime: without the factor 1/2).

    max((clip(V, V_old - c, V_old + c) - R)^2, (V - R)^2) with c = `value_clip`, V_old and R the columns `values` and
    `returns` of the rollout.
    """

    needs_logits = False
    needs_entropy = False
    entropy_grad = False

    def __init__(self, value_clip: float) -> None:
        self.value_clip = value_clip

    def __call__(self, micro: MicroBatch, stats: TokenStats) -> tuple[Tensor, Metrics]:
        """Return the loss of one micro-batch; metric `value_loss` is a sum, `value_clipfrac` a mean over tokens."""
        if stats.values_R is None:
            raise TrainerError("the value loss got the statistics of a policy; train it with the model 'critic'")
        keep_R = micro.mask_R > 0
        values_R = torch.where(keep_R, stats.values_R, 0.0)
        old_R = torch.where(keep_R, column(micro, "values"), 0.0)
        returns_R = torch.where(keep_R, column(micro, "returns"), 0.0)
        moved_R = values_R - old_R
        clipped_R = old_R + moved_R.clamp(-self.value_clip, self.value_clip)
        loss_R = torch.maximum((clipped_R - returns_R).square(), (values_R - returns_R).square())
        loss = (loss_R * micro.weight_R).sum()
        is_clipped_R = (moved_R.detach().abs() > self.value_clip).to(loss_R.dtype)
        return loss, loss_metrics(
            sums={"value_loss": loss}, means_R={"value_clipfrac": is_clipped_R}, weight_R=micro.weight_R
        )


def explained_variance(values_R: Tensor, returns_R: Tensor, mask_R: Tensor, *, reduce: Reduce = identity) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the trained tokens; nan if the returns do not vary.

    1 is a perfect critic, 0 is as good as a constant. `reduce` sums over the ranks with the rest of the rollout.
    Returns are sums of float32 values and advantages, so equal ones differ by rounding.
    """
    kept_R = mask_R > 0
    returns, errors = returns_R[kept_R].double(), (returns_R - values_R)[kept_R].double()
    count, scale = (
        returns.new_tensor(float(len(returns))),
        (returns.square() + values_R[kept_R].double().square()).sum(),
    )
    total = reduce(torch.stack([count, returns.sum(), errors.sum(), scale]))
    means = total[1:3] / total[0].clamp(min=1)
    squares = reduce(torch.stack([(returns - means[0]).square().sum(), (errors - means[1]).square().sum()]))
    return float(1 - squares[1] / squares[0]) if squares[0] > ROUNDING**2 * total[3] else float("nan")
