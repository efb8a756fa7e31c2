"""Monitors: what they read (`RunFacts`, `StepContext`), their alerts, and `RunMonitor`, which runs them in a run.

`MonitorSuite` also reads the files of an earlier run.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from furlong.catalogue import Diagnosis, Severity, diagnosis
from furlong.config.sections import Config
from furlong.core.model_config import RANDOM, read_json
from furlong.core.tracing import heartbeat
from furlong.core.transports import transport_spec
from furlong.errors import ConfigError
from furlong.files.checkpoint_folder import find_foreign_weights
from furlong.tools.memory_formulas import ModelSize
from furlong.tracking.run_files import EventLog

if TYPE_CHECKING:
    from furlong.interfaces import Tracker  # imports torch, which reading a run's folder does without

HISTORY = 128  # earlier rows that monitors can read
EVENTS = 16  # earlier events of one name that monitors can read
NO_PROGRESS = ("engine_silent", "blocked")  # events that do not count as progress
LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}


@dataclass(frozen=True)
class RunFacts:
    """A run's configuration, what follows from it, and what its model folder says: the rest is 0 if it is unknown."""

    config: Config = dataclasses.field(default_factory=Config)
    has_chat_template: bool = False
    vocab_size: int = 0
    num_parameters: int = 0
    has_random_weights: bool = False

    @staticmethod
    def of(config: Config) -> RunFacts:
        """Look up the chat template and the sizes of `config`'s model."""
        folder = Path(str(config.rollout.hf_checkpoint or ""))
        is_random = bool(_read_json(folder / "config.json").get(RANDOM))
        has_template = (folder / "chat_template.jinja").exists() or bool(
            _read_json(folder / "tokenizer_config.json").get("chat_template")
        )
        return RunFacts(config, has_template, *_sizes(folder), has_random_weights=is_random)

    @property
    def model(self) -> str:
        """Path of the policy's model folder."""
        return str(self.config.rollout.hf_checkpoint or "")

    @property
    def reference(self) -> str:
        """Path of the reference model's folder, with its step if it is selected."""
        flags = self.config.checkpoint
        return _at_step(str(flags.ref_load or self.model), flags.ref_ckpt_step)

    @property
    def initial_weights(self) -> str:
        """Path of the folder that training starts from: --load if it gives only weights, or the model."""
        flags = self.config.checkpoint
        if flags.load is not None and (flags.finetune or _is_foreign(Path(flags.load), flags.ckpt_step)):
            return _at_step(flags.load, flags.ckpt_step)
        return self.model

    @property
    def first_step(self) -> int:
        """The step of the first batch, unless the run resumes."""
        return 1 if self.config.checkpoint.load is not None else 1 + (self.config.data.start_rollout_id or 0)

    @property
    def num_samples(self) -> int:
        """Samples per rollout."""
        return self.config.data.rollout_batch_size * self.config.data.n_samples_per_prompt

    @property
    def has_old_policy(self) -> bool:
        """Whether the loss compares with log-probs of other weights than those of the first optimizer step."""
        return self.config.algo.use_rollout_logprobs or self.config.algo.keep_old_actor

    @property
    def generating_flag(self) -> str | None:
        """The flag that names the user's code that generates samples; None without any."""
        session, rollout = self.config.session, self.config.rollout
        flags = {
            "--environment": session.environment,
            "--agent-function-path": session.agent_function_path,
            "--agent-command": session.agent_command,
            "--online-sessions": session.online_sessions,
            "--custom-generate-function-path": rollout.custom_generate_function_path,
            "--rollout-function-path": rollout.rollout_function_path,
        }
        return next((flag for flag, value in flags.items() if value), None)

    @property
    def transport(self) -> str:
        """The transport of weight updates, as `core.transports` names it."""
        sync = self.config.sync
        return transport_spec(sync.update_weight_transport, mode=sync.update_weight_mode).name


def _at_step(folder: str, step: int | None) -> str:
    return folder if step is None else f"{folder} (step {step})"


def _is_foreign(folder: Path, step: int | None) -> bool:
    try:
        return find_foreign_weights(folder, step=step) is not None
    except OSError:
        return False


def _sizes(folder: Path) -> tuple[int, int]:
    content = _read_json(folder / "config.json")
    text: Any = content.get("text_config") or content
    vocab_size = text.get("vocab_size") if isinstance(text, dict) else None
    try:
        num_parameters = ModelSize.read(content).parameters
    except (ConfigError, KeyError, TypeError, ValueError):
        num_parameters = 0
    return vocab_size if type(vocab_size) is int and vocab_size > 1 else 0, num_parameters


def _read_json(path: Path) -> Mapping[str, Any]:
    """Read a JSON object of the model's folder, which may be damaged or gone by now: {}."""
    try:
        return read_json(path)
    except ConfigError:
        return {}


Row = Mapping[str, float]
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """A diagnosis and its level, in the monitor's own unit: it is reported again only if the level rises.

    `kind` separates the alerts of a monitor whose levels cannot be compared.
    """

    diagnosis: Diagnosis
    level: float = 1.0
    kind: str = ""


def alert(
    id: str,
    finding: str,
    *,
    evidence: Mapping[str, Any],
    cause: str | None = None,
    remedy: str | None = None,
    severity: Severity | None = None,
    level: float = 1.0,
    kind: str = "",
) -> Alert:
    """Make an alert; cause, remedy and severity default to those of the catalogue's row."""
    found = diagnosis(id, finding, evidence=evidence, cause=cause, remedy=remedy, severity=severity)
    return Alert(found, level, kind)


@dataclass(frozen=True)
class StepContext:
    """One step: its merged metrics, the earlier rows (oldest first), and the last value of each `selftest/` metric.

    events: the last ones by name; `diagnosis` are those of the preflight and of the monitors.
    """

    step: int
    row: Row
    history: Sequence[Row]
    facts: RunFacts
    selftest: Row = dataclasses.field(default_factory=dict[str, float])
    events: Mapping[str, Sequence[Event]] = dataclasses.field(default_factory=dict[str, Sequence[Event]])

    @property
    def is_first(self) -> bool:
        """Whether this is the first batch of a run that did not resume."""
        return self.step == self.facts.first_step

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of this rollout; with another batch size than the flags if it was made before a resume."""
        return int(self.row.get("train/num_steps", self.facts.config.train.num_steps_per_rollout or 1))

    @property
    def trains_foreign_tokens(self) -> bool:
        """Whether the loss includes tokens that the policy did not sample, whose log-probs carry no information."""
        return self.row.get("rollout/env_tokens_in_loss", 0.0) > 0

    def alert(self, id: str, finding: str, *, evidence: Mapping[str, Any], **details: Any) -> Alert:
        """Make an alert with this step in its finding and evidence."""
        return alert(id, f"step {self.step}: {finding}", evidence={"step": self.step, **evidence}, **details)

    def reported(self, *ids: str) -> list[str]:
        """Return those of `ids` that the preflight or an earlier step reported, infos aside."""
        found = [each for each in self.events.get("diagnosis", ()) if each["severity"] != "info"]
        return [id for id in ids if any(each["id"] == id for each in found)]

    def recent(self, name: str, count: int) -> list[float]:
        """Return a metric in the last `count` rows, newest last. Rows without it are skipped."""
        rows = [*self.history[len(self.history) - min(count - 1, len(self.history)) :], self.row]
        return [row[name] for row in rows if name in row]


@dataclass(frozen=True)
class StepMonitor:
    """A condition on steps. Its alert is reported again at `again` times the last reported level."""

    id: str
    check: Callable[[StepContext], Alert | None]
    again: float = math.inf


@dataclass(frozen=True)
class EventMonitor:
    """A condition on events of one name. `check` gets the event and the earlier ones."""

    id: str
    event: str
    check: Callable[[Event, Sequence[Event], RunFacts], Alert | None]
    again: float = math.inf


class MonitorSuite:
    """Applies monitors to steps and events in order.

    >>> from furlong.diagnosis.monitors import MONITORS
    >>> suite = MonitorSuite(MONITORS, RunFacts())
    >>> [d.id for d in suite.step(1, {"rollout/truncated_ratio": 1.0})]
    ['STOP02']
    """

    def __init__(self, monitors: Sequence[StepMonitor | EventMonitor], facts: RunFacts) -> None:
        self.facts = facts
        self._step_monitors = [monitor for monitor in monitors if isinstance(monitor, StepMonitor)]
        self._event_monitors: defaultdict[str, list[EventMonitor]] = defaultdict(list)
        for monitor in monitors:
            if isinstance(monitor, EventMonitor):
                self._event_monitors[monitor.event].append(monitor)
        self._rows: deque[Row] = deque(maxlen=HISTORY)
        self._selftest: dict[str, float] = {}
        self._events: defaultdict[str, deque[Event]] = defaultdict(lambda: deque(maxlen=EVENTS))
        self._reported: dict[tuple[StepMonitor | EventMonitor, str], float] = {}

    def step(self, step: int, metrics: Row) -> list[Diagnosis]:
        """Check the merged metrics of one step; return what is new."""
        row = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._selftest |= {name: value for name, value in row.items() if name.startswith("selftest/")}
        context = StepContext(step, row, tuple(self._rows), self.facts, dict(self._selftest), self._events)
        diagnoses = [self._report(monitor, monitor.check(context)) for monitor in self._step_monitors]
        self._rows.append(row)
        return [diagnosis for diagnosis in diagnoses if diagnosis is not None]

    def event(self, event: Event) -> list[Diagnosis]:
        """Check one event, an object with the key `event`; return what is new."""
        name = str(event["event"])
        if name == "start":
            self._events.clear()
        before = tuple(self._events[name])
        diagnoses = [self._report(m, m.check(event, before, self.facts)) for m in self._event_monitors[name]]
        self._events[name].append(event)
        return [diagnosis for diagnosis in diagnoses if diagnosis is not None]

    def _report(self, monitor: StepMonitor | EventMonitor, alert: Alert | None) -> Diagnosis | None:
        """Return the alert's diagnosis, unless it was reported and has not got worse by the monitor's factor."""
        if alert is None:
            return None
        last = self._reported.get((monitor, alert.kind))
        if last is not None and alert.level < last * monitor.again:
            return None
        self._reported[monitor, alert.kind] = alert.level
        self._events["diagnosis"].append(alert.diagnosis.record())
        return alert.diagnosis


logger = logging.getLogger(__name__)

OnDiagnosis = Literal["warn", "stop", "strict"]
ENDS: dict[OnDiagnosis, frozenset[str]] = {
    "warn": frozenset(),
    "stop": frozenset({"error"}),
    "strict": frozenset({"error", "warning"}),
}


class RunMonitor:
    """Implements `interfaces.Tracker` around a run's trackers, and `interfaces.Observer`.

    A diagnosis is logged, written to `events.jsonl` (event `diagnosis`), and added to the step's record as
    `diagnosis/<ID>` = 1; one caused by an event is added to the next record. `on_diagnosis` selects the severities that
    end the run after the step; the event of a hang that `stops` the run always does. `earlier` yields the rows that the
    run's folder already has, read at the first step: a resumed run repeats a diagnosis only if it got worse. `measured`
    returns metrics of the machine for each step's record.
    """

    def __init__(
        self,
        suite: MonitorSuite,
        *,
        trackers: Tracker,
        events: EventLog,
        on_diagnosis: OnDiagnosis = "warn",
        earlier: Callable[[], Iterable[tuple[int, Mapping[str, float]]]] = tuple,
        measured: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._suite, self._trackers, self._events = suite, trackers, events
        self._ends, self._earlier = ENDS[on_diagnosis], earlier
        self._measured = measured
        self._lock = threading.RLock()
        self._marks: dict[str, float] = {}
        self._has_begun = False
        self._broken: set[str] = set()
        self.ended_by: Diagnosis | None = None
        self._is_stopped = False

    @property
    def stop_requested(self) -> bool:
        """Whether a diagnosis or `stop` asks for the end of the run."""
        return self.ended_by is not None or self._is_stopped

    def stop(self) -> None:
        """Ask for the end of the run after the current step."""
        self._is_stopped = True

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step in all trackers, with the diagnoses made from it."""
        heartbeat.beat("step")
        metrics = metrics | self._measured()
        with self._lock:
            self._begin(step)
            diagnoses = self._check("step", lambda: self._suite.step(step, metrics))
            self._mark(diagnoses)
            marks, self._marks = self._marks, {}
        self._trackers.log(step, metrics | marks)
        self._events.write("step", step=step, seconds=metrics.get("perf/step_time"))
        self._report(diagnoses, step=step)

    def notify(self, event: str, **fields: Any) -> None:
        """Record an event. Callable from any thread."""
        if event not in NO_PROGRESS:
            heartbeat.beat(event)
        self._events.write(event, **fields)
        with self._lock:
            diagnoses = self._check(event, lambda: self._suite.event({"event": event, **fields}))
            self._mark(diagnoses, stops=fields.get("stops") is True)
        self._report(diagnoses)

    def close(self) -> None:
        """Close the trackers and the event log."""
        self._trackers.close()
        self._events.close()

    def _begin(self, first: int) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        for step, row in self._earlier():
            if step < first:
                self._suite.step(step, row)

    def _mark(self, diagnoses: list[Diagnosis], *, stops: bool = False) -> None:
        self._marks.update({f"diagnosis/{diagnosis.id}": 1.0 for diagnosis in diagnoses})
        if self.ended_by is None:
            self.ended_by = next((d for d in diagnoses if stops or d.severity in self._ends), None)

    def _report(self, diagnoses: list[Diagnosis], **where: int) -> None:
        for each in diagnoses:
            logger.log(LEVELS[each.severity], "%s", each.text())
            self._events.write("diagnosis", **where, **each.record())

    def _check(self, source: str, check: Callable[[], list[Diagnosis]]) -> list[Diagnosis]:
        """Run monitors. An exception is a bug of a monitor: it is logged once per source and does not end the run."""
        try:
            return check()
        except Exception as error:
            if source not in self._broken:
                self._broken.add(source)
                logger.warning("[CHECK01] a monitor failed on %s (%s)", source, type(error).__name__, exc_info=error)
            return []
