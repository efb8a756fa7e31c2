"""Dumps of rollouts and evaluations: files of samples (`files.sample_file`), one for each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from furlong.core.sample import Group, Sample
from furlong.errors import DataError
from furlong.files.sample_file import load_samples, save_samples

logger = logging.getLogger(__name__)

SAMPLES = "samples/{rollout_id}.safetensors"  # in the run folder: the newest, for the run page
MAX_TOKENS = 1_000_000  # of one of them: about 15 MB
EVALUATION = "eval_"


class RolloutDumps:
    """Writes one dump per rollout and per evaluation, to the path `template` with `{rollout_id}`.

    Evaluations have `eval_` before the id; all sets of one evaluation share a file. newest: of rollouts, and of
    evaluations, only so many dumps stay, each with the first groups up to `MAX_TOKENS`; one that cannot be written is
    a warning. None keeps everything, and a dump that cannot be written raises OSError or DataError.
    """

    def __init__(self, template: str | None, *, newest: int | None = None) -> None:
        self.template = template
        self._newest = newest
        self._problems: set[str] = set()
        self._evaluated: tuple[int, list[Group], list[str]] = (-1, [], [])

    def save(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Write the groups of a training rollout; no effect without a template."""
        self._write("", rollout_id, groups, [""] * len(groups))

    def save_evaluation(self, rollout_id: int, name: str, samples: Sequence[Sample]) -> None:
        """Write the samples of one evaluation set, together with earlier sets of the same evaluation."""
        if self._evaluated[0] != rollout_id:
            self._evaluated = (rollout_id, [], [])
        _, groups, names = self._evaluated
        new = _groups_of(samples)
        groups.extend(new)
        names.extend([name] * len(new))
        self._write(EVALUATION, rollout_id, groups, names)

    @staticmethod
    def load(template: str, rollout_id: int) -> list[Group]:
        """Read the groups of a training rollout."""
        return load_samples(template.format(rollout_id=rollout_id), rollout_id).groups

    def _write(self, prefix: str, rollout_id: int, groups: Sequence[Group], names: Sequence[str]) -> None:
        if self.template is None:
            return
        path = Path(self.template.replace("{rollout_id}", f"{prefix}{rollout_id}"))
        if self._newest is None:
            save_samples(path, rollout_id, groups, names=names)
            return
        count = _num_within(groups, MAX_TOKENS)
        try:
            save_samples(path, rollout_id, groups[:count], names=names[:count])
            self._remove_old(path, prefix)
        except (DataError, OSError, SafetensorError) as error:
            if (problem := str(error)) not in self._problems:
                self._problems.add(problem)
                logger.warning("samples for the run page are not saved: %s; --keep-samples 0 saves none", problem)

    def _remove_old(self, path: Path, prefix: str) -> None:
        assert self._newest is not None
        files = {each.stem.removeprefix(prefix): each for each in path.parent.glob(f"{prefix}*{path.suffix}")}
        numbers = sorted(int(number) for number in files if number.isdecimal())
        for number in numbers[: -self._newest]:
            files[str(number)].unlink(missing_ok=True)


def _num_within(groups: Sequence[Group], most: int) -> int:
    total = 0
    for i, group in enumerate(groups):
        total += sum(len(sample.tokens) for sample in group.samples)
        if total > most:
            return max(i, 1)
    return len(groups)


def _groups_of(samples: Sequence[Sample]) -> list[Group]:
    groups: list[Group] = []
    for sample in samples:
        if not groups or sample.group_index is None or sample.group_index != groups[-1].index:
            groups.append(Group(len(groups) if sample.group_index is None else sample.group_index, []))
        groups[-1].samples.append(sample)
    return groups
