"""What weight sync needs of engines outside this process, and one call to each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from furlong.core.weights import EngineAddress, EngineSharding, NamedTensor
from furlong.errors import EngineError, NoAnswerError, SyncError


class WeightServer(Protocol):
    """One engine outside this process. Commands raise EngineError with the server's own reason."""

    @property
    def url(self) -> str:
        """Its address."""
        ...

    @property
    def address(self) -> EngineAddress:
        """What another process needs to reach it."""
        ...

    @property
    def checksum_dtype(self) -> torch.dtype | None:
        """Precision of its weights if its checksums are `core.weights.checksum`, else None."""
        ...

    @property
    def device_dtypes(self) -> frozenset[torch.dtype]:
        """Precisions it may have its weights in if it hashes them by `core.device_checksum`; else empty."""
        ...

    @property
    def processes(self) -> EngineSharding:
        """The processes that have a copy of its weights together."""
        ...

    @property
    def num_stages(self) -> int:
        """Pipeline stages. Only processes of the first one say what they have."""
        ...

    @property
    def rearranges_tensors(self) -> str:
        """Why tensors may not be in its memory as `sglang_layout.fused_checksums` and `sglang_layout.shard_checksums` have them; "" if they are."""
        ...

    @property
    def rearranges_experts(self) -> str:
        """Why its experts are not in memory as `sglang_layout.expert_stacks` has them; "" if they are."""
        ...

    @property
    def num_ranks(self) -> int:
        """Its tensor-parallel processes. Raises EngineError if it has others."""
        ...

    @property
    def first_rank(self) -> int:
        """The trainer rank on the GPU of its first process, where they share GPUs."""
        ...

    @property
    def takes_shared_memory(self) -> bool:
        """Whether buffers on the same machine are POSIX shared memory, and not CUDA memory."""
        ...

    def begin_loading(self, version: int) -> None:
        """Answer no requests from now on."""
        ...

    def finish_loading(self, version: int) -> None:
        """Answer requests again, with these weights."""
        ...

    async def served_version(self) -> str:
        """Label of the weights in use."""
        ...

    async def model_type(self) -> str:
        """Family of its model, as Hugging Face configs name it."""
        ...

    def unused_weights(self, family: str) -> str:
        """Which weights of a model of this family the server has, but does not compute with; "" if all are used."""
        ...

    def has_own_head(self, family: str) -> bool:
        """Whether it has an output layer apart from the embedding, whatever the config of such a model says."""
        ...

    async def checksums(self) -> tuple[dict[str, str], str]:
        """Checksum of every tensor of its first process under the server's own names, and one over all processes."""
        ...

    async def all_checksums(self) -> tuple[list[tuple[int, dict[str, str]]], str]:
        """`checksums` of each process, with its number, in any order, some maybe twice; and the one over all."""
        ...

    async def first_rows(self, name: str, rows: int) -> Tensor | None:
        """First rows of a tensor in float32, None if it cannot show them."""
        ...

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a folder of safetensors files."""
        ...

    async def update_from_delta(self, folder: str, version: int) -> None:
        """Apply a `core.delta` folder to the weights it has."""
        ...

    async def join_group(self, *, name: str, address: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Join a process group of which the trainer is rank 0."""
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
        """Load CUDA memory, by one message for each process."""
        ...


async def each(
    version: int,
    what: str,
    calls: Mapping[str, Awaitable[None]],
    *,
    timeout_s: float | None = None,
    bucket: int | None = None,
    transport: str = "",
) -> None:
    """Await one call per server. Raises SyncError naming every server that failed, with its own message.

    Servers that have not answered after `timeout_s` are named, too; `bucket` and `transport` say what they lack.
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
            f"weight_sync version {version}: {len(failed)} of {len(calls)} engines failed to {what}. "
            + "; ".join(failed),
            late=late(version, timeout_s, silent, bucket=bucket, transport=transport) if timeout_s and silent else None,
            broken=broken,
        )


def late(
    version: int, seconds: float, missing: Sequence[str], *, bucket: int | None = None, transport: str
) -> dict[str, Any]:
    """What a SyncError says of engines that did not answer in time; the fields of the event `publication_timeout`."""
    return {"version": version, "seconds": seconds, "bucket": bucket, "transport": transport, "missing": list(missing)}
