"""What keeps weights from arriving, or makes them slow, by the transport that they go by; SYNC01 says it."""

from __future__ import annotations

from dataclasses import dataclass

BY_NCCL = (
    "choose the network with NCCL_SOCKET_IFNAME, raise NCCL_TIMEOUT=1800, see NCCL_DEBUG=INFO; `ibstat` and "
    "NCCL_IB_DISABLE=0 where there is InfiniBand"
)
BY_GLOO = "choose the network with GLOO_SOCKET_IFNAME"
NETWORK = "A rank or an engine does not take part, or the network between them is wrong or slow."
LESS_OFTEN = "--update-weights-interval publishes less often"
WITHOUT = f"{LESS_OFTEN}, --colocate without a network"
FASTER = "a faster file system, which trainer and engines see, by --update-weight-disk-dir"


@dataclass(frozen=True)
class Ways:
    """Of one transport: the likely cause of weights that do not arrive, the way out then, and where they are slow."""

    cause: str
    late: str
    slow: str


_OF = {
    "nccl": Ways(
        NETWORK,
        f"{BY_NCCL}; {WITHOUT}",
        "choose the network with NCCL_SOCKET_IFNAME (NCCL_DEBUG=INFO shows which one it takes); with "
        "GLOO_SOCKET_IFNAME where run.log says that weights go by gloo",
    ),
    "gloo": Ways(
        NETWORK,
        f"{BY_GLOO}: engines must reach the address that `grep 'weight_sync group' run.log` shows; {WITHOUT}",
        BY_GLOO,
    ),
    "ipc": Ways(
        "The engine hangs, or takes longer to load what is in shared memory.",
        "a smaller --update-weight-buffer-size has it load less at a time",
        "a larger --update-weight-buffer-size has engines load fewer times",
    ),
    "disk": Ways(
        "The engine hangs, or takes longer to read the folder.",
        f"{FASTER}; --update-weight-mode delta writes what changed only; {LESS_OFTEN}",
        f"{FASTER}; --update-weight-mode delta writes what changed only",
    ),
    "disk delta": Ways("The engine hangs, or takes longer to read the folder.", f"{FASTER}; {LESS_OFTEN}", FASTER),
    "memory": Ways(
        "The engine's thread hangs.",
        "the stacks say where the engine's thread is",
        "leave the machine's processors to the run (ENV02 says how many it has)",
    ),
}


def ways_of(transport: str) -> Ways:
    """The ways of a transport by its own name (`gloo broadcast`), or as --update-weight-transport names it."""
    return _OF[transport.removesuffix(" broadcast")]
