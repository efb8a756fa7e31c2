"""What a run did over time: phases of its steps from the metrics and events, and the spans of `--trace`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from furlong.view.run_reader import RunReader

MAX_SPANS = 20_000  # sent at once; the longest ones
WINDOW = 10  # steps shown if none are chosen
PHASES = (
    ("rollout", "perf/rollout_time"),
    ("train", "perf/train_time"),
    ("evaluation", "perf/eval_time"),
    ("weight update", "perf/update_weights_time"),
)  # track, metric


def timeline(run: RunReader, first: int, last: int) -> dict[str, Any]:
    """Return tracks of boxes [start, seconds, name] of the steps from `first` to `last`, in seconds since `start`.

    -1 as `last` is the last step, as `first` `WINDOW` steps before it. Waiting of the trainer is a track, too.
    """
    ends = {event["step"]: event["time"] for event in run.events if event["event"] == "step" and event.get("time")}
    if not ends:
        return {"tracks": [], "steps": [0, 0], "range": [0, 0], "traced": False}
    steps = sorted(ends)
    last = steps[-1] if last < 0 else min(last, steps[-1])
    first = max(last - WINDOW + 1, steps[0]) if first < 0 else max(first, steps[0])
    shown = [step for step in steps if first <= step <= last]
    columns = run.metrics([metric for _, metric in PHASES] + ["perf/step_time", "perf/train_wait_time"])
    rows = {step: i for i, step in enumerate(columns["steps"])}

    def seconds(step: int, metric: str) -> float:
        values = columns["columns"].get(metric)
        return (values[rows[step]] or 0.0) if values and step in rows else 0.0

    if not shown:
        return {"tracks": [], "steps": [steps[0], steps[-1]], "range": [first, last], "traced": False}
    begin = ends[shown[0]] - max(seconds(shown[0], "perf/step_time"), 1e-3)
    tracks: dict[str, list[list[Any]]] = {"steps": []}
    for step in shown:
        duration = seconds(step, "perf/step_time") or seconds(step, "perf/eval_time")
        tracks["steps"].append([round(ends[step] - duration - begin, 4), duration, f"step {step}"])
        wait = seconds(step, "perf/train_wait_time")
        if wait:
            box = [round(ends[step] - duration - begin, 4), wait, f"step {step} waits for its rollout"]
            tracks.setdefault("trainer waits", []).append(box)
        if train := seconds(step, "perf/train_time"):
            box = [round(ends[step] - duration + wait - begin, 4), train, f"train step {step}"]
            tracks.setdefault("train", []).append(box)
    for event in run.events:
        end = event.get("time") or 0.0
        if event["event"] in TIMED and begin <= end <= ends[shown[-1]] + 1.0 and event.get("seconds"):
            start = round(end - event["seconds"] - begin, 4)
            tracks.setdefault(TIMED[event["event"]], []).append([start, event["seconds"], TIMED[event["event"]]])
    traced = list(_spans(run.folder, begin, ends[shown[-1]]))
    for track, start, duration, name in sorted(traced, key=lambda span: -span[2])[:MAX_SPANS]:
        tracks.setdefault(track, []).append([round(start, 6), round(duration, 6), name])
    return {
        "tracks": [{"name": name, "boxes": sorted(boxes)} for name, boxes in tracks.items()],
        "steps": [steps[0], steps[-1]],
        "range": [shown[0], shown[-1]],
        "traced": bool(traced),
        "num_cut": max(len(traced) - MAX_SPANS, 0),
    }


TIMED = {"weight_update": "weight updates", "save": "checkpoints"}  # events with `seconds`: the name of their track


def _spans(folder: Path, begin: float, end: float) -> Iterator[tuple[str, float, float, str]]:
    """Yield (track, start, seconds, name) of the spans of `--trace` that overlap [begin, end], Unix seconds."""
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    open_flights: dict[str, tuple[float, str]] = {}
    for event in _trace_events(folder):
        pid, tid = event.get("pid", 0), event.get("tid", 0)
        match event.get("ph"):
            case "M" if event["name"] == "process_name":
                processes[pid] = str(event["args"]["name"])
            case "M" if event["name"] == "thread_name":
                names[pid, tid] = str(event["args"]["name"])
            case "X":
                start, duration = event["ts"] / 1e6, event.get("dur", 0.0) / 1e6
                if start <= end and start + duration >= begin:
                    track = f"{processes.get(pid, pid)}: {names.get((pid, tid), tid)}"
                    yield track, start - begin, duration, _name(event)
            case "b":
                open_flights[event["id"]] = (event["ts"] / 1e6, _name(event))
            case "e" if event.get("id") in open_flights:
                start, name = open_flights.pop(event["id"])
                stop = event["ts"] / 1e6
                if start <= end and stop >= begin:
                    yield f"{processes.get(pid, pid)}: {event['name']} in flight", start - begin, stop - start, name
            case _:
                continue


def _name(event: dict[str, Any]) -> str:
    facts = ", ".join(f"{key} {value}" for key, value in (event.get("args") or {}).items())
    return f"{event['name']}{facts and f' ({facts})'}"


def _trace_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of `trace.json`, or of the files in `trace/` of a run that has not ended."""
    merged = folder / "trace.json"
    paths = [merged] if merged.is_file() else sorted((folder / "trace").glob("*.jsonl"))
    for path in paths:
        with path.open("rb") as file:
            for line in file:
                text = line.strip().rstrip(b",")
                if not (text.startswith(b"{") and text.endswith(b"}")):
                    continue
                try:
                    event = orjson.loads(text)
                except orjson.JSONDecodeError:
                    continue
                if isinstance(event, dict) and "ph" in event:
                    yield event
