"""Process groups that trainers and engines share to send weights, separate from the default group."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]  documented


def wire_view(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as collectives send it: FP8, which gloo does not know, as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def join_group(
    store: Store, *, rank: int, world_size: int, name: str, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Join the group `name` as member `rank`, with SGLang's key prefix, so that either side may be SGLang.

    Blocks until all members have joined. torch has no public API for this: `new_group` requires members of the default
    group.
    """
    group, _ = distributed_c10d._new_process_group_helper(  # pyright: ignore[reportPrivateUsage]
        world_size,
        rank,
        [],
        dist.Backend(backend),
        distributed_c10d.PrefixStore(name, store),
        group_name=name,  # pyright: ignore[reportArgumentType]  a NewType of str
        timeout=timeout,
    )
    ranks = {i: i for i in range(world_size)}
    distributed_c10d._world.pg_group_ranks[group] = ranks  # pyright: ignore[reportPrivateUsage]
    assert isinstance(group, dist.ProcessGroup)  # because this process is a member
    return group
