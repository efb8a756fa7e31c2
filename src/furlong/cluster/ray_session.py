"""A connection to Ray: to a running cluster, or to a local one that is started and stopped with the run."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.cluster import reaper
from furlong.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)

NAMESPACE = "furlong"
STOP_S = 10.0  # for a killed process to end
STORE_SHARE = 0.3  # of the memory that is free for Ray's object store, which holds batches between driver and trainers
STORE_LIMIT = 8 * 1024**3

# Environment variables for Ray, unless the user has set them. Must be set before `import ray`.
SETTINGS = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # server hosts request no GPU from Ray but must see all of them
    "RAY_USAGE_STATS_ENABLED": "0",
}
# For a local cluster only: bind every port to 127.0.0.1 and require a random token.
LOCAL_SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}

# Prefixes of environment variables that are copied to workers on other machines; local workers inherit all.
FORWARDED = ("NCCL_", "GLOO_", "TORCH", "PYTORCH_", "HF_", "TOKENIZERS_", "SGLANG_", "OMP_", "MKL_", "FURLONG_")
FORWARDED_NAMES = ("PYTHONPATH", "SLIME_DEBUG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG")


@dataclass(frozen=True)
class RaySession:
    """A connection to Ray. `is_own`: the run started the cluster, and `close` stops it.

    `was_connected`: the program was connected before the run; `close` keeps that connection.
    """

    address: str
    is_own: bool
    was_connected: bool = False
    _reaper: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that workers do not inherit from their machine."""
        if self.is_own:
            return {}
        return {k: v for k, v in os.environ.items() if k.startswith(FORWARDED) or k in FORWARDED_NAMES}

    def close(self) -> None:
        """Disconnect; stop the cluster and its processes if the run started it."""
        import ray

        if self.was_connected:
            return
        children = _children() if self.is_own else []
        ray.shutdown()
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the reaper waits for it, and kills it
                child.wait(timeout=STOP_S)
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait()
            os.environ.pop(reaper.VARIABLE, None)
        logger.info("ray: %s", "the cluster of this run has ended" if self.is_own else f"left {self.address}")


def open_session(address: str | None, *, num_slots: int) -> RaySession:
    """Connect to the cluster at `address` or RAY_ADDRESS; without either, start one on this machine.

    A program that is connected to Ray already stays so, and its cluster is used.

    The cluster of this machine has its GPUs; without any, a slot is a CPU, and it has `num_slots` of them, however
    many cores there are. Raises ClusterError if Ray cannot be reached or started.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if "ray" in sys.modules:
        import ray

        if ray.is_initialized():
            return RaySession(ray.get_runtime_context().gcs_address, is_own=False, was_connected=True)
    address = address or os.environ.get("RAY_ADDRESS")
    if address is not None and address != "local":
        return _connect(address)
    return _start(num_slots)


def _connect(address: str) -> RaySession:
    if address.startswith("ray://"):
        raise ConfigError(
            f"--ray-address {address} is a Ray client address: tensors cannot go that way; run on a machine of the "
            "cluster with HOST:PORT or auto, or submit the command with `ray job submit`"
        )
    import ray

    try:
        _init_ray(address=address, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster at {address}: {error}; start one with `ray start --head`, or omit --ray-address and "
            "RAY_ADDRESS to start a local one"
        ) from error
    logger.info("ray: connected to %s, version %s", address, ray.__version__)
    return RaySession(address, is_own=False)


def _start(num_slots: int) -> RaySession:
    """Start a local cluster, and a reaper process that stops it if this process is killed."""
    mark = secrets.token_hex(8)
    folder = Path(tempfile.mkdtemp(prefix="furlong-ray-", dir="/tmp"))  # short: it holds Unix sockets
    for name, value in {**LOCAL_SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
        os.environ.setdefault(name, value)
    os.environ[reaper.VARIABLE] = mark
    watching = subprocess.Popen(
        [sys.executable, "-S", "-E", reaper.__file__, mark, str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must reach only the program
    )
    session = RaySession("local", is_own=True, _reaper=watching)
    import ray
    import torch

    _reread_settings()
    num_gpus = torch.cuda.device_count()
    try:
        _init_ray(
            address="local",
            num_cpus=max(num_slots, len(os.sched_getaffinity(0))),
            num_gpus=num_gpus,
            include_dashboard=False,
            logging_level=logging.ERROR,
            object_store_memory=_store_bytes(),
            _temp_dir=str(folder),
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        session.close()
        raise ClusterError(f"Ray did not start on this machine: {type(error).__name__}: {error}") from error
    logger.info(
        "ray: started a cluster on this machine for this run, version %s: %s, temporary folder %s",
        ray.__version__, f"{num_gpus} GPUs" if num_gpus else f"no GPU, a slot is a CPU, {num_slots} slots", folder,
    )  # fmt: skip
    return session


def _init_ray(**options: Any) -> None:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from Ray, about its future defaults
        ray.init(namespace=NAMESPACE, log_to_driver=False, **options)


def _reread_settings() -> None:
    """Apply LOCAL_SETTINGS if Ray was imported, and read its environment, before they were set."""
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False
    with contextlib.suppress(ImportError):  # Ray before 2.52 has no keys
        from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore  compiled

        settings: Any = Config
        settings.initialize("")
        loader: Any = AuthenticationTokenLoader
        loader.instance().reset_cache()


def _children() -> list[subprocess.Popen[bytes]]:
    """Return the processes of the local cluster. Ray kills them without waiting for their end."""
    from ray._private import worker as ray_worker

    node: Any = ray_worker._global_node  # pyright: ignore[reportPrivateUsage]  no public way
    return [info.process for infos in node.all_processes.values() for info in infos] if node is not None else []


def _store_bytes() -> int:
    """Return the size of the object store: a share of the free shared memory, in which it is stored."""
    shm = os.statvfs("/dev/shm")
    return max(min(int(STORE_SHARE * shm.f_bavail * shm.f_frsize), STORE_LIMIT), 100 * 1024**2)
