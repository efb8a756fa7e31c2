"""The modules `slime.*` and `miles.*` for functions written for slime or Miles: names of furlong under theirs.

`install` adds a finder to `sys.meta_path`; user modules are imported after that. If a distribution `slime` or `miles`
is installed, its own modules are used and a warning is logged. A checkout on `sys.path`, which is not installed, does
not take precedence, so functions in it get furlong's classes.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from furlong.core.text import did_you_mean

PACKAGES = ("slime", "miles")
TABLE = "furlong.slime_api.table"  # above this layer: imported when the first of these modules is

logger = logging.getLogger(__name__)


class _NameTable(Protocol):
    """What `furlong.slime_api.table` contains: targets by module and name, and remedies for the rest."""

    NAMES: Mapping[str, Mapping[str, str]]

    def remedy(self, module: str, name: str | None = None) -> str:
        """Return what to do about a module, or a name in one, that furlong does not have."""
        ...


class NotInFurlongError(ModuleNotFoundError):
    """A module or a name of slime or Miles that furlong does not have: an ImportError that says what to do."""


class SlimeFinder:
    """Finds a package and its submodules. It has the interface of entries in `sys.meta_path` and of loaders."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  the interface of finders
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of the table, None for modules of others.

        Raises NotInFurlongError, with what to do, for modules of the package that furlong does not have.
        """
        if fullname.partition(".")[0] != self.package:
            return None
        table = _table()
        if fullname not in table.NAMES:
            raise NotInFurlongError(f"furlong has no module {fullname}; {table.remedy(fullname)}", name=fullname)
        is_package = any(name.startswith(f"{fullname}.") for name in table.NAMES)
        return importlib.machinery.ModuleSpec(fullname, cast("Any", self), origin="furlong", is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return a module that resolves its names on first use."""
        return SlimeModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are resolved on first use."""


class SlimeModule(ModuleType):
    """A module of slime or Miles whose names are imported from furlong on first use."""

    def __getattr__(self, name: str) -> Any:
        """Import a name. Raises NotInFurlongError with what to do if furlong does not have it."""
        if name == "__all__":
            return sorted(_table().NAMES[self.__name__])
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        table = _table()
        if f"{self.__name__}.{name}" in table.NAMES:
            return importlib.import_module(f"{self.__name__}.{name}")
        module, _, attribute = table.NAMES[self.__name__].get(name, "").partition(":")
        if not module or importlib.util.find_spec(module) is None:
            similar = "" if module else did_you_mean(name, table.NAMES[self.__name__])[1]
            fix = similar or table.remedy(self.__name__, name)
            raise NotInFurlongError(f"{self.__name__} of furlong has no {name}; {fix}", name=self.__name__)
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *_table().NAMES[self.__name__]})


def install() -> None:
    """Make `import slime` and `import miles` find furlong's modules, unless they are installed. Idempotent."""
    found = {finder.package for finder in sys.meta_path if isinstance(finder, SlimeFinder)}
    for package in (name for name in PACKAGES if name not in found):
        if (origin := _installed(package)) is None:
            sys.meta_path.insert(0, cast("Any", SlimeFinder(package)))
        else:
            logger.warning(
                "%s is installed (%s): functions that import it get its own classes, which this run cannot use; write "
                "`from furlong import Sample`, or run in an environment without %s",
                package, origin, package,
            )  # fmt: skip


def _installed(package: str) -> str | None:
    module = sys.modules.get(package)
    if module is not None and not isinstance(module, SlimeModule):
        return str(getattr(module, "__file__", None) or "imported")
    for distribution in importlib.metadata.distributions(name=package):
        folder = Path(str(distribution.locate_file("")))
        if folder.name.endswith("-packages"):  # not the metadata that a build left in a checkout
            return f"{package} {distribution.version} in {folder}"
    return None


def _table() -> _NameTable:
    return cast("_NameTable", importlib.import_module(TABLE))
