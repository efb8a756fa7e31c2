"""A connection to Ray: to a running cluster, or to a local one that is started and stopped with the run.

`cluster_nodes` and `check_fits` ask a cluster before the run whether it fits. Nothing here imports Ray at the top: Ray
reads its environment when it is imported.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from furlong.config.topology import Topology
from furlong.core.process_environment import is_secret
from furlong.errors import ClusterError, ConfigError
from furlong.machine import COMPILE_CACHES

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
# For a local cluster only: ports on 127.0.0.1, a random token, and normal priority (by default workers have nice 15).
LOCAL_SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}

# Prefixes of environment variables that are copied to workers on other machines, without secrets: the dashboard of Ray
# shows them. Local workers inherit all.
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
    folder: str = ""  # of a cluster that the run started

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that workers do not inherit from their machine."""
        if self.is_own:
            return {}
        names = (*FORWARDED_NAMES, *COMPILE_CACHES)
        sent = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED) or k in names}
        return {name: value for name, value in sent.items() if not is_secret(name)}

    def close(self) -> None:
        """Disconnect; stop the cluster and its processes if the run started it."""
        import ray

        if self.was_connected:
            return
        children = _children() if self.is_own else []
        ray.shutdown()
        for child in children:
            try:
                child.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
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
    """Start a local cluster. Ray has the kernel kill its processes if this one is killed."""
    folder = tempfile.mkdtemp(prefix="furlong-ray-", dir="/tmp")  # short: it holds Unix sockets
    for name, value in {**LOCAL_SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
        os.environ.setdefault(name, value)
    session = RaySession("local", is_own=True, folder=folder)
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
            _temp_dir=folder,
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


# -- a cluster before a run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """One machine of the cluster with its GPUs and their type, or CPU slots."""

    node_id: str
    address: str
    total: int
    free: int
    gpu_type: str = ""

    def __str__(self) -> str:
        return f"{self.address}: {self.free} of {self.total} free"


def check_fits(topology: Topology, nodes: Sequence[Node], resource: str) -> None:
    """Raise ConfigError if the request can never be placed on these machines, with the numbers and what would fit."""
    shortage = topology.shortage(sum(node.total for node in nodes))
    if shortage and resource == "CPU":
        shortage += " (no machine has a GPU: a slot is a CPU)"
    if shortage:
        raise ConfigError(f"{shortage}. By machine: {listed(nodes)}")
    largest = max(node.total for node in nodes)
    if topology.num_ranks and topology.gpus_per_node > largest:
        raise ConfigError(
            f"--actor-num-gpus-per-node {topology.gpus_per_node}: the largest machine has {largest} GPUs "
            f"({listed(nodes)}); use --actor-num-nodes {-(-topology.num_ranks // largest)} "
            f"--actor-num-gpus-per-node {largest}"
        )


def listed(nodes: Sequence[Node]) -> str:
    """Describe machines for a message; at most 8."""
    shown = "; ".join(map(str, nodes[:8]))
    return f"{shown}; and {len(nodes) - 8} more" if len(nodes) > 8 else shown


PROBE_S = 20.0  # for the child that asks the cluster: most of it is importing Ray
GPU_TYPE = "accelerator_type:"  # of Ray's resources
REFUSED = ("AuthenticationError", "UNAUTHENTICATED", "InvalidAuthToken", "authentication token")
QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_USAGE_STATS_ENABLED": "0"}
# In a child process with a time limit, because a client of Ray retries for minutes. Prints one line of JSON.
_PROBE = """
import json, os, sys
try:
    import ray
    from ray._common.usage import usage_lib
    from ray._raylet import GcsClient
    client = GcsClient(address=sys.argv[1])
    metadata = usage_lib.get_cluster_metadata(client)
    if metadata and metadata["ray_version"] != ray.__version__:
        raise RuntimeError(f"it has Ray {metadata['ray_version']}, this machine {ray.__version__}")
    answer = [
        [node.node_id.hex(), node.node_manager_address, dict(node.resources_total)]
        for node in client.get_all_node_info(timeout=5).values()
        if node.state == 0  # ALIVE
    ]
except Exception as error:
    answer = f"{type(error).__name__}: {error}"
print(json.dumps({"answer": answer}), flush=True)
os._exit(0)  # Ray's threads may wait for a cluster that does not answer
"""


@functools.cache
def cluster_nodes(address: str) -> tuple[list[Node], str]:
    """Return the machines of the cluster at HOST:PORT and the resource of a slot, "GPU" or "CPU"; asks it once.

    Raises ClusterError if it is not Ray's, has another version, or refuses this process' token.
    """
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE, address],
            capture_output=True, text=True, timeout=PROBE_S, env={**os.environ, **QUIET}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"--ray-address {address}: no answer of Ray within {PROBE_S:g} s, although a server listens there; use the "
            "address that `ray start --head` printed"
        ) from None
    line = next((line for line in reversed(child.stdout.splitlines()) if line.startswith("{")), None)
    answer: Any = child.stderr if line is None else json.loads(line)["answer"]
    if isinstance(answer, str):
        raise _refusal(address, answer)
    resource = "GPU" if any(resources.get("GPU") for *_, resources in answer) else "CPU"
    nodes: list[Node] = []
    for node_id, where, resources in answer:
        if total := int(resources.get(resource, 0)):
            types = (name.removeprefix(GPU_TYPE) for name in resources if name.startswith(GPU_TYPE))
            nodes.append(Node(node_id, where, total, total, next(types, "")))
    return nodes, resource


def _refusal(address: str, problem: str) -> ClusterError:
    last = " ".join(problem.split())[-300:]
    if any(word in problem for word in REFUSED):
        return ClusterError(
            f"--ray-address {address}: the Ray cluster requires token authentication and refuses this process "
            f"({last}); set RAY_AUTH_MODE=token and the cluster's token in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        )
    return ClusterError(
        f"--ray-address {address}: not a Ray cluster that this version can use ({last}); use the address that "
        "`ray start --head` printed, and the same version of Ray on all machines"
    )
