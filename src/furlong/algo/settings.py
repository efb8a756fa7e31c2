"""What the algorithms read of the configuration. Names are the flags'; any object with these attributes fits."""

from __future__ import annotations

from typing import Literal, Protocol

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
TisMode = Literal["truncate", "clip", "mask"]
TisLevel = Literal["token", "sequence", "geometric"]


class Settings(Protocol):
    """Read-only view of the algorithm section; one property, one flag."""

    @property
    def advantage_estimator(self) -> str:
        """A key of `core.algorithms.ALGORITHMS`."""
        ...

    @property
    def eps_clip(self) -> float:
        """Lower clip bound: ratios under 1 - eps_clip are clipped."""
        ...

    @property
    def eps_clip_high(self) -> float | None:
        """Upper clip bound; None takes the algorithm's default, which is eps_clip unless its paper says otherwise."""
        ...

    @property
    def eps_clip_c(self) -> float | None:
        """Dual clip (arXiv:1912.09729 eq. 5), above 1; None is off."""
        ...

    @property
    def kl_coef(self) -> float:
        """Weight of the token KL in the reward."""
        ...

    @property
    def kl_loss_type(self) -> KlKind:
        """KL estimator, for the reward and for the loss."""
        ...

    @property
    def use_kl_loss(self) -> bool:
        """Whether KL to the reference is a term of the loss."""
        ...

    @property
    def kl_loss_coef(self) -> float:
        """Weight of that term."""
        ...

    @property
    def use_unbiased_kl(self) -> bool:
        """Whether the KL term is weighted with the live ratio."""
        ...

    @property
    def entropy_coef(self) -> float:
        """Weight of the entropy bonus."""
        ...

    @property
    def gamma(self) -> float:
        """Discount per response token."""
        ...

    @property
    def normalize_advantages(self) -> bool:
        """Whether advantages are whitened over the whole batch."""
        ...

    @property
    def rewards_normalization(self) -> bool:
        """Whether rewards get the algorithm's group baseline."""
        ...

    @property
    def grpo_std_normalization(self) -> bool:
        """Whether group rewards are divided by their standard deviation."""
        ...

    @property
    def use_rollout_logprobs(self) -> bool:
        """Whether the engine's log-probs are the old policy of the ratio."""
        ...

    @property
    def use_tis(self) -> bool:
        """Whether losses are weighted by trainer over engine probability."""
        ...

    @property
    def tis_clip(self) -> float:
        """Upper bound of that weight."""
        ...

    @property
    def tis_clip_low(self) -> float:
        """Lower bound of that weight."""
        ...

    @property
    def tis_mode(self) -> TisMode:
        """What happens outside the bounds."""
        ...

    @property
    def tis_level(self) -> TisLevel:
        """What the weight is a ratio of: a token, a sequence, or a sequence's geometric mean."""
        ...

    @property
    def tis_veto(self) -> float | None:
        """A sequence with any token ratio below this is dropped; None is off."""
        ...

    @property
    def use_opsm(self) -> bool:
        """Whether off-policy sequences with a negative advantage are masked."""
        ...

    @property
    def opsm_delta(self) -> float:
        """Mean log-ratio from which a sequence counts as off-policy."""
        ...

    @property
    def calculate_per_token_loss(self) -> bool:
        """Whether the loss is a mean over tokens instead of a mean over rollouts of means over tokens."""
        ...

    @property
    def loss_constant_len(self) -> int | None:
        """Constant token denominator of each rollout (Dr. GRPO)."""
        ...

    @property
    def overlong_buffer_len(self) -> int | None:
        """Length of DAPO's soft penalty zone at the end of the response budget; None is off."""
        ...

    @property
    def overlong_penalty_factor(self) -> float:
        """Largest soft over-long penalty."""
        ...
