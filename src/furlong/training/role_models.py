"""The models of a run by role, for every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from furlong.errors import TrainerError
from furlong.interfaces import Role

M = TypeVar("M")


class RoleModels(Generic[M]):
    """The trained actor, and frozen models, which are built on first use.

    folders: of frozen models. load: builds one from a folder. new: builds one whose weights the caller replaces.
    diverged: frozen models whose weights are no longer those of their folder.
    """

    def __init__(
        self, actor: M, folders: Mapping[Role, Path], *, load: Callable[[Path], M], new: Callable[[], M]
    ) -> None:
        self._of: dict[Role, M] = {"actor": actor}
        self._folders, self._load, self._new = folders, load, new
        self.diverged: set[Role] = set()

    def __getitem__(self, role: Role) -> M:
        """Return a model. Raises TrainerError for a role that this run does not have."""
        if role not in self._of:
            if role not in self._folders:
                raise TrainerError(f"this run has no model {role!r}, only {sorted({*self._folders, *self._of})}")
            self._of[role] = self._load(self._folders[role])
        return self._of[role]

    def __iter__(self) -> Iterator[M]:
        """Yield all models that are built."""
        yield from self._of.values()

    def replaced(self, role: Role) -> M:
        """Return the frozen model `role`, whose weights the caller replaces."""
        if role not in self._of:
            self._of[role] = self._new()
        self.diverged.add(role)
        return self._of[role]

    def source_and_target(self, source: Role, target: Role) -> tuple[M, M]:
        """Return the models of a copy. Raises TrainerError unless `target` is a frozen model other than `source`."""
        if target == "actor" or target == source:
            raise TrainerError(f"copy_weights({source!r}, {target!r}): only a frozen model can be replaced, by another")
        return self[source], self.replaced(target)
