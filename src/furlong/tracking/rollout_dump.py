"""Dumps of rollouts and evaluations: files of samples (`core.sample_file`), one for each."""

from __future__ import annotations

from collections.abc import Sequence

from furlong.core.sample import Group, Sample
from furlong.files.sample_file import load_samples, save_samples


class RolloutDumps:
    """Writes one dump per rollout and per evaluation, to the path `template` with `{rollout_id}`.

    Evaluations have `eval_` before the id; all sets of one evaluation share a file.
    """

    def __init__(self, template: str | None) -> None:
        self.template = template
        self._evaluated: tuple[int, list[Group], list[str]] = (-1, [], [])

    def save(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Write the groups of a training rollout; no effect without a template."""
        if self.template is not None:
            save_samples(self.template.format(rollout_id=rollout_id), rollout_id, groups)

    def save_evaluation(self, rollout_id: int, name: str, samples: Sequence[Sample]) -> None:
        """Write the samples of one evaluation set, together with earlier sets of the same evaluation."""
        if self.template is None:
            return
        if self._evaluated[0] != rollout_id:
            self._evaluated = (rollout_id, [], [])
        _, groups, names = self._evaluated
        new = _groups_of(samples)
        groups.extend(new)
        names.extend([name] * len(new))
        save_samples(self.template.format(rollout_id=f"eval_{rollout_id}"), rollout_id, groups, names=names)

    @staticmethod
    def load(template: str, rollout_id: int) -> list[Group]:
        """Read the groups of a training rollout."""
        return load_samples(template.format(rollout_id=rollout_id), rollout_id).groups


def _groups_of(samples: Sequence[Sample]) -> list[Group]:
    groups: list[Group] = []
    for sample in samples:
        if not groups or sample.group_index is None or sample.group_index != groups[-1].index:
            groups.append(Group(len(groups) if sample.group_index is None else sample.group_index, []))
        groups[-1].samples.append(sample)
    return groups
