"""ASGI application over the embedded engine: a subset of SGLang's protocol, OpenAI's, and Prometheus metrics.

Every error reply is JSON with the reason. `serve` binds it to an address.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import orjson
import xxhash
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from furlong.errors import EngineError, FurlongError, SyncError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.request_error import RequestError
from furlong.inference.server import openai_api
from furlong.inference.server.bodies import (
    CLIENT_GONE,
    error_response,
    json_list,
    json_response,
    printable,
    read_object,
)
from furlong.inference.server.chat_prompts import PromptEncoder
from furlong.inference.server.fields import boolean, integer, name_of, quote
from furlong.inference.server.generate_api import ServerContext, generate
from furlong.inference.server.limits import (
    HEALTH_PATH,
    Counts,
    LimitRequests,
    RefusedError,
    RequestGuard,
    ServerLimits,
    flag_of,
)
from furlong.inference.server.weights_api import WeightEndpoints
from furlong.interfaces import PauseMode, SamplingParams
from furlong.version import __version__

logger = logging.getLogger(__name__)

MAX_SHOWN_VALUES = 1 << 20  # of one tensor in a reply
HEALTH_S, POLL_S = 60.0, 0.01  # time limit and poll interval for the next token of a running request
Handler = Callable[[HttpRequest, dict[str, Any]], Awaitable[Response]]


class AgentEndpoints(Protocol):
    """Endpoints that another package adds: routes, and chat completions with tools."""

    @property
    def routes(self) -> Sequence[Route]:
        """Routes of further protocols."""
        ...

    def takes_chat(self, body: Mapping[str, Any]) -> bool:
        """Return whether `answer_chat` answers a chat completion."""
        ...

    async def answer_chat(self, http: HttpRequest, body: dict[str, Any]) -> Response:
        """Answer a chat completion. Raises RequestError."""
        ...


class ApiKey:
    """ASGI middleware: refuse requests without `Authorization: Bearer <key>`, except to /health."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check HTTP requests; forward everything else."""
        if scope["type"] == "http" and scope["path"] != HEALTH_PATH:
            header = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(header, self._expected):
                response = error_response("a valid API key is required: Authorization: Bearer <key>", 401)
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)


class EngineServer:
    """HTTP endpoints of one engine. `app` is the ASGI application."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        *,
        model_name: str,
        api_key: str | None = None,
        limits: ServerLimits | None = None,
        trusts_templates: bool = False,
        incremental_streaming: bool = False,
        agents: AgentEndpoints | None = None,
    ) -> None:
        self.engine, self.model_name, self._agents = engine, model_name, agents
        self.limits = limits or ServerLimits()
        prompts = PromptEncoder(engine, self.limits, trusts_templates=trusts_templates)
        self._model = ServerContext(engine, model_name, prompts, self.limits, incremental_streaming)
        self.weights = WeightEndpoints(engine)
        self._started_s = time.time()
        middleware = [Middleware(ApiKey, key=api_key)] if api_key else []
        self.counts = Counts(self.limits)
        middleware.append(Middleware(LimitRequests, counts=self.counts, refuse=error_response))
        self.app = Starlette(
            routes=self._routes(),
            middleware=middleware,
            exception_handlers={404: _not_found, 405: _not_found},
        )

    def _routes(self) -> list[Route]:
        w = self.weights
        both = ["GET", "POST"]
        facts: dict[str, Callable[[], Any]] = {
            "/health": lambda: {"status": "ok"},
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
            "/generate": lambda http, body: generate(http, self._model, body, w.label),
            "/v1/chat/completions": self._chat,
            "/v1/completions": lambda http, body: openai_api.completions(http, self._model, body),
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
            "/init_weights_update_group": w.init_group,
            "/destroy_weights_update_group": w.destroy_group,
            "/update_weight_version": w.rename,
        }
        post |= {path: self._update(action) for path, action in updates.items()}
        also_get = {"/flush_cache", "/get_weights_by_name"}
        routes = [] if self._agents is None else list(self._agents.routes)
        routes += [Route(path, _guarded(handler), methods=["GET"]) for path, handler in get.items()]
        for path, handler in post.items():
            routes.append(Route(path, _guarded(handler), methods=both if path in also_get else ["POST"]))
        return routes

    # -- identity and health -----------------------------------------------------------------------------------

    async def _health_generate(self, _http: HttpRequest, _body: dict[str, Any]) -> Response:
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

    async def _metrics(self, _http: HttpRequest, _body: dict[str, Any]) -> Response:
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

    async def _chat(self, http: HttpRequest, body: dict[str, Any]) -> Response:
        if self._agents is not None and self._agents.takes_chat(body):
            return await self._agents.answer_chat(http, body)
        return await openai_api.chat_completions(http, self._model, body)

    # -- control -----------------------------------------------------------------------------------------------

    async def _abort(self, _http: HttpRequest, body: dict[str, Any]) -> Response:
        if boolean(body, "abort_all"):
            return json_response({"success": True, "num_aborted": await self.engine.abort_request()})
        count = await self.engine.abort_request(name_of(body, "rid"))
        return json_response({"success": True, "num_aborted": count})

    async def _pause(self, _http: HttpRequest, body: dict[str, Any]) -> Response:
        modes: dict[str, PauseMode] = {"abort": "abort", "retract": "hold", "in_place": "hold"}
        mode = body.get("mode", "abort")
        if not isinstance(mode, str) or mode not in modes:
            raise RequestError(f"mode is {quote(mode)}, must be one of {sorted(modes)}")
        await self.engine.pause(modes[mode])
        self.engine.kv_policy = "keep" if mode == "in_place" else "recompute"
        return json_response({"status": "ok", "message": f"generation paused ({mode})"})

    async def _continue(self, _http: HttpRequest, _body: dict[str, Any]) -> Response:
        await self.engine.resume()
        return json_response({"status": "ok", "message": "generation resumed"})

    async def _flush(self, _http: HttpRequest, _body: dict[str, Any]) -> Response:
        stats = self.engine.stats()
        if stats.running or stats.waiting:
            raise RequestError(
                f"cannot flush the cache with {stats.running} running and {stats.waiting} queued requests; "
                "abort them or wait until they finish"
            )
        await self.engine.forget_prefixes()
        return json_response({"success": True, "message": "cache flushed"})

    def _update(self, action: Callable[[dict[str, Any]], Awaitable[str]]) -> Handler:
        async def handler(_http: HttpRequest, body: dict[str, Any]) -> Response:
            try:
                message = await action(body)
            except (FurlongError, RuntimeError, OSError) as error:
                message = printable(str(error))
                logger.warning("weight update failed: %s", message)
                return json_response({"success": False, "message": message}, 400)
            return json_response({"success": True, "message": message, "num_paused_requests": 0})

        return handler

    async def _check_weights(self, _http: HttpRequest, body: dict[str, Any]) -> Response:
        if (action := body.get("action", "checksum")) != "checksum":
            raise RequestError(f"action is {quote(action)}; only 'checksum' is supported")
        checksums = await self.engine.execute(self.engine.model.table.checksums)
        info = {
            "checksums": checksums,
            "per_gpu_checksum": await asyncio.to_thread(_combined, checksums),
            "parallelism_info": {"tp_size": 1, "tp_rank": 0, "dp_size": 1, "dp_rank": 0, "pp_size": 1, "pp_rank": 0},
        }
        return json_response({"success": True, "message": f"{len(checksums)} tensors", "payload": [info]})

    async def _weight_by_name(self, http: HttpRequest, body: dict[str, Any]) -> Response:
        body = {**http.query_params, **body}
        name, table = name_of(body, "name"), self.engine.model.table
        word = body.get("truncate_size", 100)
        if isinstance(word, str) and word.isascii() and word.isdecimal() and len(word) < 10:
            word = int(word)
        rows = integer({"truncate_size": word}, "truncate_size", low=0, high=(1 << 31) - 1)
        try:
            view = table.view(name)
            shown = view if view.dim() else view[None]
            if rows < len(shown) and (num_values := rows * (shown[:1].numel())) > MAX_SHOWN_VALUES:
                raise RequestError(f"{rows} rows of {quote(name)} are {num_values} values; ask for fewer rows")
            if rows >= len(shown) and shown.numel() > MAX_SHOWN_VALUES:
                raise RequestError(f"{quote(name)} has {shown.numel()} values; ask for fewer rows")
            tensor = await self.engine.execute(lambda: shown[:rows].clone())
        except SyncError as error:
            raise RequestError(str(error)) from error
        return await json_list(
            http.state.guard, [tensor], lambda each: each.float().tolist(), size=tensor.numel() * 8, as_list=False
        )

    async def _release_memory(self, _http: HttpRequest, body: dict[str, Any]) -> Response:
        tags = _memory_tags(body)
        try:
            freed = await self.engine.release_memory(weights="weights" in tags, cache="kv_cache" in tags)
        except EngineError as error:
            raise RequestError(str(error)) from error
        return json_response({"success": True, "message": f"{freed} bytes released", "released_bytes": freed})

    async def _resume_memory(self, _http: HttpRequest, body: dict[str, Any]) -> Response:
        tags = _memory_tags(body)
        if "weights" in tags:  # the cache grows on demand
            await self.engine.execute(self.engine.model.table.restore)
        return json_response({"success": True, "message": f"memory for {', '.join(sorted(tags))}"})


def _memory_tags(body: dict[str, Any]) -> set[str]:
    """Parse SGLang's memory tags; all of them by default. There are no CUDA graphs here."""
    known = ("weights", "kv_cache", "cuda_graph")
    tags: Any = body.get("tags") or known
    if not isinstance(tags, list | tuple) or any(tag not in known for tag in cast("Sequence[Any]", tags)):
        raise RequestError(f"tags are {quote(tags)}, must be a list of some of {list(known)}")
    return set(cast("Sequence[str]", tags))


def _combined(checksums: dict[str, str]) -> str:
    """One checksum over all tensors, independent of their order."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps(sorted(checksums.items())))


def escaped_label(label: str) -> str:
    """Return a label value in Prometheus' text format."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


async def _not_found(http: HttpRequest, error: Exception) -> Response:
    code = int(getattr(error, "status_code", 404))
    return error_response(f"{http.method} {http.url.path[:200]} is not supported by furlong serve", code)


def _shows(content: Callable[[], Any]) -> Handler:
    """Make a handler that replies with `content()` as JSON."""

    async def handler(_http: HttpRequest, _body: dict[str, Any]) -> Response:
        return json_response(content())

    return handler


def _guarded(handler: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Parse the JSON body and turn errors into JSON replies."""

    async def endpoint(http: HttpRequest) -> Response:
        guard: RequestGuard = http.state.guard
        try:
            async with asyncio.timeout_at(guard.deadline_s):
                return await handler(http, await read_object(http))
        except TimeoutError:
            limit = f"{guard.limits.request_timeout} s ({flag_of('request_timeout')})"
            return error_response(f"{http.method} {http.url.path[:200]} was not answered within {limit}", 504)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except RefusedError as error:
            return error_response(str(error), error.status)
        except RequestError as error:
            return error_response(str(error), 400)
        except EngineError as error:
            return error_response(str(error), 500)
        except Exception as error:
            logger.exception("%s %s", http.method, http.url.path[:200])
            return error_response(f"{type(error).__name__}: {error}; the log of the engine has the traceback", 500)

    return endpoint
