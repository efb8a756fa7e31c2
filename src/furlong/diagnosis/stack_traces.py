"""Reads the stacks of several ranks, as Python's faulthandler writes them: who waits, and whom the others wait for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

WORK = "cluster/rank_actor.py"  # a thread below it does what the driver asked for
FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)
WAITS = ("torch/distributed/",)  # innermost functions there wait for other ranks


@dataclass(frozen=True)
class Doing:
    """What one rank does: the innermost function, and the innermost of furlong's that called it."""

    where: str
    caller: str
    waits: bool

    def text(self) -> str:
        """In words, such as `waits in all_reduce (...), from optim_step (...)`."""
        caller = f", from {self.caller}" if self.caller and self.caller != self.where else ""
        return f"{'waits in' if self.waits else 'is in'} {self.where}{caller}"


def doing_of(stacks: str) -> Doing | None:
    """What the thread that was asked for something does; None if none was, or the stacks are none."""
    for thread in re.split(r"\n\s*\n|(?=^(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE):
        if WORK not in thread:
            continue
        frames = [(m["path"], m["line"], m["name"]) for m in FRAME.finditer(thread)]
        own = next((f for f in frames if "/furlong/" in f[0] and WORK not in f[0]), None)
        return Doing(
            where=_place(frames[0]),
            caller="" if own is None else _place(own),
            waits=any(part in frames[0][0] for part in WAITS),
        )
    return None


def who_waits(stacks: Mapping[str, str]) -> str:
    """One line about all ranks: what those do that others wait for, first; "" if nobody was asked for anything."""
    found = {name: doing_of(text) for name, text in stacks.items()}
    silent = [f"{name} {text.strip()}" for name, text in stacks.items() if text.startswith("(")]
    busy = [f"{name} {each.text()}" for name, each in found.items() if each is not None and not each.waits]
    waiting: dict[str, list[str]] = {}
    for name, each in found.items():
        if each is not None and each.waits:
            waiting.setdefault(each.text(), []).append(name.partition(",")[0])
    parts = [*silent, *busy, *(f"{', '.join(names)}: {text}" for text, names in waiting.items())]
    return "; ".join(parts)


def _place(frame: tuple[str, str, str]) -> str:
    path, line, name = frame
    return f"{name} ({'/'.join(Path(path).parts[-2:])}:{line})"
