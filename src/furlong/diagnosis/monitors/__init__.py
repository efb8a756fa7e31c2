"""Monitors: functions that check a run's steps and events while it runs. Each module lists its own in `MONITORS`."""

from __future__ import annotations

from furlong.diagnosis.monitors import agent_monitors, machine_monitors, numeric_monitors, rollout_monitors
from furlong.diagnosis.monitors.monitor import EventMonitor, StepMonitor

MONITORS: tuple[StepMonitor | EventMonitor, ...] = (
    *numeric_monitors.MONITORS,
    *rollout_monitors.MONITORS,
    *agent_monitors.MONITORS,
    *machine_monitors.MONITORS,
)
