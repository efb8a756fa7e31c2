"""Monitors of agents: their histories, conversations and sandboxes."""

from __future__ import annotations

from furlong.diagnosis.monitors.monitor import Alert, StepContext, StepMonitor

FORKED = 0.25  # of the turns after the first; agents that compact their history fork now and then
LOST, LOST_LEAST = 0.01, 2  # of the samples, and at least: one sandbox may fail
REISSUES = ("reissued", "infra", "process_ended")
SILENT_WARNING = 0.01  # of the samples


def encoded_again(now: StepContext) -> Alert | None:
    """AGT01: agents that send token ids of text that they decoded before."""
    turns = now.row.get("session/retokenised", 0.0)
    if not turns:
        return None
    return now.alert(
        "AGT01",
        f"in {turns:.0f} requests the ids of earlier answers are not those that were sampled, although their text is "
        "the same; each began a branch",
        evidence={"requests": turns},
        level=turns,
    )


def forks(now: StepContext) -> Alert | None:
    """AGT02: conversations whose earlier messages change."""
    share, leaves = now.row.get("session/forked_frac", 0.0), now.row.get("session/leaves", 1.0)
    if share < FORKED or now.row.get("session/retokenised", 0.0):
        return None
    return now.alert(
        "AGT02",
        f"{share:.0%} of the turns after the first repeat their conversation with changed messages; an episode has "
        f"{leaves:.1f} samples on average",
        evidence={"share": share, "leaves": leaves},
        level=share,
    )


def rewritten_history(now: StepContext) -> Alert | None:
    """AGT03: a template that renders the messages of a conversation otherwise than before."""
    turns = now.row.get("session/branch_reason/stripped", 0.0)
    if not turns or now.facts.config.session.session_history != "keep":
        return None
    return now.alert(
        "AGT03",
        f"{turns:.0f} turns continue a conversation whose text the chat template renders differently now; each began "
        "a branch",
        evidence={"turns": turns, "leaves": now.row.get("session/leaves")},
        level=turns,
    )


def lost_episodes(now: StepContext) -> Alert | None:
    """AGT06: episodes that InfraError, or the end of their process, ended or started over."""
    reissued, lost, ended = (now.row.get(f"rollout/episodes/{name}", 0.0) for name in REISSUES)
    share = reissued / max(now.facts.num_samples, 1)  # those that are lost were started over, too
    if not ended and (reissued < LOST_LEAST or share < LOST):
        return None
    return now.alert(
        "AGT06",
        f"{reissued:.0f} of about {now.facts.num_samples} episodes lost a sandbox, a server or their process "
        f"({ended:.0f}) and were started over; {lost:.0f} of them lost it again and are left out of the batch",
        severity="info" if reissued < LOST_LEAST or share < LOST else "warning",
        evidence={"reissued": reissued, "lost": lost, "ended": ended, "share": share},
        level=share,
    )


def silent_agents(now: StepContext) -> Alert | None:
    """AGT07: agents that ended without an answer of the policy."""
    silent = now.row.get("rollout/episodes/silent", 0.0)
    share = silent / max(now.facts.num_samples, 1)
    if not silent:
        return None
    return now.alert(
        "AGT07",
        f"{silent:.0f} of about {now.facts.num_samples} agents ended without an answer of the policy; their samples "
        "are left out of the batch",
        severity="warning" if share >= SILENT_WARNING else "info",
        evidence={"silent": silent, "share": share},
        level=share,
    )


MONITORS = (
    StepMonitor("AGT01", encoded_again, again=5),
    StepMonitor("AGT02", forks, again=2),
    StepMonitor("AGT03", rewritten_history, again=5),
    StepMonitor("AGT06", lost_episodes, again=2),
    StepMonitor("AGT07", silent_agents, again=5),
)
