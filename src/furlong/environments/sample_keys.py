"""Keys of a sample's metadata that environments, rubrics and roles write."""

from __future__ import annotations

ENVIRONMENT = "environment"  # name of the environment
STEP_REWARDS = "step_rewards"  # rewards that the environment gave, by turn
INFO = "info"  # what the steps of the environment recorded
PARTS = "rewards"  # value of each function of the rubric
FAILED_PARTS = "rewards_failed"  # functions of the rubric that failed, with the reason
AGENT_ERROR = "agent_error"  # exception of an agent whose episode is scored
