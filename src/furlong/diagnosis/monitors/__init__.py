"""Monitors: functions that check a run's steps and events while it runs, one row each in `MONITORS`."""

from __future__ import annotations

from furlong.diagnosis.monitors import agent_monitors as agents
from furlong.diagnosis.monitors import machine_monitors as machines
from furlong.diagnosis.monitors import numeric_monitors as numbers
from furlong.diagnosis.monitors import rollout_monitors as rollouts
from furlong.diagnosis.monitors.monitor import EventMonitor, StepMonitor

MONITORS: tuple[StepMonitor | EventMonitor, ...] = (
    StepMonitor("TPL03", numbers.unlikely_responses),
    StepMonitor("STOP02", rollouts.truncation),
    StepMonitor("NUM01", numbers.reference_kl, again=10),
    StepMonitor("NUM02", numbers.engine_mismatch, again=3),
    StepMonitor("NUM03", numbers.gradient, again=10),
    StepMonitor("NUM05", numbers.expert_routing, again=2),
    StepMonitor("REW02", rollouts.rewards_without_spread, again=4),
    StepMonitor("REW03", rollouts.failed_rewards, again=5),
    StepMonitor("REW04", rollouts.reward_wait, again=1.5),
    StepMonitor("HOOK01", rollouts.failed_generation, again=5),
    StepMonitor("HOOK02", rollouts.blocking_generation, again=1.5),
    StepMonitor("DATA03", rollouts.data_wait, again=2),
    StepMonitor("ASYNC01", rollouts.staleness, again=2),
    StepMonitor("ASYNC01", numbers.policy_drift, again=2),
    StepMonitor("TOOL01", rollouts.tool_output, again=5),
    StepMonitor("TOOL02", rollouts.full_context, again=2),
    StepMonitor("AGT01", agents.encoded_again, again=5),
    StepMonitor("AGT02", agents.forks, again=2),
    StepMonitor("AGT03", agents.rewritten_history, again=5),
    StepMonitor("AGT04", agents.prefix_hits, again=1.5),
    StepMonitor("AGT05", rollouts.blocking_environment, again=1.5),
    StepMonitor("AGT06", agents.lost_sandboxes, again=2),
    StepMonitor("AGT07", agents.silent_agents, again=5),
    StepMonitor("AGT08", agents.ended_environments, again=2),
    StepMonitor("ENG04", machines.uneven_load, again=2),
    StepMonitor("SYNC01", machines.slow_weight_update, again=2),
    StepMonitor("MEM03", machines.retained_memory, again=1.5),
    StepMonitor("MEM04", machines.host_memory, again=1.2),
    EventMonitor("SYNC01", "weight_update_timeout", machines.weight_update_timeout),
    EventMonitor("SYNC02", "weights_compared", machines.unchanged_parameters, again=2),
    EventMonitor("RANK01", "ranks_timed", machines.slow_rank, again=1.5),
    EventMonitor("ENG03", "engine_lost", machines.engine_lost, again=2),
    EventMonitor("ENG06", "engine_silent", machines.engine_silent, again=4),
    EventMonitor("GPU02", "placement_waiting", machines.placement_wait, again=4),
    EventMonitor("HOOK02", "blocked", machines.blocked_loop),
    EventMonitor("HANG01", "hang", machines.hang, again=1),
    EventMonitor("ASYNC02", "worker_died", machines.worker_died),
)
