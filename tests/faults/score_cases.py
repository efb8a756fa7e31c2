"""All cases of the score of diagnoses: faults, and settings that are healthy."""

from __future__ import annotations

from faults import (
    score_agents,
    score_blind,
    score_doctor,
    score_folders,
    score_healthy,
    score_messages,
    score_refusals,
    score_reports,
    score_runs,
    score_seams,
    score_strangers,
)

OF_FAULTS = (score_doctor, score_seams, score_refusals, score_runs, score_reports, score_messages, score_folders)
FAULTS = [*(each for module in OF_FAULTS for each in module.CASES), *score_strangers.FAULTS, *score_blind.FAULTS]
FAULTS += score_agents.CASES
SETTINGS = [
    *score_healthy.CASES,
    *score_refusals.HEALTHY,
    *score_messages.NOISY,
    *score_strangers.ODD,
    *score_blind.HEALTHY,
]
