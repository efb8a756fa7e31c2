"""The interface of engine servers for weight sync, and calls to several of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from furlong.core.weights import EngineAddress, EngineSharding, NamedTensor
from furlong.errors import EngineError, NoAnswerError, SyncError


class WeightServer(Protocol):
    """An engine server. Commands raise EngineError with the server's own message."""

    @property
    def url(self) -> str:
        """Address of its HTTP API."""
        ...

    @property
    def address(self) -> EngineAddress:
        """Everything another process needs to connect to it."""
        ...

    @property
    def checksum_dtype(self) -> torch.dtype | None:
        """Precision of its weights if it reports `core.weights.checksum`s, else None."""
        ...

    @property
    def device_dtypes(self) -> frozenset[torch.dtype]:
        """Possible precisions of its weights if it reports `core.device_checksum`s, else empty."""
        ...

    @property
    def sharding(self) -> EngineSharding:
        """How its processes shard the weights."""
        ...

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages. Only processes of the first one report checksums."""
        ...

    @property
    def rearranges_tensors(self) -> str:
        """Why its tensors may not have the layout in `sglang_layout`; "" if they do."""
        ...

    @property
    def rearranges_experts(self) -> str:
        """Why its experts may not have the layout in `sglang_layout.expert_stacks`; "" if they do."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of tensor-parallel processes. Raises EngineError if it has other processes."""
        ...

    @property
    def first_rank(self) -> int:
        """The trainer rank on the GPU of its first process, if they share GPUs."""
        ...

    @property
    def takes_shared_memory(self) -> bool:
        """Whether it maps POSIX shared memory (`furlong serve`) rather than CUDA memory (SGLang)."""
        ...

    def begin_loading(self, version: int) -> None:
        """Stop serving: its weights are about to change."""
        ...

    def finish_loading(self, version: int) -> None:
        """Resume serving, with these weights."""
        ...

    async def served_version(self) -> str:
        """Return the version label of the weights in use."""
        ...

    async def model_type(self) -> str:
        """Return the `model_type` of its model's Hugging Face config."""
        ...

    def unused_weights(self, family: str) -> str:
        """Return which weights the server does not use for this model family, and why; "" if it uses all."""
        ...

    def has_own_head(self, family: str) -> bool:
        """Whether it keeps an untied output layer for this model family, whatever the config says."""
        ...

    async def checksums(self) -> tuple[dict[str, str], str]:
        """Return checksums of its first process by its own tensor names, and one checksum over all processes."""
        ...

    async def all_checksums(self) -> tuple[list[tuple[int, dict[str, str]]], str]:
        """Return (process, checksums) of each process, in any order and possibly repeated, and the one over all."""
        ...

    async def first_rows(self, name: str, rows: int) -> Tensor | None:
        """Return the first rows of a tensor in float32; None if the server cannot show them."""
        ...

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a folder of safetensors files."""
        ...

    async def update_from_delta(self, folder: str, version: int) -> None:
        """Apply a `core.delta` folder to its current weights."""
        ...

    async def join_group(self, *, name: str, address: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Join a process group whose rank 0 is the trainer."""
        ...

    async def receive(self, group: str, tensors: Sequence[NamedTensor], version: int, *, is_last: bool) -> None:
        """Receive these tensors in this order."""
        ...

    async def leave_group(self, name: str) -> None:
        """Leave a process group."""
        ...

    async def load_shared(self, name: str, tensors: list[dict[str, Any]], version: int, *, is_last: bool) -> None:
        """Load a `SharedBuffer`."""
        ...

    async def load_handles(self, handles: Sequence[bytes], version: int, *, is_last: bool) -> None:
        """Load CUDA memory described by one IPC message per process."""
        ...


async def call_servers(
    version: int,
    action: str,
    calls: Mapping[str, Awaitable[None]],
    *,
    timeout_s: float | None = None,
    bucket: int | None = None,
    transport: str = "",
) -> None:
    """Await one call per server. Raises SyncError naming every server that failed or timed out, with its own message.

    action: completes "engines failed to". bucket, transport: for the error's `late` fields.
    """
    tasks = {url: asyncio.ensure_future(call) for url, call in calls.items()}
    try:
        if tasks:
            await asyncio.wait(tasks.values(), timeout=timeout_s)
        silent = [url for url, task in tasks.items() if not task.done()]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    failed, broken = [f"{url}: did not answer within {timeout_s:g} s" for url in silent], dict[str, str]()
    for url, task in tasks.items():
        if url in silent or (error := task.exception()) is None:
            continue
        if not isinstance(error, EngineError):
            raise error
        failed.append(f"{url}: {error}")
        if isinstance(error, NoAnswerError):
            broken[url] = str(error)
    if failed:
        raise SyncError(
            f"weight_sync version {version}: {len(failed)} of {len(calls)} engines failed to {action}. "
            + "; ".join(failed),
            late=late_fields(version, timeout_s, silent, bucket=bucket, transport=transport)
            if timeout_s and silent
            else None,
            broken=broken,
        )


def late_fields(
    version: int, seconds: float, missing: Sequence[str], *, bucket: int | None = None, transport: str
) -> dict[str, Any]:
    """Make `SyncError.late` for servers that timed out: the fields of the event `publication_timeout`."""
    return {"version": version, "seconds": seconds, "bucket": bucket, "transport": transport, "missing": list(missing)}
