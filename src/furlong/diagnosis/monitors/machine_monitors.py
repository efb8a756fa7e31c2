"""Monitors of engines, weight updates, memory and the cluster; most of them check events."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median

from furlong.core.text import abbreviate
from furlong.core.transports import transport_spec
from furlong.diagnosis.monitors.monitor import Alert, Event, EventMonitor, RunFacts, StepContext, StepMonitor, alert
from furlong.errors import ENGINE_HANGS, ENGINE_UNANSWERED

LOAD_RATIO, LOAD_ROWS = 2.0, 5  # running requests of the busiest engine over the mean, over this many steps
SLOW_SYNC_SHARE, SLOW_SYNC_S, SLOW_SYNC_ROWS = 0.5, 10.0, 3  # of a step, in seconds, over this many steps
UNCHANGED_UPDATES = 4  # in a row; experts without tokens stay unchanged for one or two
KEPT_SHARE = 0.05  # of the device's memory: a CUDA context and NCCL take 1 to 2 GiB
# Of the device. A trainer that recomputes activations as needed leaves 4 % free (models.model_facts), which includes
# its CUDA context.
FULL = 0.97
STATIC_SHARE = 0.95  # of the device, at most, for an engine's weights and cache
HOST_ROWS, HOST_GROWTH, HOST_WINDOWS = 32, 0.1, 3  # steps, growth over them, and how many such windows to extrapolate
KEPT_GROWTH = 1.5  # times what was kept at first
SLOW_ROLLOUTS = 8  # a rank must be slow in all of these but one
SLOW_RANK, SLOW_RANK_SHARE, SLOW_RANK_S = 1.5, 0.05, 1.0  # times the others; share of the time lost; seconds in total
# Vectors change by less than bfloat16 can represent for many steps: half a unit in the last place of 1.0 is 0.004.
SMALL = re.compile(r"norm|bias|\.A_log$|\.D$|e_score_correction")
OOM_KILLER = "if a signal ended it, check for the out-of-memory killer (`dmesg | grep -i oom`)"

ENGINE_HANGS_CAUSE = (
    "One of its processes is stuck: stopped, waiting for another process, or in a kernel that does not end."
)


def uneven_load(now: StepContext) -> Alert | None:
    """ENG04: running requests of the busiest engine against the mean."""
    most, mean = now.recent("engine/requests/max", LOAD_ROWS), now.recent("engine/requests/mean", LOAD_ROWS)
    if len(most) < LOAD_ROWS or len(mean) < LOAD_ROWS or sum(mean) == 0:
        return None
    ratio = sum(most) / sum(mean)
    if ratio <= LOAD_RATIO:
        return None
    return now.alert(
        "ENG04",
        f"the busiest engine runs {ratio:.1f} times as many requests as the average engine, over {LOAD_ROWS} steps",
        evidence={"ratio": ratio, "max": most[-1], "mean": mean[-1]},
        level=ratio,
    )


def slow_weight_update(now: StepContext) -> Alert | None:
    """SYNC01: a weight update that takes most of a step."""
    sync_s = now.recent("perf/update_weights_time", SLOW_SYNC_ROWS)
    step_s = now.recent("perf/step_time", SLOW_SYNC_ROWS)
    if len(sync_s) < SLOW_SYNC_ROWS or len(step_s) < SLOW_SYNC_ROWS:
        return None
    share, mean_s = sum(sync_s) / sum(step_s), sum(sync_s) / len(sync_s)
    if share < SLOW_SYNC_SHARE or mean_s < SLOW_SYNC_S:
        return None
    transport = now.facts.transport
    remedy = transport_spec(transport).slow_fix
    if not now.facts.config.cluster.offload_rollout:  # else engines need the weights after every rollout
        remedy = f"raise --update-weights-interval; {remedy}"
    return now.alert(
        "SYNC01",
        f"the weight update takes {mean_s:.1f} s, {share:.0%} of a step",
        cause=f"The transport ({transport}) is slow for these weights, or updates are too frequent.",
        remedy=remedy,
        severity="warning",
        evidence={"seconds": mean_s, "share": share},
        level=share,
    )


def weight_update_timeout(event: Event, before: Sequence[Event], facts: RunFacts) -> Alert | None:
    """SYNC01: the event `weight_update_timeout` {version, seconds, bucket, transport, missing}."""
    del before
    missing = ", ".join(map(str, event.get("missing", ()))) or "some engines"
    bucket = event.get("bucket")
    part = "they" if bucket is None else f"bucket {bucket}"
    transport = str(event.get("transport") or facts.transport)
    spec = transport_spec(transport)
    return alert(
        "SYNC01",
        f"weights of version {event.get('version')} by {transport}: {part} did not arrive within "
        f"{event.get('seconds')} s; missing: {missing}",
        cause=spec.timeout_cause,
        remedy="check that the engine is alive (ENG06) and has enough time (--update-weight-timeout); "
        + spec.timeout_fix,
        evidence=_fields(event),
    )


def unchanged_parameters(event: Event, before: Sequence[Event], facts: RunFacts) -> Alert | None:
    """SYNC02: the event `weights_compared` {changed, unchanged: names}: matrices that never change in training."""
    events = [*before, event][-UNCHANGED_UPDATES:]
    if len(events) < UNCHANGED_UPDATES or any(not e.get("changed") for e in events):
        return None
    unchanged = set.intersection(*(set(map(str, e["unchanged"])) for e in events))
    names = sorted(name for name in unchanged if not SMALL.search(name) and _is_trained(name, facts))
    if not names:
        return None
    return alert(
        "SYNC02",
        f"version {event['version']}: {len(names)} of {event['tensors']} tensors did not change in "
        f"{UNCHANGED_UPDATES} weight updates while others did: {abbreviate(names, 3)}",
        cause="Candidates: the model does not use them, they are all zero (`furlong check`), or a custom function "
        "detaches them.",
        remedy="list them in --freeze-params-name-list if that is intended; otherwise check what uses them",
        severity="warning",
        evidence={"version": event["version"], "tensors": names[:16], "count": len(names)},
        level=len(names),
    )


def _is_trained(name: str, facts: RunFacts) -> bool:
    train = facts.config.train
    if any(re.search(pattern, name) for pattern in train.freeze_params_name_list or ()):
        return False
    only = train.only_train_params_name_list
    return not only or any(re.search(pattern, name) for pattern in only)


def retained_memory(now: StepContext) -> Alert | None:
    """MEM03: memory that engine or trainer keeps while the other uses the device, if it grows or leaves too little.

    Metrics, as shares of the device: `memory/engine_kept_frac` during training, after the engine released its memory
    (context, workspaces, buffers and graphs stay); `memory/trainer_peak_frac`, the trainer's tensors at their peak;
    `memory/trainer_kept_frac` during generation, of which an offloaded trainer keeps a few MiB.
    """
    kept, peak = now.row.get("memory/engine_kept_frac"), now.row.get("memory/trainer_peak_frac", 0.0)
    first, grows = _first(now, "memory/engine_kept_frac")
    if kept is not None and (grows or kept + peak > FULL):
        return now.alert(
            "MEM03",
            f"the engine keeps {kept:.1%} of the device's memory during training"
            + (f" ({first:.1%} at first)" if grows else "")
            + (f"; the trainer needs up to {peak:.1%} of it" if peak else ""),
            cause="An engine releases weights and cache, but not workspaces, buffers and CUDA graphs, which grow with "
            "the number of concurrent requests, not with --sglang-mem-fraction-static.",
            remedy="run fewer requests at once: --sglang-max-running-requests 128 and --sglang-cuda-graph-max-bs 128, "
            "or --sglang-server-concurrency 128; or let the trainer use less: a lower --max-tokens-per-gpu, "
            "--recompute-activations, --offload-optimizer-states or shorter samples",
            severity="error" if grows else "warning",
            evidence={"part": "engine", "kept_frac": kept, "first": first, "peak_frac": peak},
            level=kept,
            kind="engine",
        )
    kept = now.row.get("memory/trainer_kept_frac")
    first, grows = _first(now, "memory/trainer_kept_frac")
    if kept is None or kept <= KEPT_SHARE:
        return None
    return now.alert(
        "MEM03",
        f"the trainer keeps {kept:.1%} of the device's memory during generation"
        + (f" ({first:.1%} at first)" if grows else ""),
        cause="Tensors that do not belong to the trainer stay on the device: those of a custom function.",
        remedy="release them at the end of a step; until then --sglang-mem-fraction-static "
        f"{math.floor(100 * max(STATIC_SHARE - kept, 0)) / 100:g} leaves room for them",
        severity="error" if grows else "warning",
        evidence={"part": "trainer", "kept_frac": kept, "first": first},
        level=kept,
        kind="trainer",
    )


def _first(now: StepContext, name: str) -> tuple[float, bool]:
    """Return the first value of a share of memory, and whether it has grown by half to more than `KEPT_SHARE`."""
    kept = now.row.get(name, 0.0)
    first = next((row[name] for row in now.history if name in row), kept)
    return first, kept > KEPT_SHARE and kept > KEPT_GROWTH * first


def host_memory(now: StepContext) -> Alert | None:
    """MEM04: the machine's memory fills up from step to step."""
    used = now.recent("perf/host_memory_frac", HOST_ROWS)
    if len(used) < HOST_ROWS:
        return None
    quarter = HOST_ROWS // 4
    first, last = sum(used[:quarter]) / quarter, sum(used[-quarter:]) / quarter
    per_step = (last - first) / (HOST_ROWS - quarter)
    if last - first < HOST_GROWTH or per_step * HOST_ROWS * HOST_WINDOWS < 1 - last:
        return None
    left = int((1 - used[-1]) / per_step)
    return now.alert(
        "MEM04",
        f"{used[-1]:.0%} of the machine's memory is in use, up from {used[0]:.0%} "
        f"{HOST_ROWS - 1} steps earlier; at this rate it is full in {left} steps",
        evidence={"used": used[-1], "before": used[0], "steps_left": left},
        level=used[-1],
    )


def slow_rank(event: Event, before: Sequence[Event], facts: RunFacts) -> Alert | None:
    """RANK01: the event `ranks_timed` {rollout, seconds, stages, layers_s, per_cost_s, slowest, place} of a trainer.

    A rank is slow if its layers take longer than those of the other ranks of its pipeline stage, and not because it has
    more work. `layers_s` and `per_cost_s` have one number per rank: seconds, and seconds for the same work.
    """
    del facts
    events = [*before, event][-SLOW_ROLLOUTS:]
    count, wall_s = len(event["layers_s"]), sum(e["seconds"] for e in events)
    if len(events) < SLOW_ROLLOUTS or wall_s < SLOW_RANK_S or any(len(e["layers_s"]) != count for e in events):
        return None
    by_time = [_against_peers(e["layers_s"], event["stages"]) for e in events]
    by_work = [_against_peers(e["per_cost_s"], event["stages"]) for e in events]
    ratios = [sorted(min(t[rank], w[rank]) for t, w in zip(by_time, by_work, strict=True)) for rank in range(count)]
    slow = [rank for rank, of_rank in enumerate(ratios) if of_rank[1] >= SLOW_RANK]  # in all rollouts but one
    if not slow:
        return None
    worst = max(slow, key=lambda rank: median(ratios[rank]))
    ratio, rank_s = median(ratios[worst]), median(e["layers_s"][worst] for e in events)
    if rank_s * (1 - 1 / ratio) * len(events) < SLOW_RANK_SHARE * wall_s:
        return None
    places = {e["slowest"]: e["place"] for e in events}
    names = abbreviate([places.get(rank, f"trainer rank {rank}") for rank in slow], 4, separator="; ")
    return alert(
        "RANK01",
        f"rollout {event['rollout']}: the layers of {names} take {ratio:.1f} times as long as those of the other "
        f"ranks for the same work, over {SLOW_ROLLOUTS} rollouts ({rank_s:.3g} s of {wall_s / len(events):.3g} s "
        f"per rollout, forward passes only); all {count} ranks wait for it in every layer",
        evidence={"rollout": event["rollout"], "ranks": slow, "ratio": ratio, "seconds": rank_s},
        level=ratio,
    )


def _against_peers(values: Sequence[float], stages: int) -> list[float]:
    size = len(values) // stages
    peers = [sorted(values[start : start + size]) for start in range(0, len(values), size)]
    medians = [group[(len(group) - 1) // 2] for group in peers]
    return [value / medians[rank // size] if medians[rank // size] else 1.0 for rank, value in enumerate(values)]


def engine_lost(event: Event, before: Sequence[Event], facts: RunFacts) -> Alert | None:
    """ENG03: the event `engine_lost` {engine, url, reason, code}."""
    count, restarts = len(before) + 1, facts.config.fault.use_fault_tolerance
    times = f" (loss {count} of an engine so far)" if count > 1 else ""
    name = f"engine {event.get('engine')} at {event.get('url')}"
    reason = event.get("reason")
    cause, remedies = None, ["read the end of its log under logs/"]
    if event.get("code") == ENGINE_HANGS:
        cause = ENGINE_HANGS_CAUSE
        remedies.append("if it was only busy, raise the limit named above or --rollout-health-check-timeout")
    elif event.get("code") == ENGINE_UNANSWERED:
        cause = "It is running but did not answer; whether it did what was requested is unknown."
    elif facts.config.cluster.engine == "sglang":
        remedies.append("lower --sglang-mem-fraction-static or --rollout-batch-size")
        remedies.append("use --sglang-disable-cuda-graph to find the cause")
    else:
        remedies.append(OOM_KILLER)
    if not restarts:
        remedies.append("use --use-fault-tolerance to restart engines")
    return alert(
        "ENG03",
        f"{name} was lost: {reason}{times}{'; it is being restarted' if restarts else ''}",
        remedy="; ".join(remedies),
        cause=cause,
        severity="warning" if restarts else "error",
        evidence=_fields(event) | {"lost": count},
        level=count,
    )


def engine_silent(event: Event, before: Sequence[Event], facts: RunFacts) -> Alert | None:
    """ENG06: the event `engine_silent` {url, running, asked, seconds, health} of the engine watch."""
    del before, facts
    seconds = float(event.get("seconds", 0.0))
    return alert(
        "ENG06",
        f"the engine at {event.get('url')} has {event.get('running')} open requests and has sent no token and no "
        f"answer for {seconds:.0f} s (oldest request: {event.get('asked')}); health check: {event.get('health')}",
        evidence=_fields(event),
        level=seconds,
    )


def placement_wait(event: Event, before: Sequence[Event], facts: RunFacts) -> Alert | None:
    """GPU02: the event `placement_waiting` {seconds, asked, free, lacking}."""
    del before, facts
    return alert(
        "GPU02",
        f"the placement group has waited {event.get('seconds')} s for {event.get('asked')}; free: "
        f"{event.get('free')}" + (f" ({event['lacking']})" if event.get("lacking") else ""),
        severity="warning",
        evidence=_fields(event),
        level=float(event.get("seconds", 1.0)),
    )


def worker_died(event: Event, before: Sequence[Event], facts: RunFacts) -> Alert | None:
    """ASYNC02: the event `worker_died` {worker, error, message}: a thread or task without a waiter raised."""
    del before, facts
    return alert(
        "ASYNC02",
        f"{event.get('worker')} ended with {event.get('error')}: {event.get('message')}",
        evidence=_fields(event),
    )


def blocked_loop(event: Event, before: Sequence[Event], facts: RunFacts) -> Alert | None:
    """HOOK02: the event `blocked` {seconds, where}: a line of user code keeps the event loop from running."""
    del before, facts
    return alert(
        "HOOK02",
        f"{event.get('where')} has blocked the event loop for {event.get('seconds')} s or more; other samples and "
        "requests wait",
        evidence=_fields(event),
        kind=str(event.get("where")),
    )


def hang(event: Event, before: Sequence[Event], facts: RunFacts) -> Alert | None:
    """HANG01: the event `hang` {seconds, doing, updates_weights, report, stops, last, queues, waits, requests}."""
    del before
    last = ", ".join(f"{name} {age} s ago" for name, age in dict(event.get("last", {})).items())
    limit_s = facts.config.fault.hang_timeout
    cause = f"One part waits for another that does not answer, or it takes longer than --hang-timeout {limit_s:g}."
    remedy = (
        "raise --hang-timeout if what is named above is only slow; --reward-timeout and --generate-timeout limit what "
        "functions wait for; if responses do not end, see STOP02; if an engine "
        "does not answer, see its log"
    )
    if str(event.get("doing")).startswith("functions wait"):
        cause = "A function waits for something that does not answer."
        remedy = (
            "fix the function named above, or what it waits for; a reward is abandoned after --reward-timeout, a "
            "response after --generate-timeout"
        )
    if event.get("updates_weights"):
        remedy = f"weights do not arrive (SYNC01): {transport_spec(facts.transport).timeout_fix}"
    return alert(
        "HANG01",
        f"no progress for {event.get('seconds')} s: {event.get('doing')} (last: {last})",
        cause=cause,
        remedy=f"{remedy}; all stack traces are in {event.get('report')}"
        + ("" if event.get("stops") else "; --on-hang stop ends such a run"),
        evidence=_fields(event),
    )


def _fields(event: Event) -> dict[str, object]:
    return {name: value for name, value in event.items() if name not in ("time", "event")}


MONITORS = (
    StepMonitor("ENG04", uneven_load, again=2),
    StepMonitor("SYNC01", slow_weight_update, again=2),
    StepMonitor("MEM03", retained_memory, again=1.5),
    StepMonitor("MEM04", host_memory, again=1.2),
    EventMonitor("SYNC01", "weight_update_timeout", weight_update_timeout),
    EventMonitor("SYNC02", "weights_compared", unchanged_parameters, again=2),
    EventMonitor("RANK01", "ranks_timed", slow_rank, again=1.5),
    EventMonitor("ENG03", "engine_lost", engine_lost, again=2),
    EventMonitor("ENG06", "engine_silent", engine_silent, again=4),
    EventMonitor("GPU02", "placement_waiting", placement_wait, again=4),
    EventMonitor("HOOK02", "blocked", blocked_loop),
    EventMonitor("HANG01", "hang", hang, again=1),
    EventMonitor("ASYNC02", "worker_died", worker_died),
)
