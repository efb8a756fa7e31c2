"""The file of an evaluation: a header, then one record per sample, appended when all samples of a task are scored."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from furlong.core.sample import Sample, Status, scalar_reward
from furlong.environments.protocol import INFO, PARTS
from furlong.errors import ConfigError
from furlong.rollout.episodes import LIMIT
from furlong.sessions.samples import EPISODE, LEAF, MESSAGES

FORMAT = 1
Record = dict[str, Any]


class EvalFile:
    """The records of an evaluation on disk. `done` has those of earlier runs, by set and task.

    Raises ConfigError if the file belongs to another evaluation, or exists and `resume` is False.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self.done: defaultdict[tuple[str, int], list[Record]] = defaultdict(list)
        self._header = {"furlong_eval": FORMAT, **header}
        if path.exists() and path.stat().st_size:
            if not resume:
                raise ConfigError(
                    f"--output {path} exists; add --resume to continue that evaluation, or give another file"
                )
            self._read()

    def append(self, records: Sequence[Record]) -> None:
        """Append the records of one task with one write; the first one begins the file."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(_line(self._header))
        with self.path.open("ab") as file:
            file.write(b"".join(map(_line, records)))

    def _read(self) -> None:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        if not whole and _line(self._header).startswith(text.encode()):  # the first write was interrupted
            self.path.unlink()
            return
        lines = [self._decoded(number, line) for number, line in enumerate(whole.split("\n")[:-1], 1)]
        if not lines or "furlong_eval" not in lines[0]:
            raise ConfigError(f"--output {self.path} is not a file of furlong eval: its first line has no header")
        differing = [key for key in {*lines[0], *self._header} if lines[0].get(key) != self._header.get(key)]
        if differing:
            shown = "; ".join(
                f"{key}: {lines[0].get(key)!r}, now {self._header.get(key)!r}" for key in sorted(differing)
            )
            raise ConfigError(
                f"--resume: {self.path} was written with other settings ({shown}); use the same, or another --output"
            )
        for record in lines[1:]:
            self.done[str(record["set"]), int(record["task"])].append(record)
        wanted = int(self._header["samples"])
        for key in [key for key, records in self.done.items() if not _is_complete(records, wanted)]:
            del self.done[key]
        kept = [self._header, *(record for records in self.done.values() for record in records)]
        draft = self.path.with_name(f"{self.path.name}.tmp")
        draft.write_bytes(b"".join(map(_line, kept)))
        draft.replace(self.path)

    def _decoded(self, number: int, line: str) -> Record:
        try:
            value: Any = json.loads(line)
            if isinstance(value, dict):
                return value
        except ValueError:
            pass
        raise ConfigError(f"--output {self.path}, line {number} is not a JSON object: {line[:80]!r}; delete the line")


def _is_complete(records: Sequence[Record], wanted: int) -> bool:
    """Return whether a task need not be evaluated again: the run was not killed, and no server lost."""
    is_lost = any(record["outcome"] == "infra" for record in records)
    return not is_lost and len({record["sample"] for record in records}) == wanted


def records_of(
    name: str,
    task: int,
    samples: Sequence[Sample],
    *,
    reward_key: str | None,
    seconds: float,
    tokens: Mapping[int, int],
) -> list[Record]:
    """Return the records of one task's samples. tokens: of a sample's answers, by index, where an endpoint counts them.

    The leaves of one episode are one record.
    """
    first = min(int(sample.index or 0) for sample in samples)
    records: list[Record] = []
    for sample in samples:
        if LEAF in sample.metadata:
            continue
        index = int(sample.index or 0)
        has_reward = sample.status is not Status.FAILED and sample.reward is not None
        own = sample.effective_response_length
        records.append(
            {
                "set": name,
                "task": task,
                "sample": index - first,
                "seed": sample.seed,
                "reward": scalar_reward(sample, reward_key) if has_reward else None,
                "parts": sample.metadata.get(PARTS) or (sample.reward if isinstance(sample.reward, dict) else {}),
                "outcome": _outcome(sample),
                "reason": "" if sample.outcome is None else sample.outcome.reason,
                "turns": (sample.metadata.get(EPISODE) or {}).get("turns", 1),
                "tokens": tokens.get(index, own),
                "seconds": round(seconds, 3),
                "label": sample.label,
                "info": sample.metadata.get(INFO) or {},
                "transcript": sample.metadata.get(MESSAGES) or [*_prompt(sample), _answer(sample)],
            }
        )
    return records


def _outcome(sample: Sample) -> str:
    """Return how an episode ended: scored, policy_limit, agent_error or infra."""
    if sample.status is Status.FAILED:
        return "infra" if sample.outcome is not None and sample.outcome.kind == "infra" else "agent_error"
    return "policy_limit" if LIMIT in sample.metadata or sample.status is Status.TRUNCATED else "scored"


def _prompt(sample: Sample) -> list[dict[str, Any]]:
    prompt: Any = sample.prompt
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _answer(sample: Sample) -> dict[str, Any]:
    return {"role": "assistant", "content": sample.response}


def _line(record: Mapping[str, Any]) -> bytes:
    """Return one line of UTF-8; half of a surrogate pair becomes JSON's escape of it."""
    return json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"
