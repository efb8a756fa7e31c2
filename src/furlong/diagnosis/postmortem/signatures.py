"""Search tracebacks and logs for signatures of known failures."""

from __future__ import annotations

import re
from collections.abc import Iterable

from furlong.catalogue import CATALOGUE, Diagnosis
from furlong.diagnosis.postmortem.log_text import LogText, Signature
from furlong.diagnosis.postmortem.memory_failures import MEMORY
from furlong.diagnosis.postmortem.process_failures import FAILURES
from furlong.diagnosis.postmortem.software_failures import (
    FILE_KINDS,
    FOLDER_KINDS,
    LIBRARY_KINDS,
    MODEL_KINDS,
    NUMERIC_KINDS,
    USER_KINDS,
)
from furlong.diagnosis.postmortem.system_failures import (
    CONNECTIONS,
    DISKS,
    FILE_SYSTEMS,
    LIMITS,
    MACHINES,
    MEMORY_KINDS,
    NETWORK,
    OTHER_ERRORS,
    PATHS,
    SERVERS,
)
from furlong.errors import HookError

STATED = re.compile(r"\[(?P<id>[A-Z]+\d\d)\] (?P<finding>.+)", re.DOTALL)
USER_ROWS = frozenset({"HOOK01", "REW01", "REW03", "TOOL02"})  # caused by custom functions
OUT_OF_MEMORY_TYPES = re.compile(r"\b(OutOfMemoryError|MemoryError)\b")

# In order of precedence: memory, other causes, and what follows from them.
SIGNATURES: tuple[Signature, ...] = (*MEMORY, *NETWORK, *FAILURES)
# Kinds of failures by their words, for texts in which no signature matches; the first one counts.
GENERAL: tuple[Signature, ...] = (
    *MEMORY_KINDS,
    *LIMITS,
    *DISKS,
    *FILE_SYSTEMS,
    *MACHINES,
    *USER_KINDS,
    *FOLDER_KINDS,
    *LIBRARY_KINDS,
    *SERVERS,
    *CONNECTIONS,
    *FILE_KINDS,
    *NUMERIC_KINDS,
    *PATHS,
    *MODEL_KINDS,
    *OTHER_ERRORS,
)
# Rows whose signatures a user's server, process, file or message can contain, too.
OTHERS_ROWS = frozenset(each.id for each in SIGNATURES) - {"DISK01", "ENG02", "MEM02", "NUM04"}


def match_signatures(text: LogText, *, known: Iterable[str] = ()) -> list[Diagnosis]:
    """Diagnose a text, once per id, in the order of `SIGNATURES`, else by `GENERAL`. Ids in `known` are skipped."""
    return match_specific(text, known=known) or match_general(text, known=known)


def match_specific(text: LogText, *, known: Iterable[str] = ()) -> list[Diagnosis]:
    """Diagnose a text by the signatures of known failures, once per id. Ids in `known` are skipped."""
    seen = set(known)
    diagnoses: list[Diagnosis] = []
    for signature in SIGNATURES:
        if signature.id in seen or signature.causes & seen:
            continue
        if (match := signature.match(text)) is not None:
            diagnoses.append(signature.diagnose(text, match))
            seen.add(signature.id)
    return diagnoses


def match_general(text: LogText, *, known: Iterable[str] = ()) -> list[Diagnosis]:
    """Diagnose a text by the first kind of failure whose words are in it, unless its id is in `known`."""
    for signature in GENERAL:
        if (match := signature.match(text)) is not None:
            return [] if signature.id in known else [signature.diagnose(text, match)]
    return []


def user_error_exclusions(error: str, message: str) -> frozenset[str]:
    """Return the ids that do not apply if a custom function raised the exception `error` with `message`.

    A function may run out of memory itself; then the type of its exception says so.
    """
    stated = parse_diagnosis(message)
    is_user_error = error == HookError.__name__ or (stated is not None and stated.id in USER_ROWS)
    if not is_user_error:
        return frozenset()
    return OTHERS_ROWS if OUT_OF_MEMORY_TYPES.search(message) else OTHERS_ROWS | {"MEM02"}


def parse_diagnosis(message: str) -> Diagnosis | None:
    """Parse a message of furlong that is a diagnosis: `[ID] finding`, then cause and remedy on separate lines."""
    match = STATED.search(message)
    if match is None or match["id"] not in CATALOGUE:
        return None
    row = CATALOGUE[match["id"]]
    finding, *rest = [line.strip() for line in match["finding"].splitlines() if line.strip()]
    cause = " ".join(rest[:-1]) if len(rest) > 1 else row.cause
    return Diagnosis(row.id, finding, cause, rest[-1] if rest else row.remedy, row.severity)
