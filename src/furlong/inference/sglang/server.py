"""One engine server that speaks SGLang's HTTP protocol, SGLang or `furlong serve`: its state and its commands."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from furlong.core.weights import EngineAddress, EngineSharding, NamedTensor
from furlong.errors import EngineError, EngineTimeoutError, NoAnswerError, UnreachableError
from furlong.inference.sglang.client import PROBE_S, SglangClient, headers_for, reason_in
from furlong.inference.sglang.connections import BrokenConnectionError
from furlong.inference.sglang.request_queue import Turns
from furlong.inference.sglang.server_info import ServerInfo
from furlong.sglang_layout.layout_facts import HASHED, has_own_head, unused_weights

logger = logging.getLogger(__name__)

PAUSE_S = 60.0  # to stop generating, or to go on
MEMORY_S = 120.0  # to give memory away, or to take it
PROOF_S = 120.0  # to say what weights it has: 0.03 s for checksums of 8 GB on a GPU, once their kernels are compiled
DRAFT = "draft."  # begins the names of a draft model's tensors
IDLE_S = 60.0  # for a server to be idle once all of its requests are answered
LEAVE_S = 10.0  # to leave a process group, which nobody needs any more
LOOK_S = 0.02  # between two questions whether it is
CACHE, BUSY_CACHE = "kv_cache", 400  # a tag of memory, and the status of a cache that is not flushed
PRECISIONS = {"half": torch.float16, "float16": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32,
              "float32": torch.float32}  # fmt: skip


class SglangServer(SglangClient):
    """Commands to one server, and what is known of it.

    `lost` says why the server is not used any more; `stale` why it gets no requests although it lives: it has not, or
    not completely, the weights that it should have. `version` is the one last loaded, None before the first. `placed`
    counts the requests of this process that are meant for it, `running` those of them that it has: requests beyond
    `concurrency` wait here. `quiet` counts the times that it was told to stop generating, and `is_paused` says that it
    was: a health check that waits for a token fails then. `released` are the tags of memory that it has given away:
    SGLang dies if it is asked for a token without them. `first_rank` is the trainer rank on its first GPU, where they
    share GPUs. `role` is what it does of a request (regular, prefill, decode), as a router is told, with the
    `bootstrap_port` of one that prefills. `awaits_publication`: nothing else can give it weights. `keeps_together`:
    requests with one prompt reach one cache, which not every router sees to.
    """

    def __init__(
        self,
        url: str,
        info: ServerInfo,
        *,
        api_key: str | None = None,
        concurrency: int = 512,
        timeout_s: float = 14400.0,
        probe_s: float = PROBE_S,
        busy: tuple[int, ...] = (),
        keeps_together: bool = True,
    ) -> None:
        super().__init__(url, headers_for(api_key), busy=busy)
        self.info = info
        self.keeps_together = keeps_together
        self.concurrency, self.timeout_s, self.probe_s = concurrency, timeout_s, probe_s
        self.version: int | None = None
        self.lost = self.stale = ""
        self.is_paused = self.awaits_publication = False
        self.released: set[str] = set()
        self.quiet = 0
        self.placed = self.running = 0
        self.load_s = 0.0  # integral of `running` since the engine's load was last taken
        self.looked = 0  # requests that it had, summed over the looks of a LoadWatch since then
        self.first_rank = 0
        self.role = "regular"
        self.bootstrap_port: int | None = None
        self.slots = asyncio.Semaphore(concurrency)
        self.turns = Turns()
        self.looking = asyncio.Lock()  # one health check at a time
        self._generates = asyncio.Lock()  # a token for a health check, which memory must not be taken from
        self.seen_alive_s = -math.inf  # when the last health check that was answered began, by the monotonic clock

    @staticmethod
    def at(address: EngineAddress, *, api_key: str | None = None) -> SglangServer:
        """A client for weight updates of the server that another process drives."""
        server = SglangServer(address.url, ServerInfo(**address.info), api_key=api_key)
        server.running, server.first_rank = address.num_running, address.first_rank
        return server

    @property
    def address(self) -> EngineAddress:
        """What another process needs for `at`."""
        return EngineAddress(self.url, asdict(self.info), self.running, self.first_rank)

    @property
    def is_usable(self) -> bool:
        """Whether requests may be sent to it."""
        return not self.lost and not self.stale

    async def is_alive(self, since_s: float = math.inf) -> bool:
        """Whether the server answers a health check in `probe_s`; one that began after `since_s` is not repeated."""
        if self.seen_alive_s >= since_s:
            return True
        began_s = time.monotonic()
        try:
            await self.ask("/health", timeout_s=self.probe_s)
        except EngineError as error:
            logger.info("%s does not answer its health check: %s", self.url, error)
            return False
        self.seen_alive_s = began_s
        return True

    async def is_silent(self, timeout_s: float) -> str:
        """Why no token comes from it in time although it should generate; "" if one does, or none is due now."""
        async with self._generates:
            if self.is_paused or self.released or not self.is_usable:
                return ""
            quiet = self.quiet
            try:
                await self.ask("/health_generate", timeout_s=timeout_s)
            except EngineError as error:
                return "" if self.is_paused or self.quiet != quiet else str(error)
            return ""

    @property
    def is_probed(self) -> bool:
        """Whether it generates a token for a health check, and is not to be given weights: SGLang dies of both."""
        return self._generates.locked()

    async def pause(self, mode: str) -> None:
        """Stop generating; `mode` is SGLang's."""
        self.is_paused = True
        self.quiet += 1
        await self.command("/pause_generation", timeout_s=PAUSE_S, mode=mode)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.command("/continue_generation", timeout_s=PAUSE_S)
        self.is_paused = False

    # -- weights: what sync asks of a server -------------------------------------------------------------------

    @property
    def checksum_dtype(self) -> torch.dtype | None:
        """Precision of the weights if the server's checksums are this program's, else None."""
        return getattr(torch, self.info.dtype) if self.info.is_furlong else None

    @property
    def device_dtypes(self) -> frozenset[torch.dtype]:
        """Precisions it may have its weights in if it hashes them by `core.device_checksum`; else empty."""
        info = self.info
        if info.software not in HASHED or info.device_type != "cuda" or info.is_quantized:
            return frozenset()
        named = PRECISIONS.get(info.dtype)
        return frozenset(PRECISIONS.values() if named is None else [named])

    @property
    def processes(self) -> EngineSharding:
        """The processes that have a copy of its weights together."""
        return self.info.processes

    @property
    def num_stages(self) -> int:
        """Pipeline stages. Only processes of the first one say what they have."""
        return self.info.pp_size

    @property
    def rearranges_tensors(self) -> str:
        """Why tensors may not be in its memory as `sglang_layout.fused_checksums` and `sglang_layout.shard_checksums` have them; "" if they are."""
        return self.info.layout_options

    @property
    def rearranges_experts(self) -> str:
        """Why its experts are not in memory as `sglang_layout.expert_stacks` has them; "" if they are."""
        return self.info.expert_options

    @property
    def takes_shared_memory(self) -> bool:
        """Whether it loads `core.shared_memory` buffers; SGLang loads CUDA memory."""
        return self.info.is_furlong

    @property
    def num_ranks(self) -> int:
        """Processes that weights are sent to. Raises EngineError for a layout that cannot be sent to."""
        info = self.info
        if info.pp_size > 1 or (info.dp_size > 1 and not info.has_dp_attention):
            raise EngineError(
                f"{self.url} has pp_size {info.pp_size} and dp_size {info.dp_size}; SGLang takes weights from a "
                "trainer in tensor-parallel processes only (data-parallel ones with --enable-dp-attention), use "
                "--update-weight-transport disk"
            )
        return info.tp_size

    def begin_loading(self, version: int) -> None:
        """Take the server out of use until `finish_loading`: half-loaded weights must not answer."""
        self.stale = f"weight version {version} was not loaded completely"
        self.quiet += 1

    def finish_loading(self, version: int) -> None:
        """Put the server, whose weights are verified, back into use."""
        self.version, self.stale, self.awaits_publication = version, "", False

    def _options(self, version: int, *, is_last: bool = True) -> dict[str, Any]:
        """What every update carries. SGLang asserts that it is idle when it flushes, so held requests forbid it."""
        if is_last and self.running:
            logger.info("%s keeps its prefix cache: %d requests are held in it", self.url, self.running)
        return {"weight_version": str(version), "flush_cache": is_last and not self.running}

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Give back the memory of `weights`, `kv_cache` or `cuda_graph`; SGLang wants --enable-memory-saver for it.

        SGLang dies of this while it is not idle, which it may be for a moment after its last answer, so it is asked to
        empty its cache until it can. Raises EngineError if that takes longer than `IDLE_S`.
        """
        self.released |= set(tags)
        self.quiet += 1
        async with self._generates:
            if CACHE in tags:
                await self._until_idle()
            await self.command("/release_memory_occupation", timeout_s=MEMORY_S, tags=list(tags))

    async def _until_idle(self) -> None:
        """Return when the server has emptied its prefix cache, which it refuses while it has requests."""
        deadline = time.monotonic() + IDLE_S
        while True:
            status, said = await self._status_of("/flush_cache")
            if status == 200:
                return
            if status != BUSY_CACHE or time.monotonic() > deadline:
                raise EngineError(f"{self.url} cannot release its memory: POST /flush_cache answered {status}: {said}")
            await asyncio.sleep(LOOK_S)

    async def freeze_objects(self) -> None:
        """Have garbage collections leave out what the server has made so far.

        SGLang's processes have a million Python objects when they are up, over which each full collection goes while
        no request gets a token. A server that refuses goes on as it is, and the log says so.
        """
        status, said = await self._status_of("/freeze_gc")
        if status != 200:
            logger.warning(
                "%s collects garbage among all that it made at its start, some 0.5 s each time: "
                "POST /freeze_gc answered %d: %s",
                self.url, status, said,
            )  # fmt: skip

    async def _status_of(self, path: str) -> tuple[int, str]:
        """POST what is answered in plain words. Raises UnreachableError, or EngineTimeoutError after `IDLE_S`."""
        try:
            async with asyncio.timeout(IDLE_S):
                status, content = await self._connections.request("POST", path)
        except TimeoutError as error:
            raise EngineTimeoutError(
                f"POST {self.url}{path} was not answered within {IDLE_S:g} s", url=self.url
            ) from error
        except BrokenConnectionError as error:
            raise UnreachableError(f"POST {self.url}{path}: {error}", url=self.url) from error
        return status, reason_in(content)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory for these again, without contents."""
        await self.command("/resume_memory_occupation", timeout_s=MEMORY_S, tags=list(tags))
        self.released -= set(tags)

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a folder of safetensors files, which the server must see under the same path."""
        await self.command("/update_weights_from_disk", timeout_s=None, model_path=folder, **self._options(version))

    async def update_from_delta(self, folder: str, version: int) -> None:
        """Apply a `core.delta` folder, which the server must see under the same path, to the weights it has."""
        await self.command(
            "/update_weights_from_disk",
            timeout_s=None,
            model_path=folder,
            load_format="delta",
            **self._options(version),
        )

    async def join_group(self, *, name: str, address: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Join a process group whose rank 0 is the trainer."""
        await self.command(
            "/init_weights_update_group",
            timeout_s=None,
            master_address=address, master_port=port, rank_offset=rank, world_size=world_size, group_name=name,
            backend=backend,
        )  # fmt: skip

    async def receive(self, group: str, tensors: Sequence[NamedTensor], version: int, *, is_last: bool) -> None:
        """Receive what rank 0 of `group` broadcasts: these tensors in this order."""
        await self.command(
            "/update_weights_from_distributed",
            timeout_s=None,
            names=[name for name, _ in tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
            group_name=group,
            **self._options(version, is_last=is_last),
        )

    async def load_shared(self, name: str, tensors: list[dict[str, Any]], version: int, *, is_last: bool) -> None:
        """Load a shared buffer of this machine (`core.shared_memory`)."""
        await self.command(
            "/update_weights_from_tensor",
            timeout_s=None,
            load_format="shared_memory",
            shared={"name": name, "tensors": tensors},
            **self._options(version, is_last=is_last),
        )

    async def load_handles(self, handles: Sequence[bytes], version: int, *, is_last: bool) -> None:
        """Load CUDA memory of this machine's GPUs, by one message for each process.

        A draft model keeps its weights: SGLang would load these into it first, by the names that they have in common.
        """
        await self.command(
            "/update_weights_from_tensor",
            timeout_s=None,
            load_format="flattened_bucket",
            serialized_named_tensors=[base64.b64encode(handle).decode() for handle in handles],
            **({"disable_draft_model": True} if self.info.speculation else {}),
            **self._options(version, is_last=is_last),
        )

    async def leave_group(self, name: str) -> None:
        """Leave a process group."""
        await self.command("/destroy_weights_update_group", timeout_s=LEAVE_S, group_name=name)

    async def served_version(self) -> str:
        """The label of the weights in use."""
        return str((await self.ask("/model_info", timeout_s=PROOF_S))["weight_version"])

    async def model_type(self) -> str:
        """Family of its model, as Hugging Face configs name it; "" if it does not say."""
        return str((await self.ask("/model_info", timeout_s=PROOF_S)).get("model_type") or "")

    def unused_weights(self, family: str) -> str:
        """Which weights of a model of this family the server has, but does not compute with; "" if all are used."""
        return unused_weights(self.info.software, family)

    def has_own_head(self, family: str) -> bool:
        """Whether it has an output layer apart from the embedding, whatever the config of such a model says."""
        return has_own_head(self.info.software, family)

    async def checksums(self) -> tuple[dict[str, str], str]:
        """Checksum of every tensor of its first process by the server's own names, and one over all processes."""
        [(_, first), *_], digest = await self.all_checksums()
        return first, digest

    async def all_checksums(self) -> tuple[list[tuple[int, dict[str, str]]], str]:
        """`checksums` of each process, with its number, in any order, some maybe twice; and the one over all.

        A draft model's, which are not published, are in the last one alone.
        """
        answer = await self.command("/weights_checker", timeout_s=PROOF_S, action="checksum")
        ranks: Any = answer.get("ranks") or answer.get("payload")
        if not ranks:
            raise EngineError(f"POST {self.url}/weights_checker answered without checksums: {sorted(answer)}")
        found = [
            (
                int((each.get("parallelism_info") or {}).get("tp_rank", 0)),
                {name: digest for name, digest in each["checksums"].items() if not name.startswith(DRAFT)},
            )
            for each in ranks
        ]
        return found, str(answer.get("per_engine_checksum") or ranks[0]["per_gpu_checksum"])

    async def first_rows(self, name: str, rows: int) -> Tensor | None:
        """The first rows of a tensor in float32; None if the server cannot show tensors of its model.

        Raises EngineError if its data-parallel parts show different ones, NoAnswerError if it does not answer.
        """
        try:
            answer = await self.ask("/get_weights_by_name", {"name": name, "truncate_size": rows}, timeout_s=PROOF_S)
        except NoAnswerError:
            raise
        except EngineError as error:
            logger.debug("%s does not show %s: %s", self.url, name, error)
            return None
        if self.info.dp_size > 1:  # one answer of each of its schedulers
            shown = [each for each in answer if each is not None]
            if any(each != shown[0] for each in shown):
                raise EngineError(f"{self.url} shows {len(shown)} copies of {name}, which are not all the same")
            answer = shown[0] if shown else None
        return None if answer is None else torch.tensor(answer, dtype=torch.float32)


@contextlib.asynccontextmanager
async def connected(
    addresses: Sequence[EngineAddress], *, api_key: str | None = None
) -> AsyncGenerator[list[SglangServer]]:
    """Clients for weight updates of servers that another process drives, closed at the end (`weight_sync.rank_sync.Connect`)."""
    servers = [SglangServer.at(address, api_key=api_key) for address in addresses]
    try:
        yield servers
    finally:
        for server in servers:
            await server.close()
