"""Objects of Python that `furlong.train` was called with, where flags have paths: functions, classes and data.

What a worker process can import has the path `module:name`. Anything else, such as a closure or what a notebook or a
script defines, is in the module `python` of this process, with the path `python:name`. Worker processes that the run
starts on this machine get it by cloudpickle, through their pipe: nothing is unpickled from a file or a network.
"""

from __future__ import annotations

import base64
import functools
import io
import pickle
import re
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from types import CodeType, ModuleType
from typing import Any

from furlong.errors import ConfigError

PREFIX = "python:"


class _UserObjects(ModuleType):
    """The module `python`. In a worker, attributes are unpickled on first use."""

    __file__ = None
    packed: dict[str, str] = {}  # noqa: RUF012  one module per process

    def __getattr__(self, name: str) -> Any:
        if name not in self.packed:
            raise AttributeError(name)
        try:
            value = pickle.loads(base64.b64decode(self.packed[name]))
        except Exception as error:  # noqa: BLE001  what the object raises
            raise ConfigError(
                f"{PREFIX}{name} cannot be created in a worker process: {type(error).__name__}: {error}; put it into a "
                "file and give file.py:name"
            ) from None
        del self.packed[name]
        setattr(self, name, value)
        return value


USER_OBJECTS = _UserObjects("python")


def object_name(path: Any) -> str | None:
    """Return the name of the object that a path is of, None for other paths.

    >>> object_name("python:Env.rubric"), object_name("package.module:reward")
    ('Env', None)
    """
    is_object = isinstance(path, str) and path.startswith(PREFIX)
    return path.removeprefix(PREFIX).partition(".")[0] if is_object else None


def find_object(path: str) -> Any:
    """Return the object with a path. Raises ConfigError in a process that was not given it."""
    try:
        return getattr(USER_OBJECTS, str(object_name(path)))
    except AttributeError:
        raise ConfigError(
            f"{path} is an object of the program that called furlong.train; call it there, or put it into a file"
        ) from None


def set_objects(objects: Mapping[str, Any]) -> None:
    """Replace the objects of this process."""
    for name in set(vars(USER_OBJECTS)) - set(vars(ModuleType("python"))):
        delattr(USER_OBJECTS, name)
    vars(USER_OBJECTS).update(objects)


def name_of(value: Any) -> str:
    """Return an identifier for an object: its own name, or that of its class."""
    return re.sub(r"\W+", "_", getattr(value, "__name__", type(value).__name__)).strip("_") or "function"


def import_path(value: Any) -> str | None:
    """Return `module:name` of what another process can import; None for anything else."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not _is_importable(module):
        return None
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    return f"{module}:{name}" if target is value else None


def _is_importable(module: str) -> bool:
    return module != "__main__" and PathFinder.find_spec(module.partition(".")[0]) is not None


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def packed(name: str) -> str:
    """Return an object for a worker process, as text. Raises ConfigError if it cannot be sent."""
    import cloudpickle

    known: Any = cloudpickle.Pickler.dispatch_table

    def with_file(code: CodeType) -> tuple[Any, tuple[Any, ...]]:  # cloudpickle leaves out the file, which errors name
        made, arguments = known[CodeType](code)
        return made, tuple(code.co_filename if each == "<dynamic-code>" else each for each in arguments)

    def with_cache(function: Any) -> tuple[Any, tuple[Any, ...]]:  # of lru_cache, which pickle stores as a name
        return _cached, (function.__wrapped__, function.cache_parameters())

    class Pickler(cloudpickle.Pickler):
        dispatch_table = known.new_child({CodeType: with_file, type(functools.cache(repr)): with_cache})

    buffer = io.BytesIO()
    value = find_object(PREFIX + name)
    module = sys.modules.get(str(getattr(value, "__module__", "")))
    by_value = module is not None and module.__name__ != "__main__" and not _is_importable(module.__name__)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        Pickler(buffer).dump(value)
        return base64.b64encode(buffer.getvalue()).decode()
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sent to a worker process: {type(error).__name__}: {error}; create what it uses inside "
            "of it, or put it into a file and give file.py:name"
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
