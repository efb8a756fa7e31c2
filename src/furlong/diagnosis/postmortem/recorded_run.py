"""A run as its folder records it: flags, steps and events, and what of them is damaged or missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from furlong.catalogue import Diagnosis, diagnosis
from furlong.config.command_line import config_from_values
from furlong.config.flag_spec import flag_specs
from furlong.config.flag_values import value_from_yaml
from furlong.config.sections import Config, by_field
from furlong.core.text import abbreviate
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import MonitorSuite, RunFacts
from furlong.tracking.run_files import CONFIG, EVENTS, METRICS, read_intact_rows, read_sections, read_steps, torn_lines

IN_FLIGHT = 4  # steps of a run in progress that may be in its events and not yet in its metrics
SHOWN = 8  # damaged lines or flags that are listed
UNUSABLE = (ArithmeticError, LookupError, TypeError, ValueError)  # what a monitor raises for values it cannot use


@dataclass(frozen=True)
class RecordedRun:
    """The files of a run's folder, as far as they can be read.

    config: its flags, with the default for each one that is damaged or missing. problems: what is damaged or missing,
    with file and line, as far as it does not depend on whether the run is in progress.
    """

    folder: Path
    config: Config
    steps: Sequence[tuple[int, Mapping[str, float]]]
    events: Sequence[Mapping[str, Any]]
    problems: list[str] = field(default_factory=list[str])

    @staticmethod
    def read(folder: Path, name: str = "") -> RecordedRun:
        """Read a folder. Raises ConfigError, which calls it `name`, if it has no readable config.json of a run."""
        sections = read_sections(folder, name)
        events = read_intact_rows(folder / EVENTS, "event")[0]
        config, problems = config_from_sections(sections)
        run = RecordedRun(folder, config, read_steps(folder), events, [])
        if problems:
            run.problems.append(f"{CONFIG}: {abbreviate(problems, SHOWN, separator='; ')}")
        run.problems.extend(_damaged_lines(folder))
        return run

    @cached_property
    def flags(self) -> dict[str, Any]:
        """The flags by field."""
        return {name: spec.value_in(self.config) for name, spec in flag_specs(Config).items()}

    @property
    def since_start(self) -> Sequence[Mapping[str, Any]]:
        """The events since the last start, all if there is none."""
        starts = [i for i, event in enumerate(self.events) if event["event"] == "start"]
        return self.events[starts[-1] if starts else 0 :]

    @property
    def started(self) -> Mapping[str, Any]:
        """The last start, {} without one."""
        return next((event for event in reversed(self.events) if event["event"] == "start"), {})

    @property
    def steps_since_start(self) -> set[int]:
        """The steps since the last start, from its events; a resumed run repeats some earlier ones."""
        return {event["step"] for event in self.since_start if event["event"] == "step"}

    @property
    def last_step(self) -> int:
        """The last step that a file records."""
        return max([self.steps[-1][0] if self.steps else 0, *self.steps_since_start])

    def diagnose(self) -> list[Diagnosis]:
        """Apply the monitors to the recorded steps and events; return the last diagnosis of each id.

        Values that a monitor cannot use are added to `problems`.
        """
        suite, diagnoses = MonitorSuite(MONITORS, RunFacts.of(self.config)), list[Diagnosis]()
        when = {event["step"]: i for i, event in enumerate(self.events) if event["event"] == "step"}
        checks = [
            *((when.get(s, -1), f"step {s} of {METRICS}", partial(suite.step, s, row)) for s, row in self.steps),
            *((i, f"an event {e['event']} of {EVENTS}", partial(suite.event, e)) for i, e in enumerate(self.events)),
        ]
        for _, name, check in sorted(checks, key=lambda each: each[0]):
            try:
                diagnoses += check()
            except UNUSABLE as error:
                self.problems.append(f"{name} has values that cannot be checked ({error!r})")
        return list({d.id: d for d in diagnoses}.values())

    def damage(self, *, is_running: bool) -> list[Diagnosis]:
        """CHECK01: files that are damaged or incomplete, so that not everything could be checked."""
        missing, done = list(self.problems), self.steps_since_start
        have = {step for step, _ in self.steps}
        lacking = done - have
        if len(lacking) > (IN_FLIGHT if is_running else 0):
            missing.append(f"{METRICS} lacks {len(lacking)} of {len(done)} steps")
        if have and not any(event["event"] == "start" for event in self.events):
            missing.append(f"{EVENTS} has no start and no end of the run")
        if not missing:
            return []
        return [
            diagnosis(
                "CHECK01",
                f"{self.folder}: {'; '.join(missing)}",
                cause="The folder was copied incompletely, its disk was full, or its files were cut off or changed.",
                remedy="read the warnings of trackers in run.log; what is not written is lost with the run"
                if is_running
                else "copy the folder again; these diagnoses are based on what is left",
                evidence={"missing": missing},
            )
        ]


def config_from_sections(sections: Mapping[str, Mapping[str, Any]]) -> tuple[Config, list[str]]:
    """Return the flags of a `config.json`, section -> field -> value, and what is wrong with them.

    A flag that is missing or has a value of another type has its default. Flags that this version lacks are ignored.
    """
    flags, values, problems = by_field(sections), dict[str, Any](), list[str]()
    for name, spec in flag_specs(Config).items():
        if name in flags:
            try:
                values[name] = value_from_yaml(spec, flags[name])
            except ValueError as error:
                problems.append(f"{spec.section}.{name} {error}")
    return config_from_values(values), problems


def _damaged_lines(folder: Path) -> list[str]:
    problems: list[str] = []
    for name, key, num_torn in ((METRICS, "step", 0), (EVENTS, "event", 1)):
        damaged = read_intact_rows(folder / name, key)[1]
        torn = torn_lines(folder / name, damaged) if damaged else []
        if len(damaged) > len(torn) or len(torn) > num_torn:
            lines = f"line{'s' * (len(damaged) > 1)} {abbreviate(damaged, SHOWN)}"
            problems.append(f"{lines} of {name} cannot be read")
    return problems
