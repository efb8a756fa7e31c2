"""Monitors of engines, weights on their way, memory and the cluster: most of them read events."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median

from furlong.core.catalogue import diagnosis
from furlong.core.text import abbreviate
from furlong.diagnosis.monitors.monitor import Event, Found, Now
from furlong.diagnosis.monitors.run_facts import Setting
from furlong.diagnosis.transport_signs import ways_of

LOAD_RATIO, LOAD_ROWS = 2.0, 5  # running requests of the busiest engine over the mean, over so many steps
SLOW_SYNC_SHARE, SLOW_SYNC_S, SLOW_SYNC_ROWS = 0.5, 10.0, 3  # of a step, and seconds
UNCHANGED_PUBLICATIONS = 4  # in a row; experts without tokens rest for one or two
KEPT_SHARE = 0.05  # of the device's memory: a CUDA context and NCCL take 1 to 2 GiB
# Of the device. A trainer that recomputes by what is free leaves 4 % (models.working_memory), its CUDA context within.
FULL = 0.97
GIVEN = 0.95  # to an engine's weights and cache at most
HOST_ROWS, HOST_GROWTH, HOST_WINDOWS = 32, 0.1, 3  # steps looked at, growth over them, and how far ahead it is drawn
KEPT_GROWTH = 1.5  # of what was kept at first
SLOW_ROLLOUTS = 8  # that are looked at; a rank has to be slow in all of them but one
SLOW_RANK, SLOW_RANK_SHARE, SLOW_RANK_S = 1.5, 0.05, 1.0  # times the others; what is lost of the time; seconds of it
# Vectors change below the precision of bfloat16 for many steps: half a step of it at 1.0 is 0.004.
BROKEN = re.compile(r"\bgave no answer\b")  # it runs, and closed the connection, or says that it is not there
HANGS = re.compile(r"\bhangs\b|generates nothing")  # in why an engine was lost: it runs, and does not answer
SMALL = re.compile(r"norm|bias|\.A_log$|\.D$|e_score_correction")


def uneven_load(now: Now) -> Found | None:
    """ENG04: running requests per engine, the largest against the mean."""
    most, mean = now.recent("engine/requests/max", LOAD_ROWS), now.recent("engine/requests/mean", LOAD_ROWS)
    if len(most) < LOAD_ROWS or len(mean) < LOAD_ROWS or sum(mean) == 0:
        return None
    ratio = sum(most) / sum(mean)
    if ratio <= LOAD_RATIO:
        return None
    return Found(
        diagnosis(
            "ENG04",
            f"step {now.step}: the busiest engine runs {ratio:.1f} times the mean of all, over {LOAD_ROWS} steps",
            remedy="--sglang-router-strategy round_robin, or more engines with a smaller --rollout-num-gpus-per-engine",
            evidence={"step": now.step, "ratio": ratio, "max": most[-1], "mean": mean[-1]},
        ),
        ratio,
    )


def slow_publication(now: Now) -> Found | None:
    """SYNC01: a publication that takes most of a step."""
    sync_s = now.recent("perf/update_weights_time", SLOW_SYNC_ROWS)
    step_s = now.recent("perf/step_time", SLOW_SYNC_ROWS)
    if len(sync_s) < SLOW_SYNC_ROWS or len(step_s) < SLOW_SYNC_ROWS:
        return None
    share, mean_s = sum(sync_s) / sum(step_s), sum(sync_s) / len(sync_s)
    faster = ways_of(now.setting.transport).slow
    if share < SLOW_SYNC_SHARE or mean_s < SLOW_SYNC_S:
        return None
    return Found(
        diagnosis(
            "SYNC01",
            f"step {now.step}: publishing weights takes {mean_s:.1f} s, {share:.0%} of a step",
            cause=f"What weights go by ({now.setting.transport}) is slow for them, or they go too often.",
            remedy=f"raise --update-weights-interval; {faster}" if now.setting.may_publish_less else faster,
            severity="warning",
            evidence={"step": now.step, "seconds": mean_s, "share": share},
        ),
        share,
    )


def publication_timed_out(event: Event, before: Sequence[Event], setting: Setting) -> Found | None:
    """SYNC01: the event `publication_timeout` {version, seconds, bucket, transport, missing}."""
    del before
    missing = ", ".join(map(str, event.get("missing", ()))) or "some"
    bucket = event.get("bucket")
    part = "it" if bucket is None else f"bucket {bucket}"
    transport = str(event.get("transport") or setting.transport)
    ways = ways_of(transport)
    return Found(
        diagnosis(
            "SYNC01",
            f"publication of version {event.get('version')} by {transport}: {part} did not arrive within "
            f"{event.get('seconds')} s; not there: {missing}",
            cause=ways.cause,
            remedy="look whether that engine lives (ENG06) and has the time (--update-weight-timeout); " + ways.late,
            evidence=_fields(event),
        )
    )


def unchanged_parameters(event: Event, before: Sequence[Event], setting: Setting) -> Found | None:
    """SYNC02: the event `weights_compared` {changed, unchanged: names}: matrices that rest while others are trained."""
    events = [*before, event][-UNCHANGED_PUBLICATIONS:]
    if len(events) < UNCHANGED_PUBLICATIONS or any(not e.get("changed") for e in events):
        return None
    still = set.intersection(*(set(map(str, e["unchanged"])) for e in events))
    names = sorted(name for name in still if not SMALL.search(name) and _is_trained(name, setting))
    if not names:
        return None
    shown = abbreviate(names, 3)
    return Found(
        diagnosis(
            "SYNC02",
            f"version {event['version']}: {len(names)} of {event['tensors']} tensors have not changed in "
            f"{UNCHANGED_PUBLICATIONS} publications while others have: {shown}",
            cause="They get no gradient: the model does not use them, or a function of yours detaches them.",
            remedy="name them in --freeze-params-name-list if that is meant; else check what uses them",
            severity="warning",
            evidence={"version": event["version"], "tensors": names[:16], "count": len(names)},
        ),
        len(names),
    )


def _is_trained(name: str, setting: Setting) -> bool:
    if any(re.search(pattern, name) for pattern in setting.frozen_parameters):
        return False
    wanted = setting.trained_parameters
    return not wanted or any(re.search(pattern, name) for pattern in wanted)


def memory_of_the_other(now: Now) -> Found | None:
    """MEM03: what a part keeps of the device while the other has it, where that grows or the other gets too near to it.

    Metrics, as shares of the device: `memory/engine_kept_frac` in training, after the engine released all;
    `memory/trainer_peak_frac`, the most that the trainer's tensors took; `memory/trainer_kept_frac` in generation.
    """
    return _engine_in_training(now) or _trainer_in_generation(now)


def _engine_in_training(now: Now) -> Found | None:
    """An engine's CUDA context, its workspaces, buffers and graphs outlive the release of weights and cache."""
    name = "memory/engine_kept_frac"
    kept, peak = now.row.get(name), now.row.get("memory/trainer_peak_frac", 0.0)
    if kept is None:
        return None
    first = _first(now, name, kept)
    grows = kept > KEPT_SHARE and kept > KEPT_GROWTH * first
    if not grows and kept + peak <= FULL:
        return None
    return Found(
        diagnosis(
            "MEM03",
            f"step {now.step}: the engine keeps {kept:.1%} of the device's memory during training"
            + (f", at first it was {first:.1%}" if grows else "")
            + (f"; the trainer takes up to {peak:.1%} beside it" if peak else ""),
            cause="Workspaces, buffers and CUDA graphs stay where an engine releases weights and cache; they grow with "
            "the number of requests that run at once, not with --sglang-mem-fraction-static.",
            remedy="fewer requests at once make the engine keep less: --sglang-max-running-requests 128 and "
            "--sglang-cuda-graph-max-bs 128, or --sglang-server-concurrency 128; a lower --max-tokens-per-gpu, "
            "--recompute-activations, --offload-optimizer-states or shorter samples make the trainer take less",
            severity="error" if grows else "warning",
            evidence={"step": now.step, "part": "engine", "kept_frac": kept, "first": first, "peak_frac": peak},
        ),
        kept,
        "engine",
    )


def _trainer_in_generation(now: Now) -> Found | None:
    """A trainer that sleeps has its tensors on the host; what is left is a few MiB of a communicator."""
    name = "memory/trainer_kept_frac"
    kept = now.row.get(name)
    if kept is None or kept <= KEPT_SHARE:
        return None
    first = _first(now, name, kept)
    grows = kept > KEPT_GROWTH * first
    return Found(
        diagnosis(
            "MEM03",
            f"step {now.step}: the trainer keeps {kept:.1%} of the device's memory during generation"
            + (f", at first it was {first:.1%}" if grows else ""),
            cause="Tensors that the trainer does not know as its own stay on the device: those of a custom function.",
            remedy=f"let go of them at the end of a step; until then --sglang-mem-fraction-static "
            f"{math.floor(100 * max(GIVEN - kept, 0)) / 100:g} leaves them room",
            severity="error" if grows else "warning",
            evidence={"step": now.step, "part": "trainer", "kept_frac": kept, "first": first},
        ),
        kept,
        "trainer",
    )


def _first(now: Now, name: str, value: float) -> float:
    return next((row[name] for row in now.history if name in row), value)


def host_memory(now: Now) -> Found | None:
    """MEM04: the share of the machine's memory in use, which grows from step to step until nothing is left."""
    used = now.recent("perf/host_memory_frac", HOST_ROWS)
    if len(used) < HOST_ROWS:
        return None
    quarter = HOST_ROWS // 4
    first, last = sum(used[:quarter]) / quarter, sum(used[-quarter:]) / quarter
    a_step = (last - first) / (HOST_ROWS - quarter)
    if last - first < HOST_GROWTH or a_step * HOST_ROWS * HOST_WINDOWS < 1 - last:
        return None
    left = int((1 - used[-1]) / a_step)
    return Found(
        diagnosis(
            "MEM04",
            f"step {now.step}: {used[-1]:.0%} of the machine's memory is in use, {used[0]:.0%} {HOST_ROWS - 1} steps "
            f"before; at this pace it is full in {left} steps",
            remedy="look which process grows (`ps aux --sort=-rss | head`); save often (--save-interval), so that the "
            "run can go on with --load; bound what your own functions keep",
            evidence={"step": now.step, "used": used[-1], "before": used[0], "steps_left": left},
        ),
        used[-1],
    )


def slow_rank(event: Event, before: Sequence[Event], setting: Setting) -> Found | None:
    """RANK01: the event `ranks_timed` {rollout, seconds, stages, layers_s, per_cost_s, slowest, place} of a trainer.

    A rank is slow if its layers take longer than those of its pipeline stage's other ranks, and not because it was
    given more to do. `layers_s` and `per_cost_s` have a number for each rank: seconds, and seconds for the same work.
    """
    del setting
    events = [*before, event][-SLOW_ROLLOUTS:]
    count, wall_s = len(event["layers_s"]), sum(e["seconds"] for e in events)
    if len(events) < SLOW_ROLLOUTS or wall_s < SLOW_RANK_S or any(len(e["layers_s"]) != count for e in events):
        return None
    taken = [_against_peers(e["layers_s"], event["stages"]) for e in events]
    for_work = [_against_peers(e["per_cost_s"], event["stages"]) for e in events]
    ratios = [sorted(min(t[rank], w[rank]) for t, w in zip(taken, for_work, strict=True)) for rank in range(count)]
    slow = [rank for rank, of_rank in enumerate(ratios) if of_rank[1] >= SLOW_RANK]  # in all rollouts but one
    if not slow:
        return None
    worst = max(slow, key=lambda rank: median(ratios[rank]))
    ratio, own_s = median(ratios[worst]), median(e["layers_s"][worst] for e in events)
    if own_s * (1 - 1 / ratio) * len(events) < SLOW_RANK_SHARE * wall_s:
        return None
    places = {e["slowest"]: e["place"] for e in events}
    names = [places.get(rank, f"trainer rank {rank}") for rank in slow]
    shown = abbreviate(names, 4, separator="; ")
    return Found(
        diagnosis(
            "RANK01",
            f"rollout {event['rollout']}: the layers of {shown} take {ratio:.1f} times as long as those of other "
            f"ranks for the same work, over {SLOW_ROLLOUTS} rollouts ({own_s:.3g} s of {wall_s / len(events):.3g} s a "
            f"rollout, forward passes alone); all {count} ranks wait for it in every layer",
            remedy="look at that process and machine: `top` for others at work there, `nvidia-smi -q -d PERFORMANCE` "
            "for what slows its GPU, its limit of CPU time, threads in its log (--num-threads); leave out a machine "
            "that stays slow",
            evidence={"rollout": event["rollout"], "ranks": slow, "ratio": ratio, "seconds": own_s},
        ),
        ratio,
    )


def _against_peers(values: Sequence[float], stages: int) -> list[float]:
    """Each rank's value over the (lower) median of its pipeline stage's ranks; 1 where that is 0."""
    size = len(values) // stages
    peers = [sorted(values[start : start + size]) for start in range(0, len(values), size)]
    middle = [own[(len(own) - 1) // 2] for own in peers]
    return [value / middle[rank // size] if middle[rank // size] else 1.0 for rank, value in enumerate(values)]


def engine_lost(event: Event, before: Sequence[Event], setting: Setting) -> Found | None:
    """ENG03: the event `engine_lost` {engine, url, why} of a fleet."""
    count = len(before) + 1
    times = f" (engines were lost {count} times so far)" if count > 1 else ""
    again = "; it is started again" if setting.restarts_engines else ""
    who = f"engine {event.get('engine')} at {event.get('url')}"
    told = str(event.get("why")).partition(";")[0]  # without the end of its log
    why = re.sub(rf"^{re.escape(who)}( \([^)]*\))?:? ", "", told)
    is_hung, cause = HANGS.search(why) is not None, None
    ways = ["read the end of its log under logs/"]
    if is_hung:
        cause = "A process of it does not go on: it is stopped, waits for another, or a kernel of it does not end."
        ways.append("if it was only busy, raise the limit that is named or --rollout-health-check-timeout")
    elif BROKEN.search(why):
        cause = "It runs, and gave no answer to what it was asked to do; whether that was done is not known."
    elif setting.serves_with_sglang:
        ways.append("lower --sglang-mem-fraction-static or --rollout-batch-size")
        ways.append("--sglang-disable-cuda-graph to find the cause")
    else:
        ways.append("if a signal ended it, look for the out-of-memory killer (`dmesg | grep -i oom`)")
    if not setting.restarts_engines:
        ways.append("--use-fault-tolerance starts engines again")
    return Found(
        diagnosis(
            "ENG03",
            f"{who} was lost: {why}{times}{again}",
            remedy="; ".join(ways),
            cause=cause,
            severity="warning" if setting.restarts_engines else "error",
            evidence=_fields(event) | {"lost": count},
        ),
        count,
    )


def engine_silent(event: Event, before: Sequence[Event], setting: Setting) -> Found | None:
    """ENG06: the event `engine_silent` {url, running, asked, seconds, health} of the watch over engines."""
    del before, setting
    seconds = float(event.get("seconds", 0.0))
    return Found(
        diagnosis(
            "ENG06",
            f"the engine at {event.get('url')} has {event.get('running')} requests and gave no token and no answer for "
            f"{seconds:.0f} s (the oldest: {event.get('asked')}); its health check: {event.get('health')}",
            remedy="read the end of its log under logs/ and look at its process (`ps`: state T is stopped, kill -CONT "
            "wakes it; `py-spy dump` shows where it is); an engine that sleeps needs /resume_memory_occupation and "
            "/continue_generation. --use-fault-tolerance starts such an engine again by itself",
            evidence=_fields(event),
        ),
        seconds,
    )


def placement_waits(event: Event, before: Sequence[Event], setting: Setting) -> Found | None:
    """GPU02: the event `placement_waiting` {seconds, asked, free, lacking}."""
    del before, setting
    return Found(
        diagnosis(
            "GPU02",
            f"the placement group has waited for {event.get('seconds')} s: asked {event.get('asked')}, free "
            f"{event.get('free')}" + (f" ({event['lacking']})" if event.get("lacking") else ""),
            remedy="end the job that holds the GPUs, lower --actor-num-gpus-per-node or --rollout-num-gpus, or share "
            "them with --colocate",
            severity="warning",
            evidence=_fields(event),
        ),
        float(event.get("seconds", 1.0)),
    )


def worker_died(event: Event, before: Sequence[Event], setting: Setting) -> Found | None:
    """ASYNC02: the event `worker_died` {worker, error, message}: a thread or task that nobody waits for ended."""
    del before, setting
    return Found(
        diagnosis(
            "ASYNC02",
            f"{event.get('worker')} ended with {event.get('error')}: {event.get('message')}",
            remedy="mend what it raised (the traceback is in run.log); a worker of a --rollout-function-path has to "
            "hand its errors to the function that waits for it",
            evidence=_fields(event),
        )
    )


def hang(event: Event, before: Sequence[Event], setting: Setting) -> Found | None:
    """HANG01: the event `hang` {seconds, doing, probable, report, stops, last, queues} of the watchdog."""
    del before
    probable = str(event.get("probable", "HANG01"))
    ways = {
        "SYNC01": f"weights do not arrive (SYNC01): {ways_of(setting.transport).late}",
        "STOP02": "responses may not end (STOP02): --rollout-stop-token-ids, --rollout-max-response-len or "
        "--generate-timeout",
        "REW03": "rewards are not answered (REW03): a lower --reward-timeout gives such calls up; mend what scores, or "
        "the server that it asks",
    }
    last = ", ".join(f"{what} {age} s ago" for what, age in dict(event.get("last", {})).items())
    return Found(
        diagnosis(
            "HANG01",
            f"nothing got done for {event.get('seconds')} s: {event.get('doing')} (last: {last})",
            cause="One part waits for another that does not answer, or a function of yours does not return.",
            remedy=ways.get(probable, "mend the function that it names")
            + f"; all stacks are in {event.get('report')}"
            + ("" if event.get("stops") else "; --on-hang stop ends such a run"),
            evidence=_fields(event),
        )
    )


def _fields(event: Event) -> dict[str, object]:
    return {name: value for name, value in event.items() if name not in ("time", "event")}
