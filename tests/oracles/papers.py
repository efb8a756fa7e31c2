"""Each algorithm as in its paper: one sample, one token at a time, scalars only. Objectives are maximized.

A response is a list of 0-d float64 tensors, so autograd differentiates the loop itself. Nothing here is shared with
furlong.algo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Response:
    """log_probs are the policy's, with gradient; the others are plain numbers. mask says which tokens count."""

    log_probs: list[Tensor]
    old: list[float]
    ref: list[float]
    rollout: list[float]
    mask: list[int]
    reward: float
    group: int
    advantages: list[float] = field(default_factory=list)

    @property
    def trained(self) -> list[int]:
        return [t for t, m in enumerate(self.mask) if m]


def groups_of(responses: list[Response]) -> list[list[Response]]:
    return [[r for r in responses if r.group == g] for g in sorted({r.group for r in responses})]


def group_advantage(response: Response, group: list[Response], *, how: str) -> float:
    rewards = [r.reward for r in group]
    if how == "leave_one_out":  # RLOO, 2402.14740 eq. 8
        others = [r.reward for r in group if r is not response]
        return response.reward - sum(others) / len(others)
    mean = sum(rewards) / len(rewards)
    if how == "group_mean":  # Dr. GRPO, 2503.20783
        return response.reward - mean
    std = math.sqrt(sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1))
    return (response.reward - mean) / (std + 1e-6)  # GRPO, 2402.03300 sec. 4.1.2


def ratio(response: Response, t: int) -> Tensor:
    return torch.exp(response.log_probs[t] - response.old[t])


def clip(x: Tensor, low: float, high: float) -> Tensor:
    if x.item() < low:
        return torch.tensor(low, dtype=x.dtype)
    if x.item() > high:
        return torch.tensor(high, dtype=x.dtype)
    return x


def surrogate(rho: Tensor, advantage: float, low: float, high: float, dual: float | None = None) -> Tensor:
    """min(rho A, clip(rho) A); dual clip (1912.09729 eq. 5): max of that and c A where A < 0."""
    plain, bounded = rho * advantage, clip(rho, 1 - low, 1 + high) * advantage
    value = plain if plain.item() <= bounded.item() else bounded
    if dual is not None and advantage < 0 and value.item() < dual * advantage:
        return torch.tensor(dual * advantage, dtype=value.dtype)
    return value


def k3(response: Response, t: int) -> Tensor:
    d = response.ref[t] - response.log_probs[t]
    return torch.exp(d) - d - 1


def grpo(responses: list[Response], *, eps: float, beta: float = 0.0, how: str = "group_mean_std") -> Tensor:
    """2402.03300 eq. 3, averaged over all outputs."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups_of(responses):
        for r in group:
            advantage = group_advantage(r, group, how=how)
            inner = torch.zeros((), dtype=torch.float64)
            for t in r.trained:
                inner = inner + surrogate(ratio(r, t), advantage, eps, eps) - beta * k3(r, t)
            total = total + inner / max(len(r.trained), 1)
    return total / len(responses)


def dr_grpo(responses: list[Response], *, eps: float, constant_len: int) -> Tensor:
    """2503.20783: no std, sums over tokens divided by one constant."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups_of(responses):
        for r in group:
            advantage = group_advantage(r, group, how="group_mean")
            for t in r.trained:
                total = total + surrogate(ratio(r, t), advantage, eps, eps) / constant_len
    return total / len(responses)


def dapo(responses: list[Response], *, low: float, high: float) -> Tensor:
    """2503.14476 eq. 8: every token of the batch weighs the same, and the upper bound is the higher one."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups_of(responses):
        for r in group:
            advantage = group_advantage(r, group, how="group_mean_std")
            for t in r.trained:
                total = total + surrogate(ratio(r, t), advantage, low, high)
                count += 1
    return total / count


def gspo(responses: list[Response], *, eps: float) -> Tensor:
    """2507.18071 eq. 5 and 7: one ratio, one term per sequence; the gradient flows through the sequence ratio."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups_of(responses):
        for r in group:
            if not r.trained:
                continue
            log_s = torch.zeros((), dtype=torch.float64)
            for t in r.trained:
                log_s = log_s + (r.log_probs[t] - r.old[t])
            s = torch.exp(log_s / len(r.trained))
            total = total + surrogate(s, group_advantage(r, group, how="group_mean_std"), eps, eps)
    return total / len(responses)


def cispo(responses: list[Response], *, low: float, high: float) -> Tensor:
    """2506.13585 eq. 4-5: token mean of sg(clipped weight) A log pi."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in groups_of(responses):
        for r in group:
            advantage = group_advantage(r, group, how="group_mean_std")
            for t in r.trained:
                weight = min(max(ratio(r, t).item(), 1 - low), 1 + high)
                total = total + weight * advantage * r.log_probs[t]
                count += 1
    return total / count


def rloo(responses: list[Response]) -> Tensor:
    """2402.14740 eq. 8: REINFORCE of whole sequences against the mean reward of the others."""
    total = torch.zeros((), dtype=torch.float64)
    for group in groups_of(responses):
        for r in group:
            log_pi = torch.zeros((), dtype=torch.float64)
            for t in r.trained:
                log_pi = log_pi + r.log_probs[t]
            total = total + group_advantage(r, group, how="leave_one_out") * log_pi
    return total / len(responses)


def whitened(rows: list[list[float]], responses: list[Response]) -> list[list[float]]:
    kept = [row[t] for row, r in zip(rows, responses, strict=True) for t in r.trained]
    mean = sum(kept) / len(kept)
    var = sum((x - mean) ** 2 for x in kept) / (len(kept) - 1)
    return [[(x - mean) / math.sqrt(var + 1e-8) for x in row] for row in rows]


def reinforce_plus_plus(
    responses: list[Response], *, eps: float, kl_coef: float, gamma: float, baseline: bool
) -> Tensor:
    """2501.03262: KL (k1) in the token reward, return to go, whitened over the batch, PPO clip, mean of means.

    With `baseline`: reward minus group mean at every token, minus the token's KL.
    """
    rows: list[list[float]] = []
    for r in responses:
        kl = [(r.old[t] - r.ref[t]) if r.mask[t] else 0.0 for t in range(len(r.mask))]
        if baseline:
            centered = group_advantage(r, [x for x in responses if x.group == r.group], how="group_mean")
            rows.append([centered - kl_coef * k for k in kl])
            continue
        token_rewards = [-kl_coef * k for k in kl]
        token_rewards[r.trained[-1]] += r.reward
        row, running = [0.0] * len(kl), 0.0
        for t in reversed(range(len(kl))):
            running = token_rewards[t] + gamma * running
            row[t] = running
        rows.append(row)
    total = torch.zeros((), dtype=torch.float64)
    for r, row in zip(responses, whitened(rows, responses), strict=True):
        inner = torch.zeros((), dtype=torch.float64)
        for t in r.trained:
            inner = inner + surrogate(ratio(r, t), row[t], eps, eps)
        total = total + inner / len(r.trained)
    return total / len(responses)


def tis_weights(
    response: Response, *, level: str, mode: str, low: float, high: float, veto: float | None
) -> list[float]:
    """Importance weight of each token; 0 for masked ones, whose weight does not matter."""
    logs = {t: response.old[t] - response.rollout[t] for t in response.trained}
    weights = [0.0] * len(response.mask)
    vetoed = veto is not None and any(math.exp(x) < veto for x in logs.values())
    for t in response.trained:
        match level:
            case "token":
                w = math.exp(logs[t])
            case "sequence":
                w = math.exp(sum(logs.values()))
            case _:
                w = math.exp(sum(logs.values()) / len(logs))
        if mode == "truncate":
            w = min(w, high)
        elif mode == "clip":
            w = min(max(w, low), high)
        elif w < low or w > high:
            w = 0.0
        weights[t] = 0.0 if vetoed else w
    return weights


def is_dropped_by_opsm(response: Response, advantage: float, *, delta: float) -> bool:
    """2512.02556: negative advantage and mean log(pi_old / pi) above delta."""
    drift = [response.old[t] - response.log_probs[t].item() for t in response.trained]
    return advantage < 0 and sum(drift) / max(len(drift), 1) > delta
