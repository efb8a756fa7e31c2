"""How trained weights reach the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag
from furlong.core.transports import TransportName


@dataclass(frozen=True)
class SyncFlags:
    """How trained weights reach the engine. Every publication is verified by checksum."""

    update_weights_interval: int = flag(
        1,
        "Rollouts between two publications of the weights. A save and an evaluation publish first, too.",
        within="[1, inf)",
    )
    update_weight_mode: Literal["full", "delta"] = flag(
        "full", "What is sent: `full` is every tensor, `delta` what changed since the publication before."
    )
    update_weight_transport: TransportName | None = flag(  # noqa: RUF009  flag() declares a field
        None,
        "How it is sent: `memory` copies to the engine in this process; to servers `nccl` broadcasts (gloo on a CPU), "
        "`disk` writes a folder, `ipc` shares memory on one machine. Without it: memory; nccl to servers, ipc if "
        "they share the trainer's GPUs.",
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = flag(
        "xor", "How a delta says what changed: `xor` of the bits, or positions and values to `overwrite`."
    )
    update_weight_delta_checksum: Literal["xxh3-128", "adler32"] = flag(
        "xxh3-128", "Checksum of each tensor that results from a delta."
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "Folder beside SGLang servers of the trainer's machine, brought up to date by each delta and loaded by them. "
        "Without it: they get a whole folder.",
    )
    update_weight_timeout: float = flag(
        300.0, "Seconds that an engine may take for one bucket, or one folder, of a publication.", within="(0, inf)"
    )
    update_weight_proof: Literal["before", "beside"] = flag(
        "before",
        "When it is verified that engines have the weights they were sent: before they serve, or while they generate, "
        "but before anything is trained on.",
    )
    update_weight_disk_dir: str | None = flag(
        None, "Folder of `disk`, which the servers see under this path. Without it: weights/ in the run's folder."
    )
    update_weight_disk_keep_files: bool = flag(False, "Keep the folders of older versions.")
    update_weight_buffer_size: int = flag(512 * 1024**2, "Bytes of weights sent at a time.", within="[1, inf)")
    pause_mode: Literal["finish", "hold", "abort"] = flag(
        "finish",
        "What running requests do during a publication: end first, wait and go on with new weights, or end unfinished.",
    )
