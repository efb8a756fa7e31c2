"""Checks of a run before it starts. A check is a function from a PreflightContext to diagnoses.

`CHECKS` lists them. None imports torch or transformers, unless a custom function does.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence

from furlong.config.sections import Config
from furlong.core.catalogue import Diagnosis, Problem, diagnosis, most_severe_first
from furlong.core.user_code import FRAMES, LIBRARIES
from furlong.diagnosis.preflight import checkpoint_checks as checkpoint
from furlong.diagnosis.preflight import data_checks as data
from furlong.diagnosis.preflight import flag_checks as flags
from furlong.diagnosis.preflight import machine_checks as machine
from furlong.diagnosis.preflight import model_checks as model
from furlong.diagnosis.preflight import path_checks as paths
from furlong.diagnosis.preflight.context import PreflightContext

Check = Callable[[PreflightContext], Iterable[Diagnosis]]

CHECKS: tuple[Check, ...] = (
    flags.flag_problems,
    flags.backend,
    flags.evaluation_sets,
    flags.chat_template,
    flags.kl_without_pull,
    flags.user_functions,
    flags.tool_tokens,
    flags.router_address,
    flags.rollout_dumps,
    model.model_folder,
    model.weights,
    checkpoint.folders_to_load,
    checkpoint.folder_to_save,
    model.reference_tokens,
    checkpoint.layout,
    checkpoint.resume_plan,
    model.no_template,
    model.templated_twice,
    model.of_another_family,
    model.rewritten_history,
    model.end_of_turn,
    model.stop_ids,
    data.files,
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
    model.kept_routers,
    model.own_head,
    machine.reproducibility,
    machine.outputs,
    paths.occupied_paths,
    machine.disk,
    machine.training_fits,
)

NEED_USER_CODE = {flags.evaluation_sets, flags.user_functions, flags.tool_tokens, flags.router_address, data.own_reward}


def preflight(config: Config, problems: Sequence[Problem] = (), *, checks: Sequence[Check] = CHECKS) -> list[Diagnosis]:
    """Run the checks and return their diagnoses, most severe first. `problems` are those of the flags themselves.

    Modules of user functions are imported in a child process meanwhile, so the checks that need them run last. A check
    that raises is reported as CHECK01.
    """
    context = PreflightContext(config, tuple(problems))
    trial = context.import_trial  # starts the child process
    diagnoses: dict[Check, list[Diagnosis]] = {check: [] for check in checks}
    try:
        for check in sorted(checks, key=lambda check: check in NEED_USER_CODE):
            try:
                diagnoses[check].extend(check(context))
            except Exception as error:  # noqa: BLE001  a check is a boundary: the others must still run
                diagnoses[check].append(_failed(check, error))
    finally:
        trial.close()
    return most_severe_first([each for check in checks for each in diagnoses[check]])


def _failed(check: Check, error: Exception) -> Diagnosis:
    name = f"{check.__module__.rpartition('.')[2].removesuffix('_checks')}.{check.__name__}"
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)][-FRAMES:]
    where = "\n".join(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames)
    return diagnosis(
        "CHECK01",
        f"the check {name} raised {type(error).__name__}: {error}\n{where}",
        remedy="report this message; the run may still be affected by what the check would have found",
        evidence={"check": name, "error": type(error).__name__},
    )
