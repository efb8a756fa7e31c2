"""What a server to start is: its command, environment, ports and log, and the machine that it runs on.

Two kinds, `SglangLaunch` and `ServeLaunch` (`furlong serve`), make commands; `start_engine` reserves the ports, starts
one process on each machine of an engine and gives a `LaunchedEngine`, which knows whether it came up and how it ended.
Where engines run is a list of `Place`s, so that whoever places them (`local_places` here, `cluster` with Ray) needs to
know nothing about servers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from furlong.core.cuda_allocator import without_expandable_segments
from furlong.core.process_environment import API_KEY_VARIABLE, api_key_environment
from furlong.errors import ConfigError, EngineError
from furlong.inference.sglang.client import headers_for
from furlong.inference.sglang.connections import BrokenConnectionError, Connections
from furlong.inference.supervisor.host import STOP_S, Host, HostProcess, Place, is_loopback
from furlong.inference.supervisor.log_tail import GOES_ON

logger = logging.getLogger(__name__)

TAIL_LINES = 30
ASK_S = 5.0  # for a starting server to answer
LOOK_S = 0.2  # between two looks at a starting server's process
MOST_PAUSE_S = 2.0  # between two questions to a starting server, each of which is a line of its log
PAUSE_FRAC = 0.125  # of the time that its start has taken
RENDEZVOUS_PORTS = 8  # that SGLang counts up from --dist-init-addr


EngineRole = Literal["regular", "prefill", "decode"]


@dataclass(frozen=True)
class Ports:
    """Ports of one engine, on its first machine. `rendezvous` is the first of `RENDEZVOUS_PORTS`.

    `bootstrap` is where engines that decode ask one that prefills for its caches.
    """

    http: int
    nccl: int
    rendezvous: int
    bootstrap: int | None = None


class Launch(Protocol):
    """A kind of server."""

    @property
    def api_key(self) -> str | None:
        """The key that its servers want."""
        ...

    @property
    def needs_rendezvous(self) -> bool:
        """Whether its processes find each other over ports, so that these have to be reserved."""
        ...

    def command(self, index: int, node: int, places: Sequence[Place], ports: Ports) -> list[str]:
        """The command of engine `index` on its machine number `node`."""
        ...

    def environment(self, index: int, place: Place) -> Mapping[str, str]:
        """Variables to be added to the environment of engine `index` on this place."""
        ...

    def role(self, index: int) -> EngineRole:
        """What engine `index` does of a request."""
        ...


@dataclass(frozen=True)
class GroupedLaunch:
    """Engines that are not all alike: engine `index` is started as `launches[index]` says, with the keys of all."""

    launches: Sequence[Launch]

    @property
    def api_key(self) -> str | None:
        """The key that its servers want."""
        return self.launches[0].api_key

    @property
    def needs_rendezvous(self) -> bool:
        """Whether ports have to be reserved by which processes find each other."""
        return self.launches[0].needs_rendezvous

    def command(self, index: int, node: int, places: Sequence[Place], ports: Ports) -> list[str]:
        """The command of engine `index` on its machine number `node`."""
        return self.launches[index].command(index, node, places, ports)

    def environment(self, index: int, place: Place) -> Mapping[str, str]:
        """Variables to be added to the environment of engine `index` on this place."""
        return self.launches[index].environment(index, place)

    def role(self, index: int) -> EngineRole:
        """What engine `index` does of a request."""
        return self.launches[index].role(index)


@dataclass(frozen=True)
class SglangLaunch:
    """SGLang 0.5.16, stock. `options` are ServerArgs by field name, beside those that furlong sets itself.

    `has_text` keeps the tokenizer in the server, for stop strings and the chat API. `is_colocated` lets the server give
    its memory to the trainer. Engine `index` draws with seed `seed + index`.
    """

    model_dir: Path
    num_gpus: int
    seed: int = 0
    api_key: str | None = None
    context_len: int | None = None
    has_text: bool = True
    is_colocated: bool = False
    return_routed_experts: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    needs_rendezvous: bool = True
    does: EngineRole = "regular"

    def command(self, index: int, node: int, places: Sequence[Place], ports: Ports) -> list[str]:
        """The command of engine `index` on its machine number `node`; all but the first serve no HTTP.

        Raises ConfigError for a machine that others reach, without a key.
        """
        pp_size = int(self.options.get("pp_size", 1))
        first = places[0].host.address
        _check_key(self.api_key, index, places[node].host.address)
        values: dict[str, Any] = {
            "model_path": str(self.model_dir),
            "host": places[node].host.address,
            "port": ports.http,
            "nccl_port": ports.nccl,
            "tp_size": self.num_gpus // pp_size,
            "base_gpu_id": places[node].first_gpu,
            "random_seed": self.seed + index,
            "skip_tokenizer_init": not self.has_text,
            "enable_memory_saver": self.is_colocated,
            "context_length": self.context_len,
            "enable_return_routed_experts": self.return_routed_experts,
            "dist_init_addr": f"{first}:{ports.rendezvous}",
        }
        if len(places) > 1:
            values |= {"nnodes": len(places), "node_rank": node}
        if self.does != "regular":
            values |= {"disaggregation_mode": self.does, "disaggregation_bootstrap_port": ports.bootstrap}
        return [*module_command("sglang.launch_server", self.api_key), *words_of(values | dict(self.options))]

    def environment(self, index: int, place: Place) -> Mapping[str, str]:
        """Variables to be added to its environment.

        /health generates a token by default, which ends a server whose cache is released; /health_generate still does.
        torch_memory_saver refuses memory that torch takes in segments that grow.
        Engines that hand caches on listen at an address that they would look up, where other machines may reach it.
        """
        del index
        split = {} if self.does == "regular" else {"SGLANG_HOST_IP": place.host.address}
        cpu = {"SGLANG_USE_CPU_ENGINE": "1"} if self.options.get("device") == "cpu" else {}
        colocated = without_expandable_segments(os.environ) if self.is_colocated else {}
        common = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", **api_key_environment(self.api_key)}
        return {**common, **split, **cpu, **colocated, **self.env}

    def role(self, index: int) -> EngineRole:
        """What every engine of it does."""
        del index
        return self.does


@dataclass(frozen=True)
class ServeLaunch:
    """`furlong serve`, the embedded engine. `dtype` is a torch dtype's name; `device` cuda is the place's first GPU."""

    model_dir: Path
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    api_key: str | None = None
    context_len: int | None = None
    num_slots: int = 128
    num_threads: int | None = None
    return_routed_experts: bool = False
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    needs_rendezvous: bool = False

    def command(self, index: int, node: int, places: Sequence[Place], ports: Ports) -> list[str]:
        """The command of engine `index`, which is one process. Raises EngineError for several machines.

        Raises ConfigError for a machine that others reach, without a key.
        """
        if len(places) != 1:
            raise EngineError(f"furlong serve runs on one machine, but engine {index} was given {len(places)}")
        _check_key(self.api_key, index, places[node].host.address)
        values: dict[str, Any] = {
            "model_path": str(self.model_dir),
            "host": places[node].host.address,
            "port": ports.http,
            "dtype": self.dtype,
            "device": f"cuda:{places[node].first_gpu}" if self.device == "cuda" else self.device,
            "max_running_requests": self.num_slots,
            "context_length": self.context_len,
            "threads": self.num_threads,
            "random_seed": self.seed + index,
            "enable_return_routed_experts": self.return_routed_experts,
        }
        return [sys.executable, "-m", "furlong", "serve", *words_of(values)]

    def environment(self, index: int, place: Place) -> Mapping[str, str]:
        """Variables to be added to its environment."""
        del index, place
        return {**api_key_environment(self.api_key), **self.env}

    def role(self, index: int) -> EngineRole:
        """It does all of a request."""
        del index
        return "regular"


def _check_key(key: str | None, index: int, address: str) -> None:
    """Raise ConfigError for a server without a key at an address that other machines reach."""
    if not key and not is_loopback(address):
        raise ConfigError(
            f"engine {index} is to listen at {address}, where other machines reach it, and whoever does can replace "
            f"its weights; give --sglang-api-key or {API_KEY_VARIABLE}"
        )


def module_command(module: str, key: str | None) -> list[str]:
    """The command of a module that takes its key as `--api-key`, without it: it is in `api_key_environment`."""
    return [sys.executable, "-m", *(["furlong.inference.supervisor.with_key"] if key else []), module]


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Options by field name as a command line: None and False are left out, True is a switch, a list its words.

    >>> words_of({"tp_size": 2, "skip_tokenizer_init": True, "api_key": None})
    ['--tp-size', '2', '--skip-tokenizer-init']
    """
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
    return words


def pause_after(started_s: float) -> float:
    """Seconds until a server that has been starting for `started_s` is asked again whether it is up.

    It is found an eighth of its time late at most, and not 2 s: of 150 s, in less than 100 questions.
    """
    return min(max(PAUSE_FRAC * started_s, LOOK_S), MOST_PAUSE_S)


@dataclass(eq=False)
class LaunchedEngine:
    """The processes of one engine, or of a router: the first of them serves HTTP at `url`."""

    name: str
    url: str
    processes: Sequence[HostProcess]
    api_key: str | None
    role: EngineRole = "regular"
    bootstrap_port: int | None = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def where(self) -> str:
        """Name, address and process, for messages."""
        return f"{self.name} at {self.url} ({', '.join(process.where for process in self.processes)})"

    async def death(self) -> str:
        """How its first process that ended did, with the last lines of that one's log; "" while all of them run."""
        for process in self.processes:
            code = await process.poll()
            if code is not None:
                how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return f"{self.name} at {self.url}: {process.where} {how}; {await self._log_of(process)}"
        return ""

    async def last_lines(self) -> str:
        """The last lines of the log of the process that serves HTTP."""
        return await self._log_of(self.processes[0])

    async def _log_of(self, process: HostProcess) -> str:
        lines = [line for line in await process.log_tail(TAIL_LINES) if line.strip()]
        if not lines:
            return "its log is empty"
        what = "the first exception and the last lines" if GOES_ON in lines else "the last lines"
        return f"{what} of its log:\n" + "\n".join(f"    {line}" for line in lines)

    async def is_up(self) -> bool:
        """Whether the server says that it is ready."""
        connections = Connections(self.url, headers_for(self.api_key))
        try:
            async with asyncio.timeout(ASK_S):
                status, _ = await connections.request("GET", "/health")
        except (BrokenConnectionError, TimeoutError) as error:
            logger.debug("%s is not up: %s", self.url, error)
            return False
        finally:
            await connections.close()
        return status == 200

    async def wait_until_up(self, deadline_s: float) -> None:
        """Return when the server answers. Raises EngineError with its log if it ends, or does not in `deadline_s`."""
        ask_at = 0.0
        while True:
            if why := await self.death():
                raise EngineError(f"{why}\nThe engine did not come up; its log says why")
            if time.monotonic() >= ask_at:
                if await self.is_up():
                    return await self.check_own()
                ask_at = time.monotonic() + pause_after(time.monotonic() - self.started_s)
            if time.monotonic() - self.started_s > deadline_s:
                raise EngineError(
                    f"{self.where} did not answer within {deadline_s:g} s; {await self.last_lines()}\n"
                    "Look there for what it waits for, or raise --sglang-server-start-timeout"
                )
            await asyncio.sleep(min(LOOK_S, max(ask_at - time.monotonic(), 0.0)))

    async def check_own(self) -> None:
        """See that what answers is this server. Raises EngineError naming another process that has its port."""
        first = self.processes[0]
        if stranger := await first.stranger_at(urlsplit(self.url).port or 0):
            raise EngineError(
                f"{self.name} was to listen at {self.url} ({first.where}), but {stranger} does, which would get the "
                "requests and weights of this run; start again, with other ports"
            )

    async def stop(self, grace_s: float = STOP_S) -> None:
        """End all of its processes; returns when they are gone."""
        await asyncio.gather(*(process.stop(grace_s) for process in self.processes))


async def start_engine(
    launch: Launch, index: int, places: Sequence[Place], *, log_dir: Path, port: int | None = None
) -> LaunchedEngine:
    """Start engine `index` on its places, one process on each; does not wait until it is up.

    `port` is that of its HTTP server, if it is fixed. Logs are `log_dir`/engine-INDEX.log, for further machines
    engine-INDEX-node-N.log. Raises ConfigError if a port is taken.
    """
    first = places[0].host
    reserved = await first.reserve_ports(1, first=port)
    http = reserved[0]
    nccl = rendezvous = 0
    bootstrap: int | None = None
    role = launch.role(index)
    if launch.needs_rendezvous:
        more = await first.reserve_ports(1 + RENDEZVOUS_PORTS)
        nccl, rendezvous = more[0], more[1]
        reserved += more
    if role == "prefill":
        [bootstrap] = await first.reserve_ports(1)
        reserved.append(bootstrap)
    processes: list[HostProcess] = []
    try:
        for node, place in enumerate(places):
            name = f"engine-{index}" if node == 0 else f"engine-{index}-node-{node}"
            command = launch.command(index, node, places, Ports(http, nccl, rendezvous, bootstrap))
            logger.info("engine %d: %s", index, shlex.join(command))
            started = await place.host.start(
                command,
                env=launch.environment(index, place),
                log=log_dir / f"{name}.log",
                ports=reserved if node == 0 else (),
            )
            processes.append(started)
    except BaseException:
        await first.release_ports(reserved)
        await asyncio.gather(*(process.stop() for process in processes))
        raise
    return LaunchedEngine(
        f"engine {index}",
        f"http://{first.address}:{http}",
        processes,
        launch.api_key,
        role=role,
        bootstrap_port=bootstrap,
    )


def local_places(host: Host, parts: Sequence[tuple[int, int]], *, first_gpu: int | None) -> list[list[Place]]:
    """Places of engines on one machine, by (first GPU, GPUs) of each, counted from `first_gpu`; None: on its CPUs."""
    if first_gpu is None:
        return [[Place(host)] for _ in parts]
    return [[Place(host, first_gpu + first, num_gpus)] for first, num_gpus in parts]
