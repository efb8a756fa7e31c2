"""Texts of failed runs, and signatures: how a failure is recognized in a text, and its diagnosis."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from furlong import errors
from furlong.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.postmortem.failure_statements import statements

TRACEBACK = 8192  # characters before a match that may belong to its traceback
NEAR = 24  # lines around a match to search for more: seven frames of a traceback
RECORD = re.compile(r"\d\d:\d\d:\d\d\S* [DIWEC] (?P<logger>\w+)[\w.]*: ")  # a line of the log that a logger wrote
LOGGERS = frozenset({"furlong", "sglang", "torch", "ray", "megatron", "transformers"})  # others are the user's
OWN_ERRORS = frozenset(
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.FurlongError)
)
FRAME = re.compile(r'  File "([^"\n]+)", line \d+')
QUOTED_ERROR = re.compile(r"(['\"`])[^'\"`\n]*(Error|Exception|Errno)\b[^'\"`\n]*\1")
NEVER = re.compile(r"(?!)")

# Functions in a traceback and the phase of a run that they belong to.
PHASES = (
    ("optim_step", "the optimizer step"),
    ("log_probs", "a log-prob pass"),
    ("forward_backward", "forward and backward of training"),
    ("load_weights", "the weight update"),
    ("update_weights", "the weight update"),
    ("publish", "the weight update"),  # in logs of older versions
    ("save", "saving a checkpoint"),
    ("generate", "generation"),
    ("_step", "generation"),
    ("build", "building the run's parts"),
)
UNKNOWN_PHASE = "an unknown phase"
TRAINING_PHASES = frozenset(phase for _, phase in PHASES[:3])

LESS_HOST_MEMORY = (
    "use fewer --num-reward-workers or a smaller --rollout-batch-size, request more memory from the scheduler (Slurm: "
    "--mem; Kubernetes: resources.limits.memory), or end other processes of the machine"
)


@dataclass(frozen=True)
class LogText:
    """A part of a log, or a traceback: its source, and flags (by field) and facts of its run.

    failure: `errors.failure_record` of the error that ended the run, if this text contains it.
    """

    source: str
    content: str
    flags: Mapping[str, Any]
    facts: Mapping[str, Any]
    failure: Mapping[str, Any] | None = None

    @cached_property
    def statements(self) -> list[tuple[int, int]]:
        """Start and end of each statement of a failure in the text; none if an error of furlong ended the run."""
        return [] if (self.failure or {}).get("error") in OWN_ERRORS else list(statements(self.content))

    @property
    def code(self) -> str:
        """The code of the failure, "" without one."""
        return str((self.failure or {}).get("code", ""))


Diagnose = Callable[[LogText, re.Match[str]], Diagnosis]


@dataclass(frozen=True)
class Signature:
    """How a failure is recognized, and its diagnosis.

    pattern: matches texts of other programs. codes: the start of the codes of furlong's own errors. before_codes:
    matches furlong's own texts in runs that recorded no codes, and in logs of its processes. also: must match in the
    lines around it. The signature is skipped if one of `causes`, which are more specific, was found. A general one
    names a kind of failure by the words of its cause: it is searched only in lines that state a failure
    (`failure_statements`), of errors that are not furlong's own. innermost: matches the file of the innermost frame of
    the traceback before it.
    """

    id: str
    diagnose: Diagnose
    pattern: re.Pattern[str] = NEVER
    codes: str = ""
    before_codes: re.Pattern[str] = NEVER
    also: re.Pattern[str] | None = None
    causes: frozenset[str] = frozenset()
    innermost: re.Pattern[str] | None = None
    is_general: bool = False

    def match(self, text: LogText) -> re.Match[str] | None:
        """Return the line of the coded error, or else the first match of a pattern."""
        if self.is_general:
            return self._match_statement(text)
        if self.codes and text.failure is not None and text.code.startswith(self.codes):
            line = str(text.failure["message"]).partition("\n")[0]
            if (match := re.search(re.escape(line), text.content)) is not None:
                return match
        has_codes = text.failure is not None and "code" in text.failure
        for pattern in (self.pattern,) if has_codes else (self.pattern, self.before_codes):
            for match in pattern.finditer(text.content):
                is_near = self.also is None or self.also.search(_around(text.content, match)) is not None
                is_stated = not (_is_of_user(text.content, match) or _is_quoted(text.content, match))
                if is_near and is_stated:
                    return match
        return None

    def _match_statement(self, text: LogText) -> re.Match[str] | None:
        for start, end in text.statements:
            for match in self.pattern.finditer(text.content, start, end):
                is_near = self.innermost is None or _is_raised_in(self.innermost, text.content, start)
                if is_near and not _is_of_user(text.content, match):
                    return match
        return None


def signature(
    id: str,
    pattern: str,
    diagnose: Diagnose | tuple[str, ...],
    *,
    codes: str = "",
    before_codes: str = "",
    also: str = "",
    causes: frozenset[str] = frozenset(),
) -> Signature:
    """Make a signature; "" is no pattern. A tuple has fixed texts: problem, and fix and cause if any."""
    diagnose = fixed(id, *diagnose) if isinstance(diagnose, tuple) else diagnose
    return Signature(
        id,
        diagnose,
        re.compile(pattern) if pattern else NEVER,
        codes,
        re.compile(before_codes) if before_codes else NEVER,
        re.compile(also) if also else None,
        causes,
    )


def general(id: str, pattern: str, *texts: str) -> Signature:
    """Make a general signature with fixed texts: problem, and fix and cause if any."""
    return Signature(id, fixed(id, *texts), re.compile(pattern), is_general=True)


def _is_raised_in(files: re.Pattern[str], content: str, start: int) -> bool:
    """Whether the innermost frame of the traceback that ends at `start` is of one of the files."""
    before = content[max(content.rfind("Traceback (most recent call last)", 0, start), start - TRACEBACK, 0) : start]
    frames = FRAME.findall(before)
    return bool(frames) and files.search(frames[-1]) is not None


def _is_quoted(content: str, match: re.Match[str]) -> bool:
    """Whether a line quotes the match, such as a prompt about an error, instead of stating it."""
    begin = content.rfind("\n", 0, match.start()) + 1
    end = content.find("\n", match.end())
    line = content[begin : end if end >= 0 else len(content)]
    if next(statements(line), None) is not None:
        return False
    return any(span.start() < match.end() - begin <= span.end() for span in QUOTED_ERROR.finditer(line))


def _is_of_user(content: str, match: re.Match[str]) -> bool:
    """Whether a logger of the user's code wrote the line of a match."""
    record = RECORD.search(content, content.rfind("\n", 0, match.start()) + 1, match.start())
    return record is not None and record["logger"] not in LOGGERS


def phase_of(traceback: str) -> str:
    """Return the phase of a run, from the innermost function of a traceback that belongs to one."""
    names = re.findall(r", in (\w+)", traceback)
    for name in reversed(names):
        for function, phase in PHASES:
            if name.strip("_") == function.strip("_"):
                return phase
    return UNKNOWN_PHASE


def _around(content: str, match: re.Match[str]) -> str:
    lines_before = content[: match.start()].splitlines()[-NEAR:]
    lines_after = content[match.start() :].splitlines()[: NEAR + 1]
    return "\n".join([*lines_before, *lines_after])


def evidence_of(text: LogText, match: re.Match[str]) -> dict[str, Any]:
    """Return source, line and text of a match, and the facts of the run."""
    number = text.content.count("\n", 0, match.start()) + 1
    line = text.content.splitlines()[number - 1].strip()
    return {"source": text.source, "line": number, "text": line[:400]} | dict(text.facts)


def traceback_before(content: str, match: re.Match[str]) -> str:
    """Return the traceback before the match, as far as the log has it."""
    start = content.rfind("Traceback (most recent call last)", 0, match.start())
    return content[max(start, match.start() - TRACEBACK, 0) : match.start()]


def fixed(id: str, problem: str, remedy: str | None = None, cause: str | None = None) -> Diagnose:
    """Make a diagnosis with a fixed text, followed by the matching line."""

    def diagnose(text: LogText, match: re.Match[str]) -> Diagnosis:
        evidence = evidence_of(text, match)
        finding = f"{problem} ({evidence['source']}, line {evidence['line']}): {evidence['text']}"
        return diagnosis(id, finding, remedy=remedy, cause=cause, evidence=evidence)

    return diagnose
