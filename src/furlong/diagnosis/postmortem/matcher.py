"""Find the cause of a failure in texts: a traceback, or the ends of the logs of a run's processes.

A signature (`signatures.SIGNATURES`) is a pattern with the diagnosis that it proves. The first signature that matches
counts, and no other one is searched for: what follows from a cause, such as broken connections, comes later in the
table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from furlong.catalogue import CATALOGUE, Diagnosis, diagnosis

TRACEBACK = 8192  # characters before a match that may belong to its traceback
NEAR = 24  # lines around a match to search for more: seven frames of a traceback
RECORD = re.compile(r"\d\d:\d\d:\d\d\S* [DIWEC] (?P<logger>\w+)[\w.]*: ")  # a line of the log that a logger wrote
LOGGERS = frozenset({"furlong", "sglang", "torch", "ray", "megatron", "transformers"})  # others are the user's
STATED = re.compile(r"\[(?P<id>[A-Z]+\d\d)\] (?P<finding>.+)", re.DOTALL)

# Functions in a traceback and the phase of a run that they belong to.
PHASES = {
    "optim_step": "the optimizer step",
    "log_probs": "a log-prob pass",
    "forward_backward": "forward and backward of training",
    "load_weights": "the weight update",
    "update_weights": "the weight update",
    "save": "saving a checkpoint",
    "generate": "generation",
    "step": "generation",
    "build": "building the run's parts",
}
UNKNOWN_PHASE = "an unknown phase"
TRAINING_PHASES = frozenset(list(PHASES.values())[:3])


@dataclass(frozen=True)
class LogText:
    """A part of a log, or a traceback: its source, and flags (by field) and facts of its run.

    failure: `errors.failure_record` of the error that ended the run, if this text contains it.
    """

    source: str
    content: str
    flags: Mapping[str, Any] = field(default_factory=dict[str, Any])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    failure: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def code(self) -> str:
        """The code of the failure, "" without one."""
        return str(self.failure.get("code", ""))


Diagnose = Callable[[LogText, re.Match[str]], Diagnosis]


@dataclass(frozen=True)
class Signature:
    """What proves a failure, and its diagnosis: a fixed text followed by the line, or the function `diagnose`.

    pattern: matches texts of other programs. also: must match in the lines around it. code: the start of the codes of
    furlong's own errors. remedy, cause: those of the row by default.
    """

    id: str
    pattern: str
    problem: str = ""
    remedy: str | None = None
    cause: str | None = None
    also: str = ""
    code: str = ""
    diagnose: Diagnose | None = None

    def search(self, text: LogText) -> Diagnosis | None:
        """Return the diagnosis of the first match that is not a message of the user's own loggers."""
        if self.code and text.code.startswith(self.code):
            line = str(text.failure["message"]).partition("\n")[0]
            if (match := re.search(re.escape(line), text.content)) is not None:
                return self._diagnosis(text, match)
        for match in re.finditer(self.pattern, text.content) if self.pattern else ():
            record = RECORD.search(text.content, text.content.rfind("\n", 0, match.start()) + 1, match.start())
            is_of_user = record is not None and record["logger"] not in LOGGERS
            if not is_of_user and (not self.also or re.search(self.also, _around(text.content, match))):
                return self._diagnosis(text, match)
        return None

    def _diagnosis(self, text: LogText, match: re.Match[str]) -> Diagnosis:
        if self.diagnose is not None:
            return self.diagnose(text, match)
        return stated(self.id, text, match, self.problem, remedy=self.remedy, cause=self.cause)


def find_cause(signatures: Sequence[Signature], texts: Sequence[LogText]) -> Diagnosis | None:
    """Return the diagnosis of the first signature that matches one of the texts."""
    found = (each.search(text) for each in signatures for text in texts)
    return next((each for each in found if each is not None), None)


def stated(
    id: str,
    text: LogText,
    match: re.Match[str],
    problem: str,
    *,
    remedy: str | None = None,
    cause: str | None = None,
    **evidence: Any,
) -> Diagnosis:
    """Make a diagnosis whose finding is `problem` and the line of the match, with its place."""
    seen = evidence_of(text, match)
    finding = f"{problem} ({seen['source']}, line {seen['line']}): {seen['text']}"
    return diagnosis(id, finding, remedy=remedy, cause=cause, evidence=seen | evidence)


def evidence_of(text: LogText, match: re.Match[str]) -> dict[str, Any]:
    """Return source, line and text of a match, and the facts of the run."""
    number = text.content.count("\n", 0, match.start()) + 1
    line = text.content.splitlines()[number - 1].strip()
    return {"source": text.source, "line": number, "text": line[:400]} | dict(text.facts)


def traceback_before(content: str, match: re.Match[str]) -> str:
    """Return the traceback before the match, as far as the log has it."""
    start = content.rfind("Traceback (most recent call last)", 0, match.start())
    return content[max(start, match.start() - TRACEBACK, 0) : match.start()]


def phase_of(traceback: str) -> str:
    """Return the phase of a run, from the innermost function of a traceback that belongs to one."""
    names = (name.strip("_") for name in reversed(re.findall(r", in (\w+)", traceback)))
    return next((PHASES[name] for name in names if name in PHASES), UNKNOWN_PHASE)


def parse_diagnosis(message: str) -> Diagnosis | None:
    """Parse a message of furlong that is a diagnosis: `[ID] finding`, then cause and remedy on separate lines."""
    match = STATED.search(message)
    if match is None or match["id"] not in CATALOGUE:
        return None
    row = CATALOGUE[match["id"]]
    finding, *rest = [line.strip() for line in match["finding"].splitlines() if line.strip()]
    cause = " ".join(rest[:-1]) if len(rest) > 1 else row.cause
    return Diagnosis(row.id, finding, cause, rest[-1] if rest else row.remedy, row.severity)


def _around(content: str, match: re.Match[str]) -> str:
    before, after = content[: match.start()].splitlines()[-NEAR:], content[match.start() :].splitlines()[: NEAR + 1]
    return "\n".join([*before, *after])
