"""Which server gets a request: the one that knows its prefix, else the one with the fewest requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from furlong.inference.sglang.server import SglangServer

REMEMBERED = 65_536  # sessions and prompts; the oldest are forgotten
UNEVEN = 64  # requests that a server may have beyond the least loaded one before it stops being preferred


class Placement:
    """Keeps the samples of one prompt, and the turns of one session, on one server, unless that overloads it."""

    def __init__(self) -> None:
        self._homes: OrderedDict[object, SglangServer] = OrderedDict()

    def choose(self, usable: Sequence[SglangServer], prompt: Sequence[int], session: str | None) -> SglangServer:
        """One of the `usable` servers, of which there is at least one."""
        keys: list[object] = [] if session is None else [session]
        keys.append(hash(tuple(prompt)))
        least = min(usable, key=lambda server: server.placed)
        known = [self._homes[key] for key in keys if key in self._homes]
        near = [server for server in known if server in usable and server.placed <= least.placed + UNEVEN]
        chosen = near[0] if near else least
        for key in keys:
            self._homes[key] = chosen
            self._homes.move_to_end(key)
        while len(self._homes) > REMEMBERED:
            self._homes.popitem(last=False)
        return chosen
