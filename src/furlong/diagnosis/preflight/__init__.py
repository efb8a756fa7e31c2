"""Checks of a run before it starts. A check is a function from a PreflightContext to diagnoses.

Each module lists its own in `CHECKS`. They find what would fail late or silently; what loading the model says seconds
later is left to it. None imports torch or transformers, unless a custom function or a quantized model does.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from furlong.catalogue import NO_EFFECT, Diagnosis, Problem, diagnosis, most_severe_first
from furlong.config.sections import Config
from furlong.diagnosis.preflight import (
    checkpoint_checks,
    data_checks,
    flag_checks,
    machine_checks,
    model_checks,
    teacher_checks,
    weight_checks,
)
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.errors import CheckpointError, ConfigError, DataError, FurlongError, RewardError, RolloutError

logger = logging.getLogger(__name__)

Check = Callable[[PreflightContext], Iterable[Diagnosis]]

CHECKS: tuple[Check, ...] = (
    *flag_checks.CHECKS,
    *weight_checks.CHECKS,
    *checkpoint_checks.CHECKS,
    *model_checks.CHECKS,
    *data_checks.CHECKS,
    *teacher_checks.CHECKS,
    *machine_checks.CHECKS,
)
# Rows of what a check refuses with an error of furlong; the first that fits.
REFUSED_AS: dict[type[FurlongError], str] = {
    CheckpointError: "CKPT01",
    DataError: "DATA01",
    RolloutError: "DATA01",
    RewardError: "REW01",
    FurlongError: "CFG05",
}


def preflight(
    config: Config,
    problems: Sequence[Problem] = (),
    *,
    sources: Mapping[str, str] | None = None,
    checks: Sequence[Check] = CHECKS,
) -> list[Diagnosis]:
    """Run the checks and return their diagnoses, most severe first. `problems` and `sources` are those of the flags.

    An input that a check refuses with furlong's own error is reported as a problem of that input. Another exception is
    CHECK01, unless there is an error already: the check may depend on what that error is about, and runs again once it
    is corrected.
    """
    context = PreflightContext(config, tuple(problems), sources or {})
    found: list[Diagnosis] = []
    raised: list[Diagnosis] = []
    for check in checks:
        try:
            found.extend(check(context))
        except FurlongError as error:
            row = next(row for kind, row in REFUSED_AS.items() if isinstance(error, kind))
            texts = error.problems if isinstance(error, ConfigError) else (str(error),)
            found.extend(flag_checks.from_problem(text, row=row) for text in texts)
        except Exception as error:
            logger.debug("the check %s failed", check.__name__, exc_info=error)
            raised.append(_failed(check, error))
    if not any(each.severity == "error" for each in found):
        found += raised
    return most_severe_first(list(_distinct(found)))


def _distinct(found: Sequence[Diagnosis]) -> Iterator[Diagnosis]:
    """Leave out repetitions, as several checks may read the same damaged file, and values of flags without effect."""
    first_words = [each.finding.partition(" ")[0] for each in found]
    idle = {word for each, word in zip(found, first_words, strict=True) if each.id == NO_EFFECT and word[:2] == "--"}
    seen = set[str]()
    for each, word in zip(found, first_words, strict=True):
        if each.finding not in seen and not (each.id == "CFG05" and word in idle):
            seen.add(each.finding)
            yield each


def _failed(check: Check, error: Exception) -> Diagnosis:
    name = f"{check.__module__.rpartition('.')[2].removesuffix('_checks')}.{check.__name__}"
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = "\n".join(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)
    return diagnosis(
        "CHECK01",
        f"the check {name} raised {type(error).__name__}: {error}\n{where}",
        remedy="report this message; the run may still be affected by what the check would have found",
        evidence={"check": name, "error": type(error).__name__},
    )
