"""The weight transports, one row each: all that config checks, start-up, diagnosis and weight sync know about them.

To add a transport, write a `Transport` class in `weight_sync/transports/`, add its row to `TRANSPORTS` and its name to
`TransportName`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TransportName = Literal["memory", "ipc", "nccl", "disk"]

NCCL_REMEDY = (
    "select the network interface with NCCL_SOCKET_IFNAME, or debug with NCCL_DEBUG=INFO; with InfiniBand, check "
    "`ibstat` and set NCCL_IB_DISABLE=0"
)
GLOO_REMEDY = "select the network interface with GLOO_SOCKET_IFNAME"
NETWORK_CAUSE = "A rank or an engine does not take part, or the network between them is misconfigured or slow."
_LESS_OFTEN = "raise --update-weights-interval to update weights less often"
_NO_NETWORK = f"{_LESS_OFTEN}, or use --colocate, which needs no network"
_FASTER_DISK = "use a faster file system that trainer and engines share (--update-weight-disk-dir)"
_DELTA = "--update-weight-mode delta writes only what changed"
_SLOW_FOLDER = "The engine hangs, or takes longer than the limit to read the folder."
_NOT_ON_ONE_GPU = "NCCL does not join two processes on one GPU"
_NOT_INTO_STAGES = "SGLang's pipeline stages load weights from files only; use --update-weight-transport disk"


@dataclass(frozen=True)
class TransportSpec:
    """One way to send weights from the trainer to the engines.

    name: in messages and events; a variant of a transport, such as gloo of nccl, has its own row.
    implementation: "module:class" of the `Transport`; "" if the engine is in this process and needs none.
    one_gpu_problem, pipeline_problem, speculation_problem, cpu_problem: why it does not work between processes on one
        GPU, with pipeline-parallel engines, with speculative decoding, with SGLang on a CPU; "" if it does.
    needs_shared_gpus: whether it reaches only engines on the trainer's own GPUs or machine.
    can_send_deltas: whether --update-weight-mode delta works.
    timeout_cause, timeout_fix, slow_fix: for SYNC01, when weights do not arrive in time, or take most of a step.
    """

    name: str
    implementation: str
    timeout_cause: str
    timeout_fix: str
    slow_fix: str
    one_gpu_problem: str = ""
    pipeline_problem: str = ""
    speculation_problem: str = ""
    cpu_problem: str = ""
    needs_shared_gpus: bool = False
    can_send_deltas: bool = False

    @property
    def reaches_servers(self) -> bool:
        """Whether it sends weights to other processes."""
        return bool(self.implementation)


_NOT_INTO_DRAFTS = (
    "SGLang also loads the files into the draft model, and fails if there is none (NGRAM); use "
    "--update-weight-transport nccl or ipc, which leave the draft model unchanged"
)
_BROADCAST = "furlong.weight_sync.transports.broadcast:BroadcastTransport"
_SPECS = (
    TransportSpec(
        name="memory",
        implementation="",
        timeout_cause="The engine's thread hangs.",
        timeout_fix="the stack traces show where the engine's thread is",
        slow_fix="leave the machine's CPUs to the run (ENV02 reports their number)",
    ),
    TransportSpec(
        name="nccl",
        implementation=_BROADCAST,
        timeout_cause=NETWORK_CAUSE,
        timeout_fix=f"{NCCL_REMEDY}; {_NO_NETWORK}",
        slow_fix="set the network interface by NCCL_SOCKET_IFNAME (NCCL_DEBUG=INFO prints the one in use), or with "
        "GLOO_SOCKET_IFNAME if run.log reports the gloo transport",
        one_gpu_problem=_NOT_ON_ONE_GPU,
        pipeline_problem=_NOT_INTO_STAGES,
    ),
    TransportSpec(
        name="gloo",
        implementation=_BROADCAST,
        timeout_cause=NETWORK_CAUSE,
        timeout_fix=f"{GLOO_REMEDY}: engines must reach the address that `grep 'weight_sync group' run.log` prints; "
        f"{_NO_NETWORK}",
        slow_fix=GLOO_REMEDY,
        one_gpu_problem=_NOT_ON_ONE_GPU,
        pipeline_problem=_NOT_INTO_STAGES,
    ),
    TransportSpec(
        name="ipc",
        implementation="furlong.weight_sync.transports.ipc:IpcTransport",
        timeout_cause="The engine hangs, or takes longer than the limit to load the weights from shared memory.",
        timeout_fix="use a smaller --update-weight-buffer-size, so that the engine loads less at a time",
        slow_fix="use a larger --update-weight-buffer-size, so that engines load fewer times",
        pipeline_problem=_NOT_INTO_STAGES,
        cpu_problem="SGLang maps GPU memory for it; use nccl (gloo on a CPU), or disk",
        needs_shared_gpus=True,
    ),
    TransportSpec(
        name="disk",
        implementation="furlong.weight_sync.transports.disk:DiskTransport",
        timeout_cause=_SLOW_FOLDER,
        timeout_fix=f"{_FASTER_DISK}; {_DELTA}; {_LESS_OFTEN}",
        slow_fix=f"{_FASTER_DISK}; {_DELTA}",
        speculation_problem=_NOT_INTO_DRAFTS,
        can_send_deltas=True,
    ),
    TransportSpec(
        name="disk delta",
        implementation="furlong.weight_sync.transports.disk:DeltaTransport",
        timeout_cause=_SLOW_FOLDER,
        timeout_fix=f"{_FASTER_DISK}; {_LESS_OFTEN}",
        slow_fix=_FASTER_DISK,
        speculation_problem=_NOT_INTO_DRAFTS,
        can_send_deltas=True,
    ),
)
TRANSPORTS = {spec.name: spec for spec in _SPECS}


def transport_spec(name: str | None, *, mode: str = "full", on_gpu: bool = True) -> TransportSpec:
    """Return the row for the value of --update-weight-transport (default memory) and --update-weight-mode.

    `nccl` becomes gloo unless trainer and engines are all `on_gpu`. Also accepts the names that transports give
    themselves (`gloo broadcast`).
    """
    name = (name or "memory").removesuffix(" broadcast")
    if name == "nccl" and not on_gpu:
        name = "gloo"
    if name == "disk" and mode == "delta":
        name = "disk delta"
    return TRANSPORTS[name]


def default_transport(*, colocate: bool, has_servers: bool) -> TransportName:
    """Return the transport of a run whose flags name none."""
    if colocate:
        return "ipc"
    return "nccl" if has_servers else "memory"
