"""One training rank: an actor that joins the process group and runs a `RoundWorker`. The rank side of `RayTrainer`.

It gets its configuration as JSON and builds everything itself. What it prints goes to a log file in the run's folder.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from furlong.cluster.background_saves import Writing
from furlong.cluster.lifeline import die_with_parent, own_address
from furlong.cluster.rank_failure import Failure
from furlong.cluster.rank_stacks import answer_with_stacks
from furlong.core.metric import Metrics
from furlong.core.trace import tracer
from furlong.core.weights import EngineAddress
from furlong.inference.supervisor.log_tail import STARTED_AGAIN
from furlong.interfaces import DeviceMemory, MemoryTransfer
from furlong.machine import (
    LOG_FORMAT,
    choose_threads,
    deterministic_kernels,
    disable_nccl_cumem,
    import_without_gc,
    set_gloo_interface,
)
from furlong.training.batch_split import RankPart
from furlong.training.offload import device_memory, empty_cache
from furlong.training.ranks import Ranks, join
from furlong.training.worker import RoundWorker
from furlong.weight_sync.rank_sync import RankSync
from furlong.weight_sync.weight_record import WeightRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """What every rank of a run is told.

    build: `module:function`, called as function(config_json, folder=, num_rollout=, ranks=) for the RankParts; it is
    named and not passed, so that no code travels. cwd, path: the driver's working directory and module search path.
    trace: the folder that traces are written to, if they are.
    """

    build: str
    config_json: str
    folder: str
    num_rollout: int
    cwd: str
    path: Sequence[str]
    log_level: str
    num_threads: int | None
    ranks_per_node: int
    backend: Literal["nccl", "gloo"] | None
    timeout_s: float
    deterministic: bool = False
    trace: str | None = None

    def log_of(self, rank: int) -> str:
        """The file that a rank writes its log to, on its machine."""
        return str(Path(self.folder) / "logs" / f"trainer-rank-{rank}.log")


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank runs."""

    node: str
    address: str
    process: int
    log: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.node} ({self.address})"


@dataclass(frozen=True)
class RankParts:
    """What a rank runs. `sync` makes its part of weight publication, given the engines' device types."""

    worker: RoundWorker
    sync: Callable[[Sequence[str]], RankSync]


class Build(Protocol):
    """The function that `Setting.build` names."""

    def __call__(self, config_json: str, *, folder: Path, num_rollout: int, ranks: Ranks) -> RankParts:
        """Build what runs on this rank, after it has joined its process group."""
        ...


class TrainerRank:
    """The actor. Every method returns what it promises or a `Failure`; it never raises, so that Ray wraps nothing."""

    def __init__(self, setting: Setting, ranks: Ranks) -> None:
        die_with_parent()
        if Path(setting.cwd).is_dir():  # not on every machine of a cluster
            os.chdir(setting.cwd)
        sys.path[:0] = [entry for entry in setting.path if entry not in sys.path]
        self._setting, self._ranks = setting, ranks
        self._log = setting.log_of(ranks.rank)
        _write_to(Path(self._log), setting.log_level)
        answer_with_stacks()
        # Batches lie read-only in Ray's object store and are read there.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._held = ExitStack()
        self._listener: socket.socket | None = None
        self._parts: RankParts | None = None
        self._sync: RankSync | None = None
        self._writing: Writing | None = None

    def whereabouts(self) -> Whereabouts:
        """Say where this rank runs."""
        return Whereabouts(socket.gethostname(), own_address(), os.getpid(), self._log)

    def sees(self, path: str) -> bool:
        """Whether this is there on the machine of this rank."""
        return Path(path).exists()

    def listen(self, address: str) -> int:
        """Take a free port for the rendezvous of the process group; it is this rank's from now on."""
        self._listener = socket.socket()
        self._listener.bind((address, 0))
        self._listener.listen()
        return int(self._listener.getsockname()[1])

    def start(self, address: str, port: int) -> Any:
        """Join the process group at `address`:`port` and build the model; returns its FLOPs model."""
        return self._tried(lambda: self._start(address, port))

    def _start(self, address: str, port: int) -> Any:
        setting, ranks = self._setting, self._ranks
        if setting.trace is not None:
            tracer.start(Path(setting.trace), f"trainer rank {ranks.rank}", place=1 + ranks.rank)
        if setting.deterministic:
            self._held.enter_context(deterministic_kernels())
        disable_nccl_cumem()
        on_gpu = torch.cuda.is_available()
        threads = choose_threads(setting.num_threads, num_parts=setting.ranks_per_node)
        torch.set_num_threads(threads.count)
        logger.info("rank %d of %d, %s, %d threads: %s", ranks.rank, ranks.world_size,
                    torch.cuda.get_device_name() if on_gpu else "on a CPU", threads.count, threads.reason)  # fmt: skip
        if ranks.world_size > 1:
            set_gloo_interface(own_address())
            join(
                rank=ranks.rank,
                world_size=ranks.world_size,
                address=address,
                port=port,
                backend=setting.backend or ("nccl" if on_gpu else "gloo"),
                timeout=timedelta(seconds=setting.timeout_s),
                listener=self._listener,
            )
        module, _, name = setting.build.partition(":")
        with import_without_gc(module):
            build: Build = getattr(importlib.import_module(module), name)
        self._parts = build(
            setting.config_json, folder=Path(setting.folder), num_rollout=setting.num_rollout, ranks=ranks
        )
        return self._parts.worker.flops

    def train(self, part: RankPart, preprocess_s: float) -> Metrics | Failure:
        """Run all optimizer steps of this rank's part of a rollout."""
        return self._tried(lambda: self.parts.worker.train_part(part, preprocess_s=preprocess_s))

    def save(self, folder: str) -> Failure | None:
        """Write this rank's part of a checkpoint."""
        return self._tried(lambda: self.parts.worker.save(Path(folder), is_first=self._ranks.rank == 0))

    def snapshot(self, folder: str) -> Failure | None:
        """Copy this rank's part of a checkpoint, and begin to write it while other calls come."""

        def copy() -> None:
            files = self.parts.worker.snapshot(Path(folder), is_first=self._ranks.rank == 0)
            self._writing = Writing(files, Path(folder), self._ranks.rank)

        return self._tried(copy)

    def writing(self) -> Failure | None:
        """What the write that `snapshot` began has failed with, if it has."""
        return None if self._writing is None else self._writing.failure

    def load(self, folder: str) -> Failure | None:
        """Restore what `save` wrote."""
        return self._tried(lambda: self.parts.worker.load(Path(folder)))

    def save_hf(self, folder: str) -> Failure | None:
        """Write this rank's part of a folder that transformers loads."""
        return self._tried(lambda: self.parts.worker.awake.save_hf(Path(folder)))

    def send_weights(self, addresses: Sequence[EngineAddress], version: int) -> WeightRecord | Failure | None:
        """Send this rank's part of the weights; rank 0 answers with the record of what was sent."""

        def send() -> WeightRecord | None:
            if self._sync is None:
                self._sync = self.parts.sync([str(address.info.get("device_type")) for address in addresses])
            sent = asyncio.run(self._sync.send_weights(addresses, version))
            sent.finish()  # what goes to another process is complete
            return sent if self._ranks.rank == 0 else None

        return self._tried(send)

    def resend(self, addresses: Sequence[EngineAddress], version: int) -> bool | Failure:
        """Load what was published as `version` into these servers, if it is kept."""
        return self._tried(lambda: self._sync is not None and asyncio.run(self._sync.resend(addresses, version)))

    def offload(self) -> MemoryTransfer | Failure:
        """Leave the device."""
        return self._tried(lambda: self.parts.worker.offload())

    def onload(self) -> MemoryTransfer | Failure:
        """Come back to the device."""
        return self._tried(lambda: self.parts.worker.onload())

    def empty_cache(self) -> Failure | None:
        """Give back memory of the device that no tensor has."""
        return self._tried(empty_cache)

    def device_memory(self) -> DeviceMemory | Failure | None:
        """Memory of the device; None on a CPU."""
        return self._tried(lambda: device_memory(self.parts.worker.backend.device))

    def close_sync(self) -> Failure | None:
        """Release what publication holds: groups, folders, buffers."""
        return self._tried(lambda: None if self._sync is None else asyncio.run(self._sync.close()))

    def end(self) -> None:
        """Write out what is buffered, before the process is killed."""
        tracer.stop()

    @property
    def parts(self) -> RankParts:
        """What was built by `start`."""
        assert self._parts is not None
        return self._parts

    def _tried(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            logger.exception("%s", type(error).__name__)
            return Failure.of(error)


def _write_to(path: Path, level: str) -> None:
    """Send everything that this process prints and logs to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if os.fstat(handle).st_size:
        os.write(handle, STARTED_AGAIN.encode())
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
    handler = logging.StreamHandler(open(2, "w", closefd=False, buffering=1))  # noqa: SIM115  open until the process ends
    handler.setFormatter(logging.Formatter(LOG_FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger("furlong")
    root.addHandler(handler)
    root.setLevel(level)
