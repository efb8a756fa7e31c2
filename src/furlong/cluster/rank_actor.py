"""One training rank: an actor that joins the process group and runs a `RoundWorker` for `RayTrainer`.

It receives its configuration as JSON and builds everything itself. Its output goes to a log file in the run's folder.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from furlong.cluster.actor_process import Failure, answer_with_stacks, die_with_parent, local_address
from furlong.config.sections import ClusterFlags
from furlong.core.addresses import socket_for
from furlong.core.algorithms import Role
from furlong.core.device_memory import DeviceMemory, MemoryTransfer
from furlong.core.garbage import import_without_gc
from furlong.core.metric import Metrics
from furlong.core.tracing import tracer
from furlong.core.weights import EngineAddress
from furlong.errors import CheckpointError
from furlong.files.atomic import PendingFiles
from furlong.inference.supervisor.process import STARTED_AGAIN
from furlong.machine import (
    LOG_FORMAT,
    choose_threads,
    deterministic_kernels,
    disable_nccl_cumem,
    set_gloo_interface,
)
from furlong.training.offload import device_memory, empty_cache
from furlong.training.packing import RankPart
from furlong.training.ranks import Ranks, join
from furlong.training.worker import RoundWorker
from furlong.weight_sync.remote_sync import RankSync
from furlong.weight_sync.weight_record import WeightRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSettings:
    """Start-up settings that all ranks of a run share.

    build: `module:function`, called as function(config_json, folder=, num_rollout=, ranks=) to make the RankParts; a
    name, so that no code is sent. cwd, path: the driver's working directory and module search path. trace: the folder
    for traces, if enabled.
    """

    build: str
    config_json: str
    folder: str
    num_rollout: int
    cwd: str
    path: Sequence[str]
    log_level: str
    cluster: ClusterFlags
    deterministic: bool = False
    trace: str | None = None

    def log_of(self, rank: int) -> str:
        """Return the path of a rank's log on its machine."""
        return str(Path(self.folder) / "logs" / f"trainer-rank-{rank}.log")


@dataclass(frozen=True)
class RankLocation:
    """Location of a rank."""

    node: str
    address: str
    process: int
    log: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.node} ({self.address})"


@dataclass(frozen=True)
class RankParts:
    """The parts of a rank. `sync` builds its part of weight sync, given the engines' device types."""

    worker: RoundWorker
    sync: Callable[[Sequence[str]], RankSync]


class CheckpointWriter:
    """Writes a rank's part of a checkpoint in a thread while the rank trains. Its error is in `failure`.

    When the files are on disk, it creates `written_marker`: a rank that trains answers no call, so the driver polls for
    the markers. The error is asked for separately, since a full disk may have no room for a marker either.
    """

    def __init__(self, files: PendingFiles, folder: Path, rank: int) -> None:
        self.failure: Failure | None = None
        self._files, self._folder, self._rank = files, folder, rank
        threading.Thread(target=self._write, name="furlong-checkpoint", daemon=True).start()

    def _write(self) -> None:
        try:
            self._files.write()
            written_marker(self._folder, self._rank).touch()
        except Exception as caught:
            logger.exception("the checkpoint was not written")
            error = CheckpointError(f"cannot write into {self._folder}: {caught}; free space or use another folder")
            error.__cause__ = caught
            self.failure = Failure.of(error)


def written_marker(folder: Path, rank: int) -> Path:
    """Return the file that marks the files of `rank` as written."""
    return folder / f"written_{rank}"


class TrainerRank:
    """The actor. The driver calls its methods through `call`."""

    def __init__(self, settings: RankSettings, ranks: Ranks) -> None:
        die_with_parent()
        if Path(settings.cwd).is_dir():  # not on every machine of a cluster
            os.chdir(settings.cwd)
        sys.path[:0] = [entry for entry in settings.path if entry not in sys.path]
        self._settings, self._ranks = settings, ranks
        self._log = settings.log_of(ranks.rank)
        _write_to(Path(self._log), settings.log_level)
        answer_with_stacks()
        # Batches lie read-only in Ray's object store and are read there.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._contexts = ExitStack()
        self._listener: socket.socket | None = None
        self._parts: RankParts | None = None
        self._sync: RankSync | None = None
        self._writing: CheckpointWriter | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method or a `Failure`. Never raises, so that Ray does not wrap exceptions."""
        try:
            return getattr(self, method)(*arguments)
        except Exception as error:
            logger.exception("%s", type(error).__name__)
            return Failure.of(error)

    def location(self) -> RankLocation:
        """Return where this rank runs."""
        return RankLocation(socket.gethostname(), local_address(), os.getpid(), self._log)

    def path_exists(self, path: str) -> bool:
        """Whether this path exists on the rank's machine."""
        return Path(path).exists()

    def listen(self, address: str) -> int:
        """Bind a free port for the rendezvous of the process group and return it."""
        self._listener, any_port = socket_for(address)
        self._listener.bind(any_port)
        self._listener.listen()
        return int(self._listener.getsockname()[1])

    def import_parts(self) -> None:
        """Import what `start` builds, which takes longer than anything else that needs no device."""
        self._build_function()

    def _build_function(self) -> Callable[..., RankParts]:
        module, _, name = self._settings.build.partition(":")
        with import_without_gc(module):
            return getattr(importlib.import_module(module), name)

    def start(self, address: str, port: int) -> Any:
        """Join the process group at `address`:`port` and build the model; return its FLOPs model."""
        settings, flags, ranks = self._settings, self._settings.cluster, self._ranks
        if settings.trace is not None:
            tracer.start(Path(settings.trace), f"trainer rank {ranks.rank}", place=1 + ranks.rank)
        if settings.deterministic:
            self._contexts.enter_context(deterministic_kernels())
        disable_nccl_cumem()
        on_gpu = torch.cuda.is_available()
        threads = choose_threads(flags.num_threads, num_parts=flags.actor_num_gpus_per_node)
        torch.set_num_threads(threads.count)
        logger.info("rank %d of %d, %s, %d threads: %s", ranks.rank, ranks.world_size,
                    torch.cuda.get_device_name() if on_gpu else "on a CPU", threads.count, threads.reason)  # fmt: skip
        if ranks.world_size > 1:
            set_gloo_interface(local_address())
            join(
                rank=ranks.rank,
                world_size=ranks.world_size,
                address=address,
                port=port,
                backend=flags.distributed_backend or ("nccl" if on_gpu else "gloo"),
                timeout=timedelta(minutes=flags.distributed_timeout_minutes),
                listener=self._listener,
            )
        self._parts = self._build_function()(
            settings.config_json, folder=Path(settings.folder), num_rollout=settings.num_rollout, ranks=ranks
        )
        return self._parts.worker.flops

    def train(self, part: RankPart, preprocess_s: float) -> Metrics:
        """Run all optimizer steps of this rank's part of a rollout."""
        return self.parts.worker.train_part(part, preprocess_s=preprocess_s)

    def save(self, folder: Path) -> None:
        """Write this rank's part of a checkpoint."""
        self.parts.worker.save(folder, is_first=self._ranks.rank == 0)

    def snapshot(self, folder: Path) -> None:
        """Copy this rank's part of a checkpoint and start writing it in the background."""
        files = self.parts.worker.snapshot(folder, is_first=self._ranks.rank == 0)
        self._writing = CheckpointWriter(files, folder, self._ranks.rank)

    def writing(self) -> Failure | None:
        """Return the error of the background write, if it failed."""
        return None if self._writing is None else self._writing.failure

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self.parts.worker.load(folder)

    def save_hf(self, folder: Path, model: Role) -> None:
        """Write this rank's part of a folder that transformers loads."""
        self.parts.worker.awake.save_hf(folder, model=model)

    def send_weights(self, addresses: Sequence[EngineAddress], version: int) -> WeightRecord | None:
        """Send this rank's part of the weights; rank 0 returns the record of what was sent."""
        if self._sync is None:
            self._sync = self.parts.sync([str(address.info.get("device_type")) for address in addresses])
        sent = asyncio.run(self._sync.send_weights(addresses, version))
        sent.finish()  # it must be complete to be sent to another process
        return sent if self._ranks.rank == 0 else None

    def resend(self, addresses: Sequence[EngineAddress], version: int) -> bool:
        """Load `version` into these servers from a stored copy, if there is one."""
        return self._sync is not None and asyncio.run(self._sync.resend(addresses, version))

    def offload(self) -> MemoryTransfer:
        """Move the trainer's state to host memory."""
        return self.parts.worker.offload()

    def onload(self) -> MemoryTransfer:
        """Undo `offload`."""
        return self.parts.worker.onload()

    def empty_cache(self) -> None:
        """Free cached device memory."""
        empty_cache()

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory use of the device; None on a CPU."""
        return device_memory(self.parts.worker.backend.device)

    def close_sync(self) -> None:
        """Release the process groups, folders and buffers of weight sync."""
        if self._sync is not None:
            asyncio.run(self._sync.close_sync())

    def end(self) -> None:
        """Flush traces before the process is killed."""
        tracer.stop()

    @property
    def parts(self) -> RankParts:
        """The parts that `start` built."""
        assert self._parts is not None
        return self._parts


def _write_to(path: Path, level: str) -> None:
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
