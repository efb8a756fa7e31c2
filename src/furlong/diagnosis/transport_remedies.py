"""Causes and remedies of weight updates that do not arrive or are slow (SYNC01), by transport."""

from __future__ import annotations

from dataclasses import dataclass

NCCL_REMEDY = (
    "select the network interface with NCCL_SOCKET_IFNAME, raise the limit with NCCL_TIMEOUT=1800, or debug with "
    "NCCL_DEBUG=INFO; with InfiniBand, check `ibstat` and set NCCL_IB_DISABLE=0"
)
GLOO_REMEDY = "select the network interface with GLOO_SOCKET_IFNAME"
NETWORK_CAUSE = "A rank or an engine does not take part, or the network between them is misconfigured or slow."
LESS_OFTEN = "raise --update-weights-interval to update weights less often"
NO_NETWORK = f"{LESS_OFTEN}, or use --colocate, which needs no network"
FASTER_DISK = "use a faster file system that trainer and engines share (--update-weight-disk-dir)"
SMALLER_FILES = "--update-weight-mode delta writes only what changed"


@dataclass(frozen=True)
class TransportRemedies:
    """Likely cause of weights that do not arrive, the remedy for that, and the remedy for slow updates."""

    cause: str
    late: str
    slow: str


_REMEDIES = {
    "nccl": TransportRemedies(
        NETWORK_CAUSE,
        f"{NCCL_REMEDY}; {NO_NETWORK}",
        "select the network interface with NCCL_SOCKET_IFNAME (NCCL_DEBUG=INFO prints the one in use), or with "
        "GLOO_SOCKET_IFNAME if run.log reports the gloo transport",
    ),
    "gloo": TransportRemedies(
        NETWORK_CAUSE,
        f"{GLOO_REMEDY}: engines must reach the address that `grep 'weight_sync group' run.log` prints; {NO_NETWORK}",
        GLOO_REMEDY,
    ),
    "ipc": TransportRemedies(
        "The engine hangs, or takes longer than the limit to load the weights from shared memory.",
        "use a smaller --update-weight-buffer-size, so that the engine loads less at a time",
        "use a larger --update-weight-buffer-size, so that engines load fewer times",
    ),
    "disk": TransportRemedies(
        "The engine hangs, or takes longer than the limit to read the folder.",
        f"{FASTER_DISK}; {SMALLER_FILES}; {LESS_OFTEN}",
        f"{FASTER_DISK}; {SMALLER_FILES}",
    ),
    "disk delta": TransportRemedies(
        "The engine hangs, or takes longer than the limit to read the folder.",
        f"{FASTER_DISK}; {LESS_OFTEN}",
        FASTER_DISK,
    ),
    "memory": TransportRemedies(
        "The engine's thread hangs.",
        "the stack traces show where the engine's thread is",
        "leave the machine's CPUs to the run (ENV02 reports their number)",
    ),
}


def remedies_of(transport: str) -> TransportRemedies:
    """Look up a transport by its own name (`gloo broadcast`) or by that of --update-weight-transport."""
    return _REMEDIES[transport.removesuffix(" broadcast")]
