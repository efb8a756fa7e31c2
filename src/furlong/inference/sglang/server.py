"""Settings, state and commands of one engine server that speaks SGLang's HTTP protocol: SGLang or `furlong serve`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from furlong.core.text import abbreviate
from furlong.core.weights import EngineAddress, EngineSharding, NamedTensor
from furlong.errors import EngineError, EngineTimeoutError, Loss, NoAnswerError, UnreachableError
from furlong.inference.sglang.client import PROBE_S, SglangClient, headers_for
from furlong.inference.sglang.engine_answers import (
    as_object,
    as_objects,
    label,
    optional_text,
    reason_in,
    unexpected,
    whole,
)
from furlong.inference.sglang.http_client import BrokenConnectionError, ForbiddenAnswerError
from furlong.inference.sglang.request_queue import RequestQueue
from furlong.inference.sglang.server_info import ServerInfo
from furlong.sglang_layout.layout_facts import (
    HASHED,
    has_own_head,
    unused_weights,
)
from furlong.sglang_layout.quantized_loading import LOADER

logger = logging.getLogger(__name__)

PAUSE_S = 60.0  # to pause or resume generation
MEMORY_S = 120.0  # to release or allocate memory
WEIGHT_REPORT_S = 300.0  # to report its weight version and checksums; the default of `--update-weight-timeout`
DRAFT = "draft."  # prefix of the tensor names of a draft model
IDLE_S = 60.0  # for a server to become idle once all its requests are answered
LEAVE_S = 10.0  # to leave a process group
IDLE_POLL_S = 0.02
PLAIN_BYTES = 1 << 20  # of an answer in plain text
CACHE, CACHE_BUSY = "kv_cache", 400  # a memory tag, and the status of /flush_cache while requests run
PRECISIONS = {"half": torch.float16, "float16": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32,
              "float32": torch.float32}  # fmt: skip


class SglangServer(SglangClient):
    """Client and state of one server.

    lost: Why the server is no longer used; "" while it is.
    stale: Why it gets no requests although it is alive: its weights are missing or incomplete; "" otherwise.
    version: Weight version loaded last; None before the first.
    newest_label: Newest weight version that it may label answers with; it changes labels while it loads.
    placed: Requests of this process assigned to it. Those beyond `concurrency` wait here.
    running: Requests that were sent to it and not answered yet.
    is_paused: Generation is paused, so a health check that waits for a token would fail.
    num_interruptions: How often generation was stopped by a pause, a weight update or a release of memory.
    released: Tags of released memory. SGLang dies if it is asked for a token without it.
    first_rank: Trainer rank on its first GPU, where they share GPUs.
    role: "regular", "prefill" or "decode", for the router; prefill servers have a `bootstrap_port`.
    awaits_weights: Only the next weight update can bring its weights.
    report_s: Timeout of its reports on weights (version, checksums, rows) in seconds; `--update-weight-timeout`.
    keeps_together: Requests with one prompt reach the same cache; not every router ensures that.
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
        report_s: float = WEIGHT_REPORT_S,
        busy: tuple[int, ...] = (),
        keeps_together: bool = True,
    ) -> None:
        super().__init__(url, headers_for(api_key), busy=busy)
        self.info = info
        self.keeps_together = keeps_together
        self.concurrency, self.timeout_s, self.probe_s, self.report_s = concurrency, timeout_s, probe_s, report_s
        self.version: int | None = None
        self.newest_label: int | None = None
        self.lost: Loss | None = None
        self.stale = ""
        self.is_paused = self.awaits_weights = False
        self.released: set[str] = set()
        self.num_interruptions = 0
        self.placed = self.running = 0
        self.load_s = 0.0  # integral of `running` over time since the last `take_load`
        self.load_samples = 0  # sum of the sampled numbers of requests since then (`LoadMonitor`)
        self.first_rank = 0
        self.role = "regular"
        self.bootstrap_port: int | None = None
        self.slots = asyncio.Semaphore(concurrency)
        self.queue = RequestQueue()
        self.health_lock = asyncio.Lock()  # one health check at a time
        self._probe_lock = asyncio.Lock()  # held while it generates a token for a health check
        self.seen_alive_s = -math.inf  # monotonic start time of the last health check that passed

    @staticmethod
    def at(address: EngineAddress, *, api_key: str | None = None, report_s: float = WEIGHT_REPORT_S) -> SglangServer:
        """A client for weight updates of a server that another process sends requests to."""
        server = SglangServer(address.url, ServerInfo(**address.info), api_key=api_key, report_s=report_s)
        server.running, server.first_rank = address.num_running, address.first_rank
        return server

    @property
    def address(self) -> EngineAddress:
        """The address to pass to `at` in another process."""
        return EngineAddress(self.url, asdict(self.info), self.running, self.first_rank)

    @property
    def is_usable(self) -> bool:
        """Whether requests may be sent to it."""
        return self.lost is None and not self.stale

    async def is_alive(self, since_s: float = math.inf) -> bool:
        """Whether it passes a health check within `probe_s`; a check begun after `since_s` is not repeated."""
        if self.seen_alive_s >= since_s:
            return True
        began_s = time.monotonic()
        try:
            await self.ask("/health", timeout_s=self.probe_s)
        except EngineError as error:
            logger.info("%s fails its health check: %s", self.url, error)
            return False
        self.seen_alive_s = began_s
        return True

    async def generation_error(self, timeout_s: float) -> str:
        """Why it generates no token within `timeout_s`; "" if it does, or need not at the moment."""
        async with self._probe_lock:
            if self.is_paused or self.released or not self.is_usable:
                return ""
            before = self.num_interruptions
            try:
                await self.ask("/health_generate", timeout_s=timeout_s)
            except EngineError as error:
                return "" if self.is_paused or self.num_interruptions != before else str(error)
            return ""

    @property
    def has_pending_probe(self) -> bool:
        """Whether it generates a token for a health check; SGLang dies of a weight update meanwhile."""
        return self._probe_lock.locked()

    async def pause(self, mode: str) -> None:
        """Pause generation; `mode` is SGLang's."""
        self.is_paused = True
        self.num_interruptions += 1
        await self.command("/pause_generation", timeout_s=PAUSE_S, mode=mode)

    async def resume(self) -> None:
        """Undo `pause`."""
        await self.command("/continue_generation", timeout_s=PAUSE_S)
        self.is_paused = False

    # -- used by weight_sync ----------------------------------------------------------------------------------------

    @property
    def checksum_dtype(self) -> torch.dtype | None:
        """Dtype of the weights if the server computes `core.weights.checksum`, else None."""
        return getattr(torch, self.info.dtype) if self.info.is_furlong else None

    @property
    def device_dtypes(self) -> frozenset[torch.dtype]:
        """Possible dtypes of its weights if it computes `core.device_checksum`; else empty."""
        info = self.info
        if info.software not in HASHED or info.device_type != "cuda":
            return frozenset()
        if info.is_quantized and not info.has_quantized_loader:
            return frozenset()
        named = PRECISIONS.get(info.dtype)
        return frozenset(PRECISIONS.values() if named is None else [named])

    @property
    def sharding(self) -> EngineSharding:
        """How the processes shard one copy of the weights."""
        return self.info.sharding

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages. Only processes of the first one report checksums."""
        return self.info.pp_size

    @property
    def rearranges_tensors(self) -> str:
        """Options that change tensor layouts from `sglang_layout.layout_checksums`; "" if none."""
        return self.info.layout_options

    @property
    def rearranges_experts(self) -> str:
        """Options that change the layout of experts from that of `sglang_layout`; "" if none."""
        return self.info.expert_options

    @property
    def supports_shared_memory(self) -> bool:
        """Whether it loads POSIX shared memory (`core.shared_memory`); SGLang loads CUDA memory."""
        return self.info.is_furlong

    @property
    def has_quantized_loader(self) -> bool:
        """Whether it was started with furlong's loader of quantized weights."""
        return self.info.has_quantized_loader

    @property
    def num_ranks(self) -> int:
        """Number of processes that receive weights. Raises EngineError for an unsupported layout."""
        info = self.info
        if info.pp_size > 1 or (info.dp_size > 1 and not info.has_dp_attention):
            raise EngineError(
                f"{self.url} has pp_size {info.pp_size} and dp_size {info.dp_size}; SGLang receives weights from a "
                "trainer with tensor parallelism only (data parallelism with --enable-dp-attention); use "
                "--update-weight-transport disk"
            )
        return info.tp_size

    def begin_loading(self, version: int) -> None:
        """Send no requests until `finish_loading`: partially loaded weights must not answer."""
        self.stale, self.newest_label = f"weight version {version} was not loaded completely", version
        self.num_interruptions += 1

    def finish_loading(self, version: int) -> None:
        """Send requests again; the weights are verified."""
        self.version, self.newest_label, self.stale, self.awaits_weights = version, version, "", False

    def _options(self, version: int, *, is_last: bool = True) -> dict[str, Any]:
        """Fields of every weight update. SGLang asserts that it is idle when it flushes; held requests prevent that."""
        if is_last and self.running:
            logger.info("%s keeps its prefix cache because of %d held requests", self.url, self.running)
        return {"weight_version": str(version), "flush_cache": is_last and not self.running}

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release the memory of `weights`, `kv_cache` or `cuda_graph`; SGLang needs --enable-memory-saver.

        SGLang dies of this unless it is idle, which takes a moment after its last answer, so its cache is flushed
        first, until that succeeds. Raises EngineError if it takes longer than `IDLE_S`.
        """
        self.released |= set(tags)
        self.num_interruptions += 1
        async with self._probe_lock:
            if CACHE in tags:
                await self._until_idle()
            await self.command("/release_memory_occupation", timeout_s=MEMORY_S, tags=list(tags))

    async def _until_idle(self) -> None:
        """Flush the prefix cache, which the server refuses while it has requests; retries until it succeeds."""
        deadline = time.monotonic() + IDLE_S
        while True:
            status, message = await self._post_plain("/flush_cache")
            if status == 200:
                return
            if status != CACHE_BUSY or time.monotonic() > deadline:
                raise EngineError(
                    f"{self.url} cannot release its memory: POST /flush_cache answered {status}: {message}"
                )
            await asyncio.sleep(IDLE_POLL_S)

    async def freeze_objects(self) -> None:
        """Exclude the server's existing Python objects from garbage collection.

        SGLang's processes have a million objects after startup, and a full collection of them delays every request.
        A refusal is only logged.
        """
        status, message = await self._post_plain("/freeze_gc")
        if status != 200:
            logger.warning(
                "%s cannot exclude its startup objects from garbage collection, which costs about 0.5 s each time: "
                "POST /freeze_gc answered %d: %s",
                self.url, status, message,
            )  # fmt: skip

    async def _post_plain(self, path: str) -> tuple[int, str]:
        """POST a command that is answered in plain text; returns status and text.

        Raises UnreachableError, and EngineTimeoutError after `IDLE_S`.
        """
        try:
            async with asyncio.timeout(IDLE_S):
                answer = await self._connections.request("POST", path, limit_bytes=PLAIN_BYTES)
        except TimeoutError as error:
            raise EngineTimeoutError(
                f"POST {self.url}{path} was not answered within {IDLE_S:g} s", url=self.url
            ) from error
        except BrokenConnectionError as error:
            raise UnreachableError(f"POST {self.url}{path}: {error}", url=self.url) from error
        except ForbiddenAnswerError as error:
            raise EngineError(f"POST {self.url}{path} answered with {error}") from error
        return answer.status, reason_in(answer.content)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate the memory of these tags again, without contents."""
        await self.command("/resume_memory_occupation", timeout_s=MEMORY_S, tags=list(tags))
        self.released -= set(tags)

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a folder of safetensors files; the server must see it under the same path."""
        await self.command("/update_weights_from_disk", timeout_s=None, model_path=folder, **self._options(version))

    async def update_from_delta(self, folder: str, version: int) -> None:
        """Apply a `files.delta` folder to its weights; the server must see it under the same path."""
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
        """Receive these tensors, in this order, from rank 0 of `group`."""
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
        """Load a shared-memory buffer of this machine (`core.shared_memory`)."""
        await self.command(
            "/update_weights_from_tensor",
            timeout_s=None,
            load_format="shared_memory",
            shared={"name": name, "tensors": tensors},
            **self._options(version, is_last=is_last),
        )

    async def load_handles(self, handles: Sequence[bytes], version: int, *, is_last: bool) -> None:
        """Load CUDA memory of this machine's GPUs, one IPC handle for each process.

        A draft model keeps its weights; SGLang would otherwise load tensors with common names into it first.
        """
        await self.command(
            "/update_weights_from_tensor",
            timeout_s=None,
            load_format=LOADER if self.has_quantized_loader else "flattened_bucket",
            serialized_named_tensors=[base64.b64encode(handle).decode() for handle in handles],
            **({"disable_draft_model": True} if self.info.speculation else {}),
            **self._options(version, is_last=is_last),
        )

    async def leave_group(self, name: str) -> None:
        """Leave a process group."""
        await self.command("/destroy_weights_update_group", timeout_s=LEAVE_S, group_name=name)

    async def served_version(self) -> str:
        """The label of the weights in use."""
        answer = await self.ask_object("/model_info", timeout_s=self.report_s)
        return label(answer, "weight_version", f"GET {self.url}/model_info")

    async def model_type(self) -> str:
        """Model type of its Hugging Face config; "" if it does not report it."""
        answer = await self.ask_object("/model_info", timeout_s=self.report_s)
        return optional_text(answer, "model_type", f"GET {self.url}/model_info")

    def unused_weights(self, family: str) -> str:
        """Weights of a model of this family that the server holds but does not use; "" if it uses all."""
        return unused_weights(self.info.software, family)

    def has_own_head(self, family: str) -> bool:
        """Whether it has an output layer separate from the embedding, whatever the model's config says."""
        return has_own_head(self.info.software, family)

    async def checksums(self) -> tuple[dict[str, str], str]:
        """Checksum of each tensor of its first process, under the server's names, and one over all processes."""
        [(_, first), *_], digest = await self.all_checksums()
        return first, digest

    async def all_checksums(self) -> tuple[list[tuple[int, dict[str, str]]], str]:
        """Rank and checksums of each process, in any order and possibly repeated, and one checksum over all of them.

        Tensors of a draft model, which are not updated, only count in the last one.
        """
        where = f"POST {self.url}/weights_checker"
        answer = await self.command("/weights_checker", timeout_s=self.report_s, action="checksum")
        ranks = as_objects(answer.get("ranks") or answer.get("payload") or [], where, "ranks")
        if not ranks:
            raise EngineError(f"{where} answered without checksums: {abbreviate(sorted(answer))}")
        by_process = [(_tp_rank(each, where), _digests(each, where)) for each in ranks]
        name, holder = ("per_engine_checksum", answer) if answer.get("per_engine_checksum") else (
            "per_gpu_checksum", ranks[0]
        )  # fmt: skip
        return by_process, label(holder, name, where)

    async def first_rows(self, name: str, rows: int) -> Tensor | None:
        """The first rows of a tensor in float32; None if the server cannot return it.

        Raises EngineError if its data-parallel copies differ, NoAnswerError if it does not answer.
        """
        try:
            answer = await self.ask(
                "/get_weights_by_name", {"name": name, "truncate_size": rows}, timeout_s=self.report_s
            )
        except NoAnswerError:
            raise
        except EngineError as error:
            logger.debug("%s does not return %s: %s", self.url, name, error)
            return None
        if self.info.dp_size > 1:  # one answer from each scheduler
            if not isinstance(answer, list):
                raise unexpected(f"POST {self.url}/get_weights_by_name", name, answer, "a list of answers")
            shown = [each for each in answer if each is not None]
            if any(each != shown[0] for each in shown):
                raise EngineError(f"{self.url} has {len(shown)} copies of {name} that differ")
            answer = shown[0] if shown else None
        if answer is None:
            return None
        try:
            return torch.tensor(answer, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            where = f"POST {self.url}/get_weights_by_name"
            raise unexpected(where, f"rows of {name}", answer, "a list of rows of numbers") from error


def _tp_rank(report: Mapping[str, Any], where: str) -> int:
    place = as_object(report.get("parallelism_info") or {}, where, "parallelism_info")
    return whole(place, "tp_rank", where, default=0)


def _digests(report: Mapping[str, Any], where: str) -> dict[str, str]:
    """Checksums by name, without those of a draft model."""
    digests = as_object(report.get("checksums"), where, "checksums")
    if wrong := [value for value in digests.values() if not isinstance(value, str)]:
        raise unexpected(where, "a checksum", wrong[0], "a string")
    return {name: digest for name, digest in digests.items() if not name.startswith(DRAFT)}


@contextlib.asynccontextmanager
async def connected(
    addresses: Sequence[EngineAddress], *, api_key: str | None = None, report_s: float = WEIGHT_REPORT_S
) -> AsyncGenerator[list[SglangServer]]:
    """Connect to servers that another process sends requests to, for weight updates (a `Connect`)."""
    servers = [SglangServer.at(address, api_key=api_key, report_s=report_s) for address in addresses]
    try:
        yield servers
    finally:
        for server in servers:
            await server.close()
