"""Arguments of weight transports in tests."""

from pathlib import Path
from typing import Any

from furlong.config.sections import SyncFlags
from furlong.weight_sync.transports.transport import TransportContext


def transport_context(
    bucket_bytes: int,
    *,
    folder: Path = Path(),
    model_dir: Path | None = None,
    on_gpu: bool = False,
    rank: int = 0,
    world_size: int = 1,
    **flags: Any,
) -> TransportContext:
    """Return the context of a transport that sends `bucket_bytes` at a time.

    `folder` is that of the weight versions, which copy their config from `model_dir` (by default its parent folder).
    `flags` are others of the section `sync`, without the prefix `update_weight_`.
    """
    sync = SyncFlags(
        update_weight_buffer_size=bucket_bytes,
        update_weight_disk_dir=str(folder),
        **{f"update_weight_{name}": value for name, value in flags.items()},
    )
    return TransportContext(
        sync, model_dir or folder.parent, folder.parent, on_gpu=on_gpu, rank=rank, world_size=world_size
    )
