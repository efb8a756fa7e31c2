"""The answers of the run page, by name: the same for the server and for a file of `--export`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.config.flag_spec import flag_specs
from furlong.config.sections import Config
from furlong.data.audit import Audit, audit, living_events
from furlong.errors import DataError
from furlong.tracking.run_files import CONFIG
from furlong.view.run_reader import RunReader
from furlong.view.sample_index import SampleIndex, not_kept
from furlong.view.sample_page import SamplePages
from furlong.view.timeline import timeline

Parameters = Mapping[str, str]
PAGE = 100  # groups sent at once


@dataclass
class GroupFate:
    """One group: its origin, the rollout it was last issued to, how often it was returned, and its state.

    state: issued, generated, returned, restored, trained or dropped. reason: of the drop or the last return. step: as
    in metrics.jsonl, if trained.
    """

    group: int
    epoch: int
    row: int
    rollout: int
    state: str = "issued"
    reason: str = ""
    step: int | None = None
    num_returned: int = 0


class GroupFlow:
    """The groups of a run's ledger, read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._groups: list[GroupFate] = []
        self._audit = Audit(str(path))

    def flow(self) -> dict[str, Any]:
        """Return the counts of the flow. Empty without a ledger. Raises DataError if it cannot be read."""
        if not self._read():
            return {}
        result = self._audit
        return {
            "issued": result.num_groups,
            "trained": result.num_trained,
            "dropped": dict(result.drop_reasons.most_common()),
            "in_flight": dict(result.in_flight),
            "returned": sum(group.num_returned for group in self._groups),
            "resumes": result.num_resumes,
            "rolled_back": result.num_rolled_back,
            "problems": result.problems[:20],
        }

    def page(self, *, state: str = "", reason: str = "", group: int | None = None, offset: int = 0) -> dict[str, Any]:
        """Return {"total": ..., "rows": [...]} of the groups with a state, a reason or a number.

        Dropped ones come first, trained ones last; of each, the newest first.
        """
        if not self._read():
            return {"total": 0, "rows": []}
        chosen = [
            fate
            for fate in reversed(self._groups)
            if state in ("", fate.state) and reason in ("", fate.reason) and group in (None, fate.group)
        ]
        chosen.sort(key=lambda fate: {"dropped": 0, "trained": 2}.get(fate.state, 1))
        return {"total": len(chosen), "rows": [vars(fate) for fate in chosen[offset : offset + PAGE]]}

    def _read(self) -> bool:
        if not self._path.is_file():
            return False
        status = os.stat(self._path)
        stamp = (status.st_ino, status.st_size)
        if stamp != self._stamp:
            self._audit = audit(self._path)
            self._groups = list(_fates(self._path).values())
            self._stamp = stamp
        return True


def _fates(path: Path) -> dict[int, GroupFate]:
    fates: dict[int, GroupFate] = {}
    for event in living_events(path):
        number = event.get("g")
        if type(number) is not int:
            continue
        kind = event["e"]
        fate = fates.get(number)
        if fate is None:
            fate = fates[number] = GroupFate(number, event.get("ep", -1), event.get("row", -1), event.get("r", -1))
        fate.state, fate.rollout = kind, event.get("r", fate.rollout)
        if kind == "trained":
            fate.step = event.get("s", -1) + 1
        if kind in ("dropped", "returned"):
            fate.reason = event.get("why", "")
            fate.num_returned += kind == "returned"
    return fates


class RunPages:
    """Everything that the page shows of one run. Answers are JSON-able; parameters are texts of a query string.

    Raises DataError for a parameter that is not what it should be, and for files that cannot be read.
    """

    def __init__(self, run: RunReader) -> None:
        self.run = run
        self.samples = SampleIndex(run.folder, run.flags)
        self._groups = GroupFlow(run.folder / "ledger.jsonl")
        self._single = SamplePages(run.folder, run.flags)
        self.kinds: Mapping[str, Callable[[Parameters], Any]] = {
            "metrics": self._metrics,
            "findings": lambda _: self.run.findings(),
            "sample_facts": lambda _: self.samples.facts(),
            "samples": self._samples,
            "sample": self._sample,
            "flow": lambda _: self._groups.flow(),
            "groups": self._group_page,
            "config": lambda _: self.config(),
            "timeline": self._timeline,
        }

    def refresh(self) -> None:
        """Read what the run has recorded since the last call."""
        self.run.refresh()
        self.samples.update()

    def answer(self, kind: str, parameters: Parameters) -> Any:
        """Return the answer of this kind. Raises KeyError for an unknown kind."""
        return self.kinds[kind](parameters)

    def _metrics(self, parameters: Parameters) -> Any:
        names = parameters.get("names")
        return self.run.metrics(names.split(",") if names else None, after=_whole(parameters, "after", -1))

    def _samples(self, parameters: Parameters) -> Any:
        filters: dict[str, Any] = {
            name: parameters[name] for name in ("status", "set", "text", "order") if parameters.get(name)
        }
        filters |= {name: _whole(parameters, name) for name in ("step", "group", "index") if parameters.get(name)}
        filters |= {name: _number(parameters, name) for name in ("reward_min", "reward_max") if parameters.get(name)}
        return self.samples.page(filters, offset=_whole(parameters, "offset", 0))

    def _sample(self, parameters: Parameters) -> Any:
        file = self.samples.file_named(parameters.get("file", ""))
        if file is None:
            name = parameters.get("file", "")
            reason = not_kept(name, self.run.flags)
            raise DataError(reason or f"no dump {name!r} in {self.run.folder}; reload the page")
        return self._single.sample(file, _whole(parameters, "pos", 0))

    def _group_page(self, parameters: Parameters) -> Any:
        group = _whole(parameters, "group") if parameters.get("group") else None
        return self._groups.page(
            state=parameters.get("state", ""),
            reason=parameters.get("reason", ""),
            group=group,
            offset=_whole(parameters, "offset", 0),
        )

    def _timeline(self, parameters: Parameters) -> Any:
        return timeline(self.run, _whole(parameters, "first", -1), _whole(parameters, "last", -1))

    def config(self) -> dict[str, Any]:
        """Return the flags by section: [flag, value, source, help]."""
        content = json.loads((self.run.folder / CONFIG).read_bytes())
        sources: Mapping[str, str] = content.get("sources") or {}
        specs = {spec.field: spec for spec in flag_specs(Config).values()}
        return {
            section: [
                {
                    "flag": specs[field].flag if field in specs else f"--{field.replace('_', '-')}",
                    "value": value,
                    "source": sources.get(field, "default"),
                    "help": specs[field].help if field in specs else "",
                }
                for field, value in flags.items()
            ]
            for section, flags in self.run.sections.items()
        }


def _whole(parameters: Parameters, name: str, default: int | None = None) -> int:
    text = parameters.get(name)
    if text is None and default is not None:
        return default
    try:
        number = int(str(text))
    except ValueError:
        raise DataError(f"{name}={text!r} is not a whole number; give one") from None
    if abs(number) >= 1 << 63:
        raise DataError(f"{name}={text} has more than 64 bits; give a smaller number")
    return number


def _number(parameters: Parameters, name: str) -> float:
    try:
        return float(parameters[name])
    except ValueError:
        raise DataError(f"{name}={parameters[name]!r} is not a number; give one") from None
