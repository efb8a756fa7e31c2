"""One server that speaks SGLang's HTTP protocol (SGLang, `furlong serve` or a router): settings, state and commands."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import torch
from torch import Tensor

from furlong.core.text import abbreviate, redact_credentials
from furlong.core.weights import EngineAddress, EngineSharding, NamedTensor
from furlong.errors import ConfigError, EngineError, EngineTimeoutError, Loss, NoAnswerError, UnreachableError
from furlong.inference.sglang.answers import BUSY, EXPECTED, EventReader, parse_answer, readable, reading, reason_in
from furlong.inference.sglang.request_queue import RequestQueue
from furlong.sglang_layout.layout_facts import (
    HASHED,
    PLAIN_EXPERTS,
    PLAIN_SHARES,
    PLAIN_TENSORS,
    has_own_head,
    options_beside,
    unused_weights,
)
from furlong.sglang_layout.quantized_loading import LOADER

logger = logging.getLogger(__name__)

GENERATE = "/generate"
CONNECT_S = 10.0
KEEPALIVE_S = 2.0  # below the 5 s after which uvicorn closes idle connections
PROBE_S = 5.0  # for a server to answer its health check
CONTROL_S = 600.0  # for a command; weight updates have separate limits (`--update-weight-timeout`)
PAUSE_S = 60.0  # to pause or resume generation
MEMORY_S = 120.0  # to release or allocate memory
WEIGHT_REPORT_S = 300.0  # to report its weight version and checksums; the default of `--update-weight-timeout`
IDLE_S = 60.0  # for a server to become idle once all its requests are answered
LEAVE_S = 10.0  # to leave a process group
IDLE_POLL_S = 0.02
ACCEPTED = 202  # a router adds or removes a worker
HEALTH = ("/health", "/v1/loads")  # path prefixes of health checks
DRAFT = "draft."  # prefix of the tensor names of a draft model
CACHE, CACHE_BUSY = "kv_cache", 400  # a memory tag, and the status of /flush_cache while requests run
PRECISIONS = {"half": torch.float16, "float16": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32,
              "float32": torch.float32}  # fmt: skip


@dataclass(frozen=True)
class ServerInfo:
    """Settings of a server, from its answer to /server_info.

    With `has_dp_attention`, `dp_size` parts share the `tp_size` processes.

    expert_options: Options that change the memory layout of experts from that of `sglang_layout`; "" if none.
    layout_options: The same for other tensors.
    returns_routes: Requests may ask for routed experts. True if the server does not report it; then it may refuse.
    speculation: Algorithm of speculative decoding; "" for none.
    has_quantized_loader: It was started with furlong's loader of quantized weights.
    streams_increments: Events of a stream have the new tokens only, and not all so far.
    """

    is_furlong: bool
    software: str
    dtype: str
    device_type: str
    tp_size: int
    pp_size: int
    dp_size: int
    context_len: int | None
    is_quantized: bool = False
    has_dp_attention: bool = False
    has_prefix_cache: bool = True
    expert_options: str = ""
    has_dp_head: bool = False
    layout_options: str = ""
    num_http_processes: int = 1
    returns_routes: bool = True
    speculation: str = ""
    ep_size: int = 1
    streams_increments: bool = False
    has_quantized_loader: bool = False
    kv_cache_dtype: str = "auto"

    @staticmethod
    def read(answer: Mapping[str, Any], where: str = "GET /server_info") -> ServerInfo:
        """Parse the answer to /server_info, the request `where`. Raises EngineError for values of another type."""
        with reading(where, answer):
            software = str(answer.get("version", ""))
            is_furlong = software.startswith("furlong ")
            tp_size = int(answer.get("tp_size") or 1)
            plain = {**PLAIN_TENSORS, **(PLAIN_SHARES if tp_size > 1 else {})}
            return ServerInfo(
                is_furlong=is_furlong,
                software=software if is_furlong else f"SGLang {software}",
                dtype=answer.get("dtype") or "auto",
                device_type=(answer.get("device") or "cuda").partition(":")[0],
                tp_size=tp_size,
                pp_size=int(answer.get("pp_size") or 1),
                dp_size=int(answer.get("dp_size") or 1),
                context_len=int(answer.get("context_length") or 0) or None,
                is_quantized=bool(answer.get("quantization")),
                has_dp_attention=bool(answer.get("enable_dp_attention")),
                has_prefix_cache=not answer.get("disable_radix_cache"),
                expert_options="" if is_furlong else options_beside(answer, PLAIN_EXPERTS),
                has_dp_head=bool(answer.get("enable_dp_lm_head")),
                layout_options="" if is_furlong else options_beside(answer, plain),
                num_http_processes=int(answer.get("tokenizer_worker_num") or 1),
                returns_routes=bool(answer.get("enable_return_routed_experts", True)),
                ep_size=int(answer.get("ep_size") or 1),
                speculation=answer.get("speculative_algorithm") or "",
                streams_increments=bool(answer.get("incremental_streaming_output")),
                has_quantized_loader=LOADER in (answer.get("custom_weight_loader") or ()),
                kv_cache_dtype=answer.get("kv_cache_dtype") or "auto",
            )

    @property
    def sharding(self) -> EngineSharding:
        """How the processes shard one copy of the model."""
        attention = self.tp_size // self.dp_size if self.has_dp_attention else self.tp_size
        return EngineSharding(self.tp_size, attention, attention if self.has_dp_head else self.tp_size, self.ep_size)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs, or of processes on CPUs."""
        return self.tp_size * self.pp_size * (1 if self.has_dp_attention else self.dp_size)

    @property
    def caches_late(self) -> bool:
        """Whether requests that are prefilled together each compute a shared prompt, which is cached afterwards.

        False with data-parallel attention, where each part has its own cache.
        """
        return not self.is_furlong and self.has_prefix_cache and self.dp_size == 1


class SglangServer:
    """Client and state of one server.

    A status other than 200, and `success: false` in a 200 reply, are errors with the server's own reason. After an
    `UnreachableError` nothing of an answer was used, so the request may be sent again; every other EngineError is
    final.

    lost: Why the server is no longer used; "" while it is.
    stale: Why it gets no requests although it is alive: its weights are missing or incomplete; "" otherwise.
    version: Weight version loaded last; None before the first.
    newest_label: Newest weight version that it may label answers with; it changes labels while it loads.
    placed: Requests of this process assigned to it. Those beyond `concurrency` wait here.
    running: Requests that were sent to it and not answered yet.
    answered_s: Monotonic time of its last answer to anything but a health check.
    is_paused: Generation is paused, so a health check that waits for a token would fail.
    num_interruptions: How often generation was stopped by a pause, a weight update or a release of memory.
    released: Tags of released memory. SGLang dies if it is asked for a token without it.
    first_rank: Trainer rank on its first GPU, where they share GPUs.
    role: "regular", "prefill" or "decode", for the router; prefill servers have a `bootstrap_port`.
    awaits_weights: Only the next weight update can bring its weights.
    report_s: Timeout of its reports on weights (version, checksums, rows) in seconds; `--update-weight-timeout`.
    busy: Further statuses that mean the same as `BUSY`.
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
        self.url = url
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
        self.load_samples = 0  # sum of the sampled numbers of requests since then (`ServerPool.note_load`)
        self.first_rank = 0
        self.role = "regular"
        self.bootstrap_port: int | None = None
        self.slots = asyncio.Semaphore(concurrency)
        self.queue = RequestQueue()
        self.health_lock = asyncio.Lock()  # one health check at a time
        self._probe_lock = asyncio.Lock()  # held while it generates a token for a health check
        self.seen_alive_s = -math.inf  # monotonic start time of the last health check that passed
        self.answered_s = -math.inf
        self._busy = BUSY + busy
        self._headers, self.api_key = {"Content-Type": "application/json"}, api_key
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
            parts = urlsplit(url)  # a key takes precedence over a password
            url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        self._base = url
        self._http: Any = None  # an aiohttp.ClientSession
        self._is_closed = False

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

    # -- requests ----------------------------------------------------------------------------------------------

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = CONTROL_S,
        headers: Mapping[str, str] | None = None,
        method: str = "",
        on_sent: Callable[[], None] = lambda: None,
        events: EventReader | None = None,
    ) -> Any:
        """Send a request and return the parsed reply: POST `body`, or GET without one, unless `method` is set.

        `on_sent` is called once the request is written. With `events` the reply is a stream, and the result its last
        event. Raises UnreachableError if no answer came, EngineTimeoutError if none came within `timeout_s` (None: no
        limit), and EngineError for an error status or invalid JSON.
        """
        method = method or ("GET" if body is None else "POST")
        where = f"{method} {self.url}{path}"
        try:
            status, content = await self._answer(method, path, body, timeout_s, headers, on_sent, events)
        except TimeoutError as error:
            raise EngineTimeoutError(
                f"{where} did not answer within {timeout_s:g} s; the server hangs, or the limit is too low "
                "(--sglang-router-request-timeout-secs for generation)",
                url=self.url,
            ) from error
        if status in self._busy:
            raise UnreachableError(f"{where} answered {status}: {reason_in(content)}", url=self.url)
        if status not in (200, ACCEPTED):
            hint = "; pass the key it was started with as --sglang-api-key" if status == 401 else ""
            raise EngineError(f"{where} answered {status}: {reason_in(content)}{hint}")
        return parse_answer(content, where) if events is None else events.last()

    async def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        on_sent: Callable[[], None] = lambda: None,
        events: EventReader | None = None,
    ) -> tuple[int, bytes]:
        import aiohttp  # 0.12 s, which a run with the embedded engine does not need

        if self._is_closed:  # nobody would close another session
            raise UnreachableError(f"{method} {self.url}{path}: the client of this server is closed", url=self.url)
        options: dict[str, Any] = {}
        if body is not None:
            sent = orjson.dumps(body)

            async def content() -> AsyncGenerator[bytes]:
                yield sent
                on_sent()

            options |= {"data": content(), "headers": {"Content-Length": str(len(sent)), **(headers or {})}}
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                headers=self._headers,
            )
        url = self._base + path
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.request(method, url, allow_redirects=False, **options) as response,
            ):
                if events is None or response.status != 200:
                    received = await response.read()
                else:
                    received = b""
                    async for piece in response.content.iter_any():
                        events.feed(piece)
                if not path.startswith(HEALTH):  # SGLang answers 503 to those while it hangs
                    self.answered_s = time.monotonic()
                return response.status, received
        except aiohttp.ServerDisconnectedError as error:
            why = "the server closed the connection without an answer"
            raise UnreachableError(f"{method} {self.url}{path}: {why}", url=self.url) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            why = f"{type(error).__name__} {readable(str(error))}"
            raise UnreachableError(f"{method} {self.url}{path}: {why}", url=self.url) from error

    async def ask_object(self, path: str, *, timeout_s: float | None = CONTROL_S) -> dict[str, Any]:
        """GET a JSON object, as `ask`. Raises EngineError for another value."""
        answer = await self.ask(path, timeout_s=timeout_s)
        if not isinstance(answer, dict):
            raise EngineError(f"GET {self.url}{path} answered {readable(answer)}, expected a JSON object; {EXPECTED}")
        return answer

    async def command(self, path: str, *, timeout_s: float | None = CONTROL_S, **body: Any) -> dict[str, Any]:
        """POST a command. Raises EngineError if the reply reports failure, whatever its status."""
        answer = await self.ask(path, body, timeout_s=timeout_s)
        if answer is None:  # SGLang's reply without content
            return {}
        if not isinstance(answer, dict) or answer.get("success", True) is not True:
            reason = answer.get("message", answer) if isinstance(answer, dict) else answer
            raise EngineError(f"POST {self.url}{path} failed: {readable(reason)}")
        return answer

    async def _post_plain(self, path: str) -> tuple[int, str]:
        try:
            status, content = await self._answer("POST", path, timeout_s=IDLE_S)
        except TimeoutError as error:
            raise EngineTimeoutError(
                f"POST {self.url}{path} was not answered within {IDLE_S:g} s", url=self.url
            ) from error
        return status, reason_in(content)

    async def close(self) -> None:
        """Close the connections; the server keeps running. Requests raise UnreachableError from now on."""
        self._is_closed = True
        if self._http is not None:
            await self._http.close()

    # -- health ------------------------------------------------------------------------------------------------

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

    async def num_requests(self, timeout_s: float) -> int | None:
        """Running and queued requests; None if it does not report them."""
        try:
            answer = await self.ask_object("/v1/loads", timeout_s=timeout_s)
            with reading(f"GET {self.url}/v1/loads", answer):
                return sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in answer["loads"])
        except EngineError as error:
            logger.debug("%s does not report its load: %s", self.url, error)
            return None

    # -- generation and memory ---------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Pause generation; `mode` is SGLang's."""
        self.is_paused = True
        self.num_interruptions += 1
        await self.command("/pause_generation", timeout_s=PAUSE_S, mode=mode)

    async def resume(self) -> None:
        """Undo `pause`."""
        await self.command("/continue_generation", timeout_s=PAUSE_S)
        self.is_paused = False

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release the memory of `weights`, `kv_cache` or `cuda_graph`; SGLang needs --enable-memory-saver.

        SGLang dies of this unless it is idle, which takes a moment after its last answer, so its cache is flushed
        first, until that succeeds. Raises EngineError if it takes longer than `IDLE_S`.
        """
        self.released |= set(tags)
        self.num_interruptions += 1
        async with self._probe_lock:
            if CACHE in tags:
                deadline = time.monotonic() + IDLE_S
                while (answer := await self._post_plain("/flush_cache"))[0] != 200:
                    if answer[0] != CACHE_BUSY or time.monotonic() > deadline:
                        raise EngineError(
                            f"{self.url} cannot release its memory: POST /flush_cache answered {answer[0]}: {answer[1]}"
                        )
                    await asyncio.sleep(IDLE_POLL_S)
            await self.command("/release_memory_occupation", timeout_s=MEMORY_S, tags=list(tags))

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Allocate the memory of these tags again, without contents."""
        await self.command("/resume_memory_occupation", timeout_s=MEMORY_S, tags=list(tags))
        self.released -= set(tags)

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

    # -- weights -----------------------------------------------------------------------------------------------

    @property
    def checksum_dtype(self) -> torch.dtype | None:
        """Dtype of the weights if the server computes `core.weights.checksum`, else None."""
        return getattr(torch, self.info.dtype) if self.info.is_furlong else None

    @property
    def device_dtypes(self) -> frozenset[torch.dtype]:
        """Possible dtypes of its weights if it computes `transfer.device_checksum`; else empty."""
        info = self.info
        if info.software not in HASHED or info.device_type != "cuda":
            return frozenset()
        if info.is_quantized and not info.has_quantized_loader:
            return frozenset()
        named = PRECISIONS.get(info.dtype)
        return frozenset(PRECISIONS.values() if named is None else [named])

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

    async def _load(self, path: str, version: int, *, is_last: bool = True, **body: Any) -> None:
        """POST a weight update. SGLang asserts that it is idle when it flushes; held requests prevent that."""
        if is_last and self.running:
            logger.info("%s keeps its prefix cache because of %d held requests", self.url, self.running)
        body |= {"weight_version": str(version), "flush_cache": is_last and not self.running}
        await self.command(path, timeout_s=None, **body)

    async def update_from_disk(self, folder: str, version: int) -> None:
        """Load a folder of safetensors files; the server must see it under the same path."""
        await self._load("/update_weights_from_disk", version, model_path=folder)

    async def update_from_delta(self, folder: str, version: int) -> None:
        """Apply a `files.delta` folder to its weights; the server must see it under the same path."""
        await self._load("/update_weights_from_disk", version, model_path=folder, load_format="delta")

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
        await self._load(
            "/update_weights_from_distributed",
            version,
            is_last=is_last,
            names=[name for name, _ in tensors],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
            group_name=group,
        )

    async def load_shared(self, name: str, tensors: list[dict[str, Any]], version: int, *, is_last: bool) -> None:
        """Load a shared-memory buffer of this machine (`core.shared_memory`)."""
        shared = {"name": name, "tensors": tensors}
        await self._load(
            "/update_weights_from_tensor", version, is_last=is_last, load_format="shared_memory", shared=shared
        )

    async def load_handles(self, handles: Sequence[bytes], version: int, *, is_last: bool) -> None:
        """Load CUDA memory of this machine's GPUs, one IPC handle for each process.

        A draft model keeps its weights; SGLang would otherwise load tensors with common names into it first.
        """
        await self._load(
            "/update_weights_from_tensor",
            version,
            is_last=is_last,
            load_format=LOADER if self.info.has_quantized_loader else "flattened_bucket",
            serialized_named_tensors=[base64.b64encode(handle).decode() for handle in handles],
            **({"disable_draft_model": True} if self.info.speculation else {}),
        )

    async def leave_group(self, name: str) -> None:
        """Leave a process group."""
        await self.command("/destroy_weights_update_group", timeout_s=LEAVE_S, group_name=name)

    async def served_version(self) -> str:
        """The label of the weights in use."""
        answer = await self.ask_object("/model_info", timeout_s=self.report_s)
        with reading(f"GET {self.url}/model_info", answer):
            return str(answer["weight_version"])

    async def model_type(self) -> str:
        """Model type of its Hugging Face config; "" if it does not report it."""
        answer = await self.ask_object("/model_info", timeout_s=self.report_s)
        return str(answer.get("model_type") or "")

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
        with reading(where, answer):
            ranks = answer.get("ranks") or answer.get("payload") or []
            if not ranks:
                raise EngineError(f"{where} answered without checksums: {abbreviate(sorted(answer))}")
            by_process = [
                (
                    int((rank.get("parallelism_info") or {}).get("tp_rank") or 0),
                    {name: digest for name, digest in rank["checksums"].items() if not name.startswith(DRAFT)},
                )
                for rank in ranks
            ]
            return by_process, str(answer.get("per_engine_checksum") or ranks[0]["per_gpu_checksum"])

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
        with reading(f"POST {self.url}/get_weights_by_name", answer):
            if self.info.dp_size > 1:  # one answer from each scheduler
                shown = [each for each in answer if each is not None]
                if any(each != shown[0] for each in shown):
                    raise EngineError(f"{self.url} has {len(shown)} copies of {name} that differ")
                answer = shown[0] if shown else None
            return None if answer is None else torch.tensor(answer, dtype=torch.float32)


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


def url_of(address: str) -> str:
    """Convert `host:port` to a URL. Raises ConfigError for anything but the address of an HTTP server."""
    text = address if "://" in address else f"http://{address}"
    try:
        url = httpx.URL(text)
        has_port = "://" in address or url.port is not None
        is_right = url.scheme in ("http", "https") and bool(url.host) and url.path in ("", "/") and has_port
    except httpx.InvalidURL:
        is_right = False
    if not is_right:
        raise ConfigError(
            f"{address!r} is not the address of a server; use HOST:PORT or http://HOST:PORT, with an IPv6 address in "
            "brackets: [::1]:PORT"
        )
    return text.rstrip("/")


def probe(url: str, *, api_key: str | None, path: str = "/server_info") -> dict[str, Any]:
    """GET a JSON object of a server before the run starts. Raises ConfigError naming the address and what came back.

    It must be called outside an event loop.
    """

    async def ask() -> dict[str, Any]:
        server = SglangServer(url, ServerInfo.read({}), api_key=api_key)
        try:
            return await server.ask_object(path, timeout_s=PROBE_S)
        finally:
            await server.close()

    try:
        return asyncio.run(ask())
    except NoAnswerError as error:
        text = f"no engine answers at {url} ({error}); start it, or fix the address"
        raise ConfigError(redact_credentials(text)) from error
    except EngineError as error:
        question = "" if "--sglang-api-key" in str(error) else "; is this the address of an SGLang server?"
        raise ConfigError(redact_credentials(f"{error}{question}")) from error
