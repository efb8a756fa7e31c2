"""Explains an exception that is about to end a run, while what it was doing can still be looked at."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.postmortem.memory_account import is_of_memory
from furlong.diagnosis.postmortem.run_examination import LOG_OF_ENGINES, last_words, logs_of
from furlong.diagnosis.postmortem.signatures import Text, blamed_on_users, matches, own_words
from furlong.errors import EngineError, HookError
from furlong.inference.supervisor.log_tail import last_text
from furlong.tracking.run_files import read_steps

AfterMemory = Callable[[BaseException], Mapping[str, Any]]


def explain(
    error: BaseException, folder: Path, flags: Mapping[str, Any], *, after_memory: AfterMemory | None = None
) -> tuple[list[Diagnosis], list[str]]:
    """What the error, its traceback and the engines' logs look like; and the last lines of the log that matters.

    An error that is a diagnosis itself is not told again. `after_memory(error)` gives facts of an error of memory.
    """
    facts: dict[str, Any] = {"steps": (read_steps(folder) or [(0, {})])[-1][0]}
    if after_memory is not None and is_of_memory(error):
        facts |= after_memory(error)
    own = own_words(str(error))
    told = [own.id] if own is not None else []
    logs = logs_of(folder)
    texts = [Text("traceback", "".join(traceback.format_exception(error)), flags, facts)]
    texts += [Text(str(log.relative_to(folder)), last_text(log), flags, facts) for log in logs]
    found: list[Diagnosis] = []
    not_it = blamed_on_users(type(error).__name__, str(error))
    for text in reversed(texts) if isinstance(error, EngineError) else texts:  # an engine's own log says more
        passed_over = not_it if text is texts[0] else ()  # an engine's log is its own
        found += matches(text, found_first=(*told, *passed_over, *(d.id for d in found)))
    if isinstance(error, HookError) and not found:
        cause = "That function raised it, or what it asks."
        found.append(
            diagnosis(
                "HOOK01",
                str(error).partition("\n")[0],
                cause=cause,
                remedy="mend the function, at the line that it names",
            )
        )
    is_engine = any(d.id in LOG_OF_ENGINES for d in found)
    return found, last_words(logs[-1]) if is_engine and logs else []
