"""A process group beside the default one, as trainers and engines share to send weights."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]  documented


def join_group(
    store: Store, *, rank: int, world_size: int, name: str, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Become member `rank` of the group `name`, with SGLang's prefix of its keys, so that either side may be SGLang.

    Returns when all members are there. torch has no public way: `new_group` wants members of the default group.
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
    assert isinstance(group, dist.ProcessGroup)  # this process is a member
    return group
