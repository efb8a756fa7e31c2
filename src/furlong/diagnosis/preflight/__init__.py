"""Checks of a run before it starts. A check is a function from a PreflightContext to diagnoses.

`CHECKS` lists them. None imports torch or transformers, unless a custom function does.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

from furlong.catalogue import NO_EFFECT, Diagnosis, Problem, diagnosis, most_severe_first
from furlong.config.sections import Config
from furlong.core.user_code import FRAMES, LIBRARIES
from furlong.diagnosis.preflight import checkpoint_checks as checkpoint
from furlong.diagnosis.preflight import data_checks as data
from furlong.diagnosis.preflight import flag_checks as flags
from furlong.diagnosis.preflight import machine_checks as machine
from furlong.diagnosis.preflight import model_checks as model
from furlong.diagnosis.preflight import path_checks as paths
from furlong.diagnosis.preflight import resume_checks as resume
from furlong.diagnosis.preflight import weight_checks as stored
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.errors import CheckpointError, ConfigError, DataError, FurlongError, RewardError, RolloutError

logger = logging.getLogger(__name__)

Check = Callable[[PreflightContext], Iterable[Diagnosis]]

CHECKS: tuple[Check, ...] = (
    flags.flag_problems,
    flags.accepted_flags,
    flags.backend,
    flags.evaluation_sets,
    flags.chat_template,
    flags.context_length,
    flags.kl_without_pull,
    flags.user_functions,
    flags.tool_tokens,
    model.model_folder,
    stored.weights,
    stored.megatron_checkpoint,
    stored.embedding,
    stored.tied_head,
    checkpoint.folders_to_load,
    checkpoint.folder_to_save,
    stored.reference_tokens,
    checkpoint.layout,
    checkpoint.resume_plan,
    resume.checkpoint_model,
    resume.trained_parameters,
    resume.checkpoint_data,
    resume.rollout_dumps,
    model.no_template,
    model.templated_twice,
    model.of_another_family,
    model.rewritten_history,
    model.end_of_turn,
    model.stop_ids,
    data.files,
    data.streamed_slice,
    data.rows,
    data.prompts_again,
    data.lengths,
    data.own_reward,
    data.verifier_and_labels,
    machine.remote_server,
    machine.versions,
    machine.tracker_package,
    machine.threads,
    machine.gpus,
    machine.ray_cluster,
    machine.occupied_gpus,
    machine.engine_servers,
    machine.device,
    model.kept_routers,
    model.own_head,
    machine.reproducibility,
    machine.outputs,
    paths.occupied_paths,
    machine.disk,
    machine.training_fits,
)

# Rows of what a check refuses with an error of furlong; the first that fits.
REFUSED_AS: dict[type[FurlongError], str] = {
    CheckpointError: "CKPT01",
    DataError: "DATA01",
    RolloutError: "DATA01",
    RewardError: "REW01",
    FurlongError: "CFG05",
}


def preflight(config: Config, problems: Sequence[Problem] = (), *, checks: Sequence[Check] = CHECKS) -> list[Diagnosis]:
    """Run the checks and return their diagnoses, most severe first. `problems` are those of the flags themselves.

    An input that a check refuses with furlong's own error is reported as a problem of that input. Another exception is
    CHECK01, unless there is an error already: the check may depend on what that error is about, and runs again once it
    is corrected.
    """
    context = PreflightContext(config, tuple(problems))
    diagnoses: dict[Check, list[Diagnosis]] = {check: [] for check in checks}
    raised: list[tuple[Check, Exception]] = []
    for check in checks:
        try:
            diagnoses[check].extend(check(context))
        except FurlongError as error:
            diagnoses[check].extend(_refused(error))
        except Exception as error:  # noqa: BLE001  a check is a boundary: the others must still run
            raised.append((check, error))
    has_error = any(each.severity == "error" for found in diagnoses.values() for each in found)
    for check, error in raised:
        if has_error:
            logger.debug("the check %s was skipped", _name(check), exc_info=error)
        else:
            diagnoses[check].append(_failed(check, error))
    return most_severe_first(list(_distinct(each for check in checks for each in diagnoses[check])))


def _refused(error: FurlongError) -> Iterator[Diagnosis]:
    """Report an input that a check refused, in the row of its kind."""
    row = next(row for kind, row in REFUSED_AS.items() if isinstance(error, kind))
    texts = error.problems if isinstance(error, ConfigError) else (str(error),)
    yield from (flags.from_problem(text, row=row) for text in texts)


def _distinct(diagnoses: Iterable[Diagnosis]) -> Iterator[Diagnosis]:
    """Leave out repetitions, in any row, as several checks may read the same damaged file.

    What is wrong with the value of a flag that has no effect is left out, too.
    """
    found = list(diagnoses)
    idle = {word for each in found if each.id == NO_EFFECT and (word := _first_word(each)).startswith("--")}
    seen = set[str]()
    for each in found:
        if each.finding not in seen and not (each.id == "CFG05" and _first_word(each) in idle):
            seen.add(each.finding)
            yield each


def _first_word(found: Diagnosis) -> str:
    return found.finding.partition(" ")[0]


def _name(check: Check) -> str:
    return f"{check.__module__.rpartition('.')[2].removesuffix('_checks')}.{check.__name__}"


def _failed(check: Check, error: Exception) -> Diagnosis:
    name = _name(check)
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)][-FRAMES:]
    where = "\n".join(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)
    return diagnosis(
        "CHECK01",
        f"the check {name} raised {type(error).__name__}: {error}\n{where}",
        remedy="report this message; the run may still be affected by what the check would have found",
        evidence={"check": name, "error": type(error).__name__},
    )
