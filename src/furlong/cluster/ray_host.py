"""Engine servers on the machines of the cluster: `RayHost` implements `inference.supervisor.process.Host` by an actor.

The actor starts processes with `LocalHost` in its own unmodified environment. They end with the actor: when
the run ends, when the actor is killed, and when the machine loses its Ray.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError

from furlong.cluster.actor_process import Failure, die_with_parent, local_address
from furlong.cluster.gpu_placement import Placement, Slot
from furlong.errors import EngineError
from furlong.inference.supervisor.process import STOP_S, Host, HostGpus, HostProcess, LocalHost, LocalProcess
from furlong.machine import set_gloo_interface

T = TypeVar("T")

SLOT_SHARE = 0.2  # of the CPU of an engine's first slot
KILLED = -9  # exit code of a process whose host is lost
START_S = 120.0  # for the first answer of a host
SEE_ALL_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}  # a host requests no GPU but assigns them to its servers


class EngineHost:
    """The actor. Methods return their result or a `Failure`."""

    def __init__(self, cwd: str) -> None:
        die_with_parent()
        set_gloo_interface(local_address())  # for servers, which inherit it
        if Path(cwd).is_dir():  # not on every machine of a cluster
            os.chdir(cwd)
        self._host = LocalHost()
        self._processes: dict[int, LocalProcess] = {}
        self._numbers = itertools.count()

    async def visible_gpus(self) -> list[str] | None:
        """Return the indices of the GPUs visible to servers here, in order; None if all are visible."""
        text = os.environ.get("CUDA_VISIBLE_DEVICES")
        return None if not text else text.split(",")

    async def reserve_ports(self, count: int, first: int | None) -> list[int] | Failure:
        """See `Host`."""
        return await _tried(self._host.reserve_ports(count, first=first))

    async def release_ports(self, ports: Sequence[int]) -> None:
        """See `Host`."""
        await self._host.release_ports(ports)

    async def start(
        self, command: Sequence[str], log: str, env: Mapping[str, str], ports: Sequence[int]
    ) -> tuple[int, int] | Failure:
        """Start a process; returns its number here, and its process id."""
        process = await _tried(self._host.start(command, log=Path(log), env=env, ports=ports))
        if isinstance(process, Failure):
            return process
        number = next(self._numbers)
        self._processes[number] = process
        return number, process.pid

    async def call_process(self, number: int, method: str, *arguments: Any) -> Any:
        """Call a method of a started process."""
        return await getattr(self._processes[number], method)(*arguments)


async def _tried(work: Awaitable[T]) -> T | Failure:
    try:
        return await work
    except Exception as error:  # noqa: BLE001  it is raised on the driver
        return Failure.of(error)


class RayHost(Host):
    """A machine of the cluster."""

    def __init__(self, actor: Any, address: str) -> None:
        self._actor, self.address = actor, address

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the actor. Raises its error, or EngineError if the actor is lost."""
        try:
            answer = await getattr(self._actor, method).remote(*arguments)
        except RayActorError as error:
            raise HostLostError(f"the machine {self.address} is lost: {' '.join(str(error).split())[:300]}") from None
        if isinstance(answer, Failure):
            raise answer.error(f"machine {self.address}")
        return answer

    async def reserve_ports(self, count: int, *, first: int | None = None) -> list[int]:
        """Reserve free ports there."""
        return await self.call("reserve_ports", count, first)

    async def release_ports(self, ports: Sequence[int]) -> None:
        """Free reserved ports."""
        await self.call("release_ports", list(ports))

    async def start(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, ports: Sequence[int] = ()
    ) -> RayProcess:
        """Start `command` there."""
        number, pid = await self.call("start", list(command), str(log.resolve()), dict(env or {}), list(ports))
        return RayProcess(self, number, pid)


class HostLostError(EngineError):
    """A machine, or the actor on it, is lost."""


@dataclass(frozen=True)
class RayProcess(HostProcess):
    """A process on a machine of the cluster."""

    host: RayHost
    number: int
    pid: int

    @property
    def where(self) -> str:  # noqa: D102
        return f"process {self.pid} on {self.host.address}"

    async def poll(self) -> int | None:
        """The exit code, None while it runs. KILLED if the host is lost."""
        return await self._call("poll", if_lost=lambda _: KILLED)

    async def stop(self, grace_s: float = STOP_S) -> None:
        """End it and all processes of its group."""
        await self._call("stop", grace_s, if_lost=lambda _: None)

    async def log_tail(self) -> list[str]:
        """The last lines of its log; before them its first exception, if it is further up."""
        return await self._call("log_tail", if_lost=lambda error: [str(error)])

    async def _call(self, method: str, *arguments: Any, if_lost: Callable[[HostLostError], Any]) -> Any:
        try:
            return await self.host.call("call_process", self.number, method, *arguments)
        except HostLostError as error:
            return if_lost(error)


def engine_placements(placement: Placement, *, environment: Mapping[str, str]) -> list[list[HostGpus]]:
    """Start a host on each machine of the engines, for the life of the placement; returns the places of each engine."""
    hosts: dict[str, RayHost] = {}
    visible: dict[str, list[str] | None] = {}
    for slot in (slot for engine in placement.engines for slot in engine):
        if slot.node_id in hosts:
            continue
        actor_class: Any = ray.remote(EngineHost)
        actor = actor_class.options(
            num_cpus=SLOT_SHARE,
            scheduling_strategy=placement.strategy(slot),
            runtime_env={"env_vars": {**SEE_ALL_GPUS, **environment}} if environment or slot.gpu is not None else None,
        ).remote(os.getcwd())
        hosts[slot.node_id] = RayHost(actor, slot.address)
        if slot.gpu is not None:
            visible[slot.node_id] = ray.get(actor.visible_gpus.remote(), timeout=START_S)
    return [_places(engine, lambda slot: hosts[slot.node_id], visible) for engine in placement.engines]


def _places(
    engine: Sequence[Slot], host: Callable[[Slot], RayHost], visible: Mapping[str, list[str] | None]
) -> list[HostGpus]:
    places: list[HostGpus] = []
    for _, group in itertools.groupby(engine, key=lambda slot: slot.node_id):
        slots = list(group)
        if slots[0].gpu is None:
            places.append(HostGpus(host(slots[0])))
            continue
        numbers = [_position(slot, visible.get(slot.node_id)) for slot in slots]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise EngineError(
                f"Ray gave an engine the GPUs {numbers} of {slots[0].address}, which are not consecutive, as "
                "SGLang requires; other jobs use GPUs between them: wait until the machine is free"
            )
        places.append(HostGpus(host(slots[0]), numbers[0], len(numbers)))
    return places


def _position(slot: Slot, visible: list[str] | None) -> int:
    assert slot.gpu is not None
    return slot.gpu if visible is None else visible.index(str(slot.gpu))
