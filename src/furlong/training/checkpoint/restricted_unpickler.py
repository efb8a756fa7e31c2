"""Unpickle checkpoint metadata without importing or calling anything that the pickle names.

`pickle` imports classes and calls functions only through `Unpickler.find_class`. Here it returns placeholder classes
that record their arguments and state, and a few built-in types in `EXACT`. The index of a checkpoint may name only the
modules in `ALLOWED`; `common.pt` contains the writer's whole argument namespace, so every class in it is a placeholder.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from typing import Any

import torch

from furlong.errors import CheckpointError

# Modules whose classes torch.distributed.checkpoint and Megatron-core store in the index.
ALLOWED = ("torch.distributed.checkpoint", "megatron.core.dist_checkpointing", "torch.serialization", "pathlib")
ENUM_LOOKUP = ("builtins.getattr", "__builtin__.getattr")  # how Python 3.11.0 to 3.11.3 pickle the member of an enum
EXACT: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
}


class Placeholder:
    """Stands for an object of the pickled class `name`. args: of its constructor; state: what `__setstate__` got."""

    name = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **_: Any) -> Placeholder:
        """Record the arguments of a constructor or function."""
        placeholder = super().__new__(cls)
        placeholder.args = args
        return placeholder

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None:
        """Ignore items of list-like objects."""

    def extend(self, values: Iterable[Any]) -> None:
        """Ignore items of list-like objects."""

    def get(self, key: str) -> Any:
        """Return an attribute of the pickled object, None without it."""
        return self.state.get(key) if isinstance(self.state, dict) else None


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickles placeholders. `any_class`: accept classes of all modules, otherwise those of `ALLOWED` only."""

    def __init__(self, data: bytes, *, any_class: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._any_class = any_class
        self._classes: dict[str, type[Placeholder]] = {}  # per pickle: state set on a class affects no other

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the placeholder class of a name. Raises CheckpointError for one that is not allowed."""
        if exact := EXACT.get((module_name, global_name)):
            return exact
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        name = f"{module_name}.{global_name}"
        if not (self._any_class or name in ENUM_LOOKUP or any(name.startswith(f"{module}.") for module in ALLOWED)):
            raise CheckpointError(f"the pickle names {name}, which checkpoint metadata does not contain")
        return self._classes.setdefault(name, type("Placeholder", (Placeholder,), {"name": name}))

    def persistent_load(self, pid: Any) -> Any:
        """Return a placeholder for a tensor's storage, as torch.save refers to it."""
        return Placeholder(pid)


def unpickle(data: bytes, *, any_class: bool = False) -> Any:
    """Unpickle `data` into built-in types and placeholders. Raises CheckpointError if it is damaged or not allowed."""
    try:
        return RestrictedUnpickler(data, any_class=any_class).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle makes the opcodes fail in many ways
        raise CheckpointError(f"damaged pickle: {type(error).__name__}: {error}") from error
