"""ASGI application over the embedded engine: a subset of SGLang's protocol, OpenAI's, and Prometheus metrics.

Every error reply is JSON with the reason. `serve` binds it to an address.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec
import orjson
import xxhash
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from furlong.errors import EngineError, FurlongError, SyncError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.request_error import RequestError
from furlong.inference.server.generate_api import ServerContext, generate
from furlong.inference.server.openai_api import completions
from furlong.inference.server.schemas import Count, Name, convert, quote
from furlong.inference.server.web import (
    HEALTH_PATH,
    Gate,
    Handler,
    ServerLimits,
    answering,
    json_reply,
    json_response,
    not_found,
    read_object,
)
from furlong.inference.server.weights_api import WeightEndpoints
from furlong.interfaces import PauseMode, SamplingParams
from furlong.version import __version__

logger = logging.getLogger(__name__)

MAX_SHOWN_VALUES = 1 << 20  # of one tensor in a reply
HEALTH_S, POLL_S = 60.0, 0.01  # time limit and poll interval for the next token of a running request
PAUSES: dict[str, PauseMode] = {"abort": "abort", "retract": "hold", "in_place": "hold"}


class _Abort(msgspec.Struct):
    abort_all: bool | None = None
    rid: Name | None = None


class _Pause(msgspec.Struct):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Memory(msgspec.Struct):
    """SGLang's memory tags; all of them by default. There are no CUDA graphs here."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None

    @property
    def chosen(self) -> set[str]:
        return set(self.tags or ("weights", "kv_cache", "cuda_graph"))


class _WeightName(msgspec.Struct):
    name: Name
    truncate_size: Count = 100


AgentEndpoints = Callable[[ServerContext], Sequence[Route]]
"""Returns the routes of chat and of agents, which another package adds."""


class EngineServer:
    """HTTP endpoints of one engine. `app` is the ASGI application."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        *,
        model_name: str,
        api_key: str | None = None,
        limits: ServerLimits | None = None,
        incremental_streaming: bool = False,
        agents: AgentEndpoints | None = None,
    ) -> None:
        self.engine, self.model_name = engine, model_name
        self.limits = limits or ServerLimits()
        self._model = ServerContext(engine, model_name, self.limits, incremental_streaming)
        self.weights = WeightEndpoints(engine)
        self._started_s = time.time()
        self.app = Starlette(
            routes=[*self._routes(), *([] if agents is None else agents(self._model))],
            middleware=[Middleware(Gate, limits=self.limits, api_key=api_key or None)],
            exception_handlers={404: not_found, 405: not_found},
        )

    def _routes(self) -> list[Route]:
        w = self.weights
        both = ["GET", "POST"]
        facts: dict[str, Callable[[], Any]] = {
            HEALTH_PATH: lambda: {"status": "ok"},
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/weight_version": lambda: {"weight_version": w.label},
            "/get_weight_version": lambda: {"weight_version": w.label},
            "/get_load": lambda: [self._load()],
            "/v1/loads": self._loads,
            "/v1/models": self._models,
        }
        get: dict[str, Handler] = {path: _shows(content) for path, content in facts.items()}
        get |= {"/health_generate": self._health_generate, "/metrics": self._metrics}
        post: dict[str, Handler] = {
            "/generate": lambda http: generate(http, self._model, w.label),
            "/v1/completions": lambda http: completions(http, self._model),
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/weights_checker": self._check_weights,
            "/get_weights_by_name": self._weight_by_name,
            "/release_memory_occupation": self._release_memory,
            "/resume_memory_occupation": self._resume_memory,
        }
        updates: dict[str, Callable[[dict[str, Any]], Awaitable[str]]] = {
            "/update_weights_from_disk": w.from_disk,
            "/update_weights_from_tensor": w.from_tensors,
            "/update_weights_from_distributed": w.from_group,
            "/init_weights_update_group": w.groups.join,
            "/destroy_weights_update_group": w.groups.leave,
            "/update_weight_version": w.rename,
        }
        post |= {path: _update(action) for path, action in updates.items()}
        also_get = {"/flush_cache", "/get_weights_by_name"}
        routes = [Route(path, answering(handler, self.limits), methods=["GET"]) for path, handler in get.items()]
        for path, handler in post.items():
            methods = both if path in also_get else ["POST"]
            routes.append(Route(path, answering(handler, self.limits), methods=methods))
        return routes

    # -- identity and health -----------------------------------------------------------------------------------

    async def _health_generate(self, _http: HttpRequest) -> Response:
        """Wait for the next token of any running request, or generate one if there are none.

        While requests run, an extra request would wait for a slot, and a full engine would seem to hang. A paused
        engine answers `paused`.
        """
        before, deadline_s = self.engine.stats(), time.monotonic() + HEALTH_S
        while not self.engine.is_paused and (now := self.engine.stats()).running:
            if (now.tokens_generated, now.prefilled_tokens) != (before.tokens_generated, before.prefilled_tokens):
                return json_response({"status": "ok"})
            if time.monotonic() > deadline_s:
                raise EngineError(f"{now.running} requests are running, but no token was generated in {HEALTH_S:g} s")
            await asyncio.sleep(POLL_S)
        if self.engine.is_paused:
            return json_response({"status": "paused"})
        try:
            async with asyncio.timeout(HEALTH_S):
                await self.engine.generate([0], SamplingParams(max_new_tokens=1, temperature=0.0))
        except TimeoutError as error:
            raise EngineError(f"no token was generated in {HEALTH_S:g} s") from error
        return json_response({"status": "ok"})

    def _model_info(self) -> dict[str, Any]:
        config = self.engine.config
        path = str(self.engine.model_dir or self.model_name)
        return {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.weights.label,
            "model_type": config.model_type,
            "architectures": getattr(config, "architectures", None),
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }

    def _server_info(self) -> dict[str, Any]:
        engine, stats = self.engine, self.engine.stats()
        return {
            "model_path": str(engine.model_dir or self.model_name),
            "served_model_name": self.model_name,
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "version": f"furlong {__version__}",
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": str(engine.device),
            "decode_path": engine.model.description,
            "context_length": engine.context_len,
            "max_running_requests": engine.num_slots,
            "enable_return_routed_experts": engine.model.records_routes,
            "weight_version": self.weights.label,
            "uptime_s": time.time() - self._started_s,
            "internal_states": [{"last_gen_throughput": stats.tokens_per_s, "num_running_reqs": stats.running}],
        }

    def _load(self) -> dict[str, Any]:
        stats = self.engine.stats()
        return {
            "dp_rank": 0,
            "num_reqs": stats.running + stats.waiting,
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_tokens": stats.cached_tokens,
            "num_total_tokens": stats.cached_tokens,
        }

    def _loads(self) -> dict[str, Any]:
        entry = self._load()
        aggregate = {**entry, "dp_rank": None}
        return {"timestamp": time.time(), "dp_rank_count": 1, "loads": [entry], "aggregate": aggregate}

    def _models(self) -> dict[str, Any]:
        model = {
            "id": self.model_name,
            "object": "model",
            "created": int(self._started_s),
            "owned_by": "furlong",
            "root": self.model_name,
            "max_model_len": self.engine.context_len,
        }
        return {"object": "list", "data": [model]}

    async def _metrics(self, _http: HttpRequest) -> Response:
        stats = self.engine.stats()
        rows = [
            ("num_running_reqs", "gauge", "Running requests.", stats.running),
            ("num_queue_reqs", "gauge", "Queued requests.", stats.waiting),
            ("num_used_tokens", "gauge", "Cached tokens of running requests.", stats.cached_tokens),
            ("gen_throughput", "gauge", "Generated tokens per busy second.", stats.tokens_per_s),
            ("generation_tokens_total", "counter", "Generated tokens.", stats.tokens_generated),
            ("prompt_tokens_total", "counter", "Computed prompt tokens.", stats.prefilled_tokens),
            ("weight_version", "gauge", "Weight version in use.", stats.version),
        ]
        label = escaped_label(self.model_name)
        lines = [
            f'# HELP sglang:{name} {text}\n# TYPE sglang:{name} {kind}\nsglang:{name}{{model_name="{label}"}} {value}\n'
            for name, kind, text, value in rows
        ]
        return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")

    # -- control -----------------------------------------------------------------------------------------------

    async def _abort(self, http: HttpRequest) -> Response:
        fields = convert(await read_object(http), _Abort)
        if not fields.abort_all and fields.rid is None:
            raise RequestError("rid is missing; name a request, or set abort_all")
        count = await self.engine.abort_request(*([] if fields.abort_all else [fields.rid]))
        return json_response({"success": True, "num_aborted": count})

    async def _pause(self, http: HttpRequest) -> Response:
        mode = convert(await read_object(http), _Pause).mode
        await self.engine.pause(PAUSES[mode])
        self.engine.kv_policy = "keep" if mode == "in_place" else "recompute"
        return json_response({"status": "ok", "message": f"generation paused ({mode})"})

    async def _continue(self, _http: HttpRequest) -> Response:
        await self.engine.resume()
        return json_response({"status": "ok", "message": "generation resumed"})

    async def _flush(self, _http: HttpRequest) -> Response:
        stats = self.engine.stats()
        if stats.running or stats.waiting:
            raise RequestError(
                f"cannot flush the cache with {stats.running} running and {stats.waiting} queued requests; "
                "abort them or wait until they finish"
            )
        await self.engine.forget_prefixes()
        return json_response({"success": True, "message": "cache flushed"})

    async def _check_weights(self, http: HttpRequest) -> Response:
        body = await read_object(http)
        if (action := body.get("action", "checksum")) != "checksum":
            raise RequestError(f"action is {quote(action)}; only 'checksum' is supported")
        checksums = await self.engine.execute(self.engine.model.table.checksums)
        info = {
            "checksums": checksums,
            # one checksum over all tensors, independent of their order
            "per_gpu_checksum": xxhash.xxh3_128_hexdigest(orjson.dumps(sorted(checksums.items()))),
            "parallelism_info": {"tp_size": 1, "tp_rank": 0, "dp_size": 1, "dp_rank": 0, "pp_size": 1, "pp_rank": 0},
        }
        return json_response({"success": True, "message": f"{len(checksums)} tensors", "payload": [info]})

    async def _weight_by_name(self, http: HttpRequest) -> Response:
        body = {**http.query_params, **await read_object(http)}
        word = body.get("truncate_size")
        if isinstance(word, str) and word.isascii() and word.isdecimal() and len(word) < 10:
            body["truncate_size"] = int(word)
        fields, table = convert(body, _WeightName), self.engine.model.table
        rows, name = fields.truncate_size, quote(fields.name)
        try:
            view = table.view(fields.name)
        except SyncError as error:
            raise RequestError(str(error)) from error
        shown = view if view.dim() else view[None]
        if (num_values := shown[:rows].numel()) > MAX_SHOWN_VALUES:
            raise RequestError(f"{rows} rows of {name} are {num_values} values; ask for fewer rows")
        tensor = await self.engine.execute(lambda: shown[:rows].clone())
        return await json_reply(lambda: tensor.float().tolist(), size=tensor.numel() * 8)

    async def _release_memory(self, http: HttpRequest) -> Response:
        tags = convert(await read_object(http), _Memory).chosen
        try:
            freed = await self.engine.release_memory(weights="weights" in tags, cache="kv_cache" in tags)
        except EngineError as error:
            raise RequestError(str(error)) from error
        return json_response({"success": True, "message": f"{freed} bytes released", "released_bytes": freed})

    async def _resume_memory(self, http: HttpRequest) -> Response:
        tags = convert(await read_object(http), _Memory).chosen
        if "weights" in tags:  # the cache grows on demand
            await self.engine.execute(self.engine.model.table.restore)
        return json_response({"success": True, "message": f"memory for {', '.join(sorted(tags))}"})


def _update(action: Callable[[dict[str, Any]], Awaitable[str]]) -> Handler:
    async def handler(http: HttpRequest) -> Response:
        body = await read_object(http)
        try:
            message = await action(body)
        except (FurlongError, RuntimeError, OSError) as error:
            message = str(error)[:1000].encode("utf-8", "replace").decode()
            logger.warning("weight update failed: %s", message)
            return json_response({"success": False, "message": message}, 400)
        return json_response({"success": True, "message": message, "num_paused_requests": 0})

    return handler


def escaped_label(label: str) -> str:
    """Return a label value in Prometheus' text format."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _shows(content: Callable[[], Any]) -> Handler:
    async def handler(_http: HttpRequest) -> Response:
        return json_response(content())

    return handler
