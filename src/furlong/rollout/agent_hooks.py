"""`setup(args)`, `teardown(args)` and `abort(sample)` beside an agent function or in the class of an environment."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

from furlong.core.event_loop import call_in_thread
from furlong.core.user_code import is_async, with_hook_errors
from furlong.core.user_modules import import_module_of
from furlong.errors import HookError
from furlong.rollout.environment_workers import close_environment_workers


class AgentHooks:
    """Calls `setup` of each module or class before the first episode, and `teardown` at the end of the run.

    owners: by the flag that names them, for messages. Functions may be async; others run in a thread. `tear_down` is
    also called if the run fails or gets SIGTERM. Errors are HookErrors. has_processes: whether episodes run in other
    processes, which do not see what `setup` assigns.
    """

    def __init__(self, owners: Mapping[str, Any], args: Any, *, has_processes: bool = False) -> None:
        self._owners, self._args, self._has_processes = dict(owners), args, has_processes
        self._done: list[str] = []

    async def set_up(self) -> None:
        """Call `setup(args)` of each owner."""
        for name, owner in self._owners.items():
            self._done.append(name)  # what a failed setup has started needs its teardown
            before = _assigned(owner)
            await self._call(name, owner, "setup")
            after = _assigned(owner)
            changed = [key for key, value in after.items() if key not in before or before[key] is not value]
            if self._has_processes and changed:
                raise HookError(
                    f"{name}: setup assigned {', '.join(changed)}, which the processes of --env-workers do not see; "
                    "pass values in os.environ or a file, or use --env-workers thread"
                )

    async def tear_down(self) -> None:
        """End the processes of environments, then call `teardown(args)` of the owners that were set up, last one first.

        The first error is raised.
        """
        await close_environment_workers()
        names, self._done = self._done[::-1], []
        results = [
            (await asyncio.gather(self._call(name, self._owners[name], "teardown"), return_exceptions=True))[0]
            for name in names
        ]
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def _call(self, name: str, owner: Any, method: str) -> None:
        if callable(function := getattr(owner, method, None)):
            await call_hook(with_hook_errors(function, f"{name}: {method}"), self._args)


def _assigned(owner: Any) -> dict[str, Any]:
    """Return the attributes of a class, and the names of its module."""
    module = sys.modules.get(str(getattr(owner, "__module__", "")))
    return dict(vars(owner)) | ({} if module is None else dict(vars(module)))


def hook_beside(path: str, name: str) -> Callable[..., Any] | None:
    """Return a function of the module of `path`, None if it has none of that name."""
    function = getattr(import_module_of(path), name, None)
    return function if callable(function) else None


async def call_hook(function: Callable[..., Any], *values: Any) -> None:
    """Call a function that may be async; others run in a thread."""
    if is_async(function):
        await function(*values)
        return
    _, error = await call_in_thread(lambda: function(*values), name=getattr(function, "__name__", "hook"))
    if error is not None:
        raise error
