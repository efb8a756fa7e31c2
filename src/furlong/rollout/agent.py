"""The policy that a generate function calls. This module does not import torch: modules of users import it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from furlong.errors import RolloutError

if TYPE_CHECKING:
    from furlong.rollout.policy import Policy

current: ContextVar[Policy] = ContextVar("furlong_policy")


def policy() -> Policy:
    """Return the policy of the current rollout. Raises RolloutError outside a custom generate function."""
    try:
        return current.get()
    except LookupError:
        raise RolloutError("furlong.policy() was called outside a custom generate function") from None
