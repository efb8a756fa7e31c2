"""What a pickle says, without doing it: of every object the name of its class, its arguments and its state.

A pickle is a program that imports and calls what it names. Here nothing is imported or called: values, tuples, lists
and dictionaries are made, and everything else becomes an `Inert`. The standard library takes the bytes apart.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import Any

from furlong.errors import CheckpointError

# `None` as an argument of an opcode says that it takes none.
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT")
TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}
SIZES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = frozenset(("PROTO", "FRAME"))


@dataclass(eq=False)
class Inert:
    """An object that was not made. `name`: of its class or function, with the module; a class itself has no `args`."""

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def get(self, key: str) -> Any:
        """An attribute that it would have, None without it."""
        return self.state.get(key) if isinstance(self.state, dict) else None


class _Machine:
    """The stack and the memory of a pickle while it is read."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for code, argument, place in pickletools.genops(data):
            if code.name == "STOP":
                return self.stack.pop()
            try:
                self._do(code.name, argument)
            except (IndexError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"a damaged pickle: {code.name} at byte {place}: {error!r}") from error
        raise CheckpointError("a pickle without an end")

    def _do(self, name: str, argument: Any) -> None:
        push, pop = self.stack.append, self.stack.pop
        if name in NUMBERS or name in TEXTS:
            push(argument)
        elif name in CONSTANTS:
            push(CONSTANTS[name])
        elif name in EMPTY:
            push(EMPTY[name]())
        elif name in SIZES:
            push(tuple(self._last(SIZES[name])))
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[len(self.memo) if argument is None else int(argument)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            push(self.memo[int(argument)])
        elif name in ("TUPLE", "LIST"):
            push((tuple if name == "TUPLE" else list)(self._since_mark()))
        elif name == "GLOBAL":
            push(Inert(".".join(str(argument).split(" "))))
        elif name == "STACK_GLOBAL":
            module, attribute = self._last(2)
            push(Inert(f"{module}.{attribute}"))
        elif name in ("NEWOBJ", "REDUCE"):
            what, args = self._last(2)
            push(Inert(what.name, tuple(args)))
        elif name == "BINPERSID":  # of torch.save: a tensor's storage
            push(Inert("persistent", (pop(),)))
        elif name == "NEWOBJ_EX":
            what, args, _ = self._last(3)
            push(Inert(what.name, tuple(args)))
        else:
            self._change(name, pop)

    def _change(self, name: str, pop: Any) -> None:
        """What changes the object on top of the stack."""
        if name == "BUILD":
            state = pop()
            self.stack[-1].state = state
        elif name in ("SETITEM", "SETITEMS"):
            values = self._last(2) if name == "SETITEM" else self._since_mark()
            owner = self.stack[-1].items if isinstance(self.stack[-1], Inert) else self.stack[-1]
            owner.update(zip(values[::2], values[1::2], strict=True))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            values = self._last(1) if name == "APPEND" else self._since_mark()
            self.stack[-1].extend(values)
        elif name not in IGNORED:
            raise CheckpointError(f"a pickle with {name}, which checkpoints do not have")

    def _last(self, count: int) -> list[Any]:
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _since_mark(self) -> list[Any]:
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values


def read_inert(data: bytes) -> Any:
    """Read a pickle without making its objects. Raises CheckpointError for one that is damaged."""
    try:
        return _Machine().run(data)
    except ValueError as error:  # of pickletools
        raise CheckpointError(f"a damaged pickle: {error}") from error
