"""Flags of the section `sync`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag
from furlong.core.transports import TransportName


@dataclass(frozen=True)
class SyncFlags:
    """Weight updates from the trainer to the engines. Every update is verified by checksum."""

    update_weights_interval: int = flag(
        1,
        "Rollouts between weight updates. Weights are also updated before a save and an evaluation.",
        within="[1, inf)",
    )
    update_weight_mode: Literal["full", "delta"] = flag(
        "full",
        "What to send: `full` sends every tensor, `delta` only what changed since the last update (`disk` only).",
    )
    update_weight_transport: TransportName | None = flag(  # noqa: RUF009  flag() declares a field
        None,
        "How to send weights: `memory` copies to the engine in this process; to servers, `nccl` broadcasts (gloo on "
        "CPUs), `disk` writes a directory, `ipc` shares GPU memory on one machine. Default: memory for the engine in "
        "this process, ipc with --colocate, else nccl.",
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = flag(
        "xor",
        "Encoding of a delta: `xor` of the bits, or positions and values to `overwrite`.",
        needs="update_weight_mode=delta",
    )
    update_weight_delta_checksum: Literal["xxh3-128", "adler32"] = flag(
        "xxh3-128", "Checksum of each tensor after a delta is applied.", needs="update_weight_mode=delta"
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "Local directory from which SGLang servers on the trainer's machine load weights; each delta is applied to "
        "it. Default: servers load the whole checkpoint.",
        needs="update_weight_mode=delta",
    )
    update_weight_timeout: float = flag(
        300.0,
        "Timeout of an engine for one bucket, or one directory, of a weight update, in seconds.",
        within="(0, inf)",
    )
    update_weight_proof: Literal["before", "beside"] = flag(
        "before",
        "When the weights in the engines are verified: `before` they generate, or while they generate (`beside`) but "
        "before their samples are trained on.",
    )
    update_weight_disk_dir: str | None = flag(
        None,
        "Directory of the `disk` transport, under the same path on all servers. Default: weights/ in the run "
        "directory.",
        needs="update_weight_transport=disk",
    )
    update_weight_disk_keep_files: bool = flag(
        False, "Keep the directories of older versions.", needs="update_weight_transport=disk"
    )
    update_weight_buffer_size: int = flag(512 * 1024**2, "Bytes of weights to send at a time.", within="[1, inf)")
    pause_mode: Literal["finish", "hold", "abort"] = flag(
        "finish",
        "Requests in flight during a weight update: `finish` completes them first, `hold` pauses them and continues "
        "with the new weights, `abort` ends them unfinished.",
    )
