"""`POST /generate` of a run on a loopback address: for user functions that post to `args.sglang_router_ip`.

It answers with whatever engine the run has, and cannot change weights or pause generation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from furlong.errors import EngineError, RolloutError
from furlong.inference.embedded.request import Finished
from furlong.inference.request_error import RequestError
from furlong.inference.server.app import ApiKey
from furlong.inference.server.bodies import CLIENT_GONE, error_response, json_list, json_response, read_object
from furlong.inference.server.events import DONE, event_stream, sse
from furlong.inference.server.fields import boolean
from furlong.inference.server.generate_api import (
    UNSUPPORTED_FIELDS,
    parameters_of,
    reject_unsupported,
    reply,
    sample_requests,
    wants_log_probs,
)
from furlong.inference.server.generate_fields import check_rows, prompts_of
from furlong.inference.server.limits import Counts, LimitRequests, RefusedError, RequestGuard, ServerLimits
from furlong.inference.server.listener import LoopServer, listening_socket
from furlong.inference.server.streaming import GenerateRequest
from furlong.interfaces import Completion, SamplingParams

HOST = "127.0.0.1"

logger = logging.getLogger(__name__)

Complete = Callable[[list[int], SamplingParams], Awaitable[Completion]]


class Gateway:
    """Serves `/generate` in SGLang's format through `complete`. The port is open from the start, and `start` answers.

    encode: text to token ids, with special tokens, as SGLang encodes `text`. facts: reply of /model_info.
    """

    def __init__(
        self,
        complete: Complete,
        *,
        encode: Callable[[str], list[int]],
        facts: Mapping[str, Any],
        api_key: str | None = None,
    ) -> None:
        self._complete, self._encode, self._facts = complete, encode, dict(facts)
        self._limits = ServerLimits()
        self._counts = Counts(self._limits)
        listener = listening_socket(HOST, 0)
        self.address: tuple[str, int] = (HOST, listener.getsockname()[1])
        self._server = LoopServer(self._app(api_key), listener, self._counts)

    async def start(self) -> None:
        """Answer requests on the running event loop. Raises EngineError if the server exits."""
        await self._server.start()

    async def close(self) -> None:
        """Stop answering and close the port."""
        await self._server.close()

    def _app(self, api_key: str | None) -> Starlette:
        middleware = [Middleware(ApiKey, key=api_key)] if api_key else []
        middleware.append(Middleware(LimitRequests, counts=self._counts, refuse=error_response))
        routes = [Route("/generate", self._answer, methods=["POST"]), Route("/health", self._health)]
        routes += [Route(path, self._model_info) for path in ("/model_info", "/get_model_info")]
        return Starlette(routes=routes, middleware=middleware, exception_handlers={404: _not_found, 405: _not_found})

    async def _health(self, _http: HttpRequest) -> Response:
        return json_response({"status": "ok"})

    async def _model_info(self, _http: HttpRequest) -> Response:
        return json_response(self._facts)

    async def _answer(self, http: HttpRequest) -> Response:
        guard: RequestGuard = http.state.guard
        try:
            async with asyncio.timeout_at(guard.deadline_s):
                return await self._generate(guard, await read_object(http))
        except TimeoutError:
            return error_response(f"/generate was not answered within {self._limits.request_timeout} s", 504)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except RefusedError as error:
            return error_response(str(error), error.status)
        except (RequestError, RolloutError) as error:
            return error_response(str(error), 400)
        except EngineError as error:
            return error_response(str(error), 500)

    async def _generate(self, guard: RequestGuard, body: Mapping[str, Any]) -> Response:
        reject_unsupported(body, UNSUPPORTED_FIELDS)
        prompts, is_list = prompts_of(body)
        rids, params, routes_from, n = parameters_of(body, len(prompts), self._limits)
        if body.get("text") is not None:
            rows = [self._encode(text) for text in prompts]
        else:
            check_rows("input_ids", prompts)
            rows = prompts
        with_log_probs = wants_log_probs(body)
        requests = sample_requests(rids, rows, params, routes_from=routes_from)
        completions = await asyncio.gather(*(self._complete(list(each.ids), each.params) for each in requests))
        replies = [_reply(*pair, with_log_probs) for pair in zip(requests, completions, strict=True)]
        if boolean(body, "stream"):
            return event_stream(guard, _events(replies, is_list=is_list or n > 1))
        return await json_list(guard, replies, lambda each: each, size=len(replies), as_list=is_list or n > 1)


def _reply(request: GenerateRequest, completion: Completion, with_log_probs: bool) -> dict[str, Any]:
    """Return SGLang's reply; `weight_version` is that of the last token."""
    version = str(completion.versions[-1]) if completion.versions else "unknown"
    return reply(request, Finished(completion), version=version, with_log_probs=with_log_probs)


async def _events(replies: Sequence[dict[str, Any]], *, is_list: bool) -> AsyncIterator[bytes]:
    """Stream each completion as one event."""
    for index, each in enumerate(replies):
        yield sse({"index": index, **each} if is_list else each)
    yield DONE


async def _not_found(http: HttpRequest, error: Exception) -> Response:
    code = int(getattr(error, "status_code", 404))
    return error_response(
        f"{http.method} {http.url.path[:200]} is not served by the run; it has /generate, /health and /model_info. "
        "Start engines and a router for the rest: --rollout-num-gpus N --sglang-router-strategy cache_aware",
        code,
    )
