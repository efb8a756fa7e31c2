"""Serve the embedded engine over HTTP, on 127.0.0.1 by default.

`running_server` serves an engine in this process; `main` is the command `furlong serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from furlong.core.addresses import bound_socket, host_and_port, is_loopback
from furlong.core.process_environment import API_KEY_VARIABLE
from furlong.core.tracing import tracer
from furlong.errors import ConfigError, EngineError
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.server.app import AgentEndpoints, EngineServer
from furlong.inference.server.web import ServerLimits, build_server, flag_of
from furlong.inference.server.weights_api import WeightGroups
from furlong.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

EXIT_S = 3.5  # from a signal to the end of the process, at the latest
ABORT_S = 1.0  # for running requests to be aborted


@contextlib.asynccontextmanager
async def running_server(
    engine: EmbeddedEngine,
    *,
    model_name: str = "furlong",
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    limits: ServerLimits | None = None,
    incremental_streaming: bool = False,
    agents: AgentEndpoints | None = None,
) -> AsyncGenerator[str, None]:
    """Serve `engine` on the running event loop and yield the base URL. The engine stays open afterwards."""
    server = EngineServer(
        engine,
        model_name=model_name,
        api_key=api_key,
        limits=limits,
        incremental_streaming=incremental_streaming,
        agents=agents,
    )
    listener = bound_socket(host, port)
    uvicorn_server = build_server(server.app, server.limits)
    task = asyncio.create_task(uvicorn_server.serve(sockets=[listener]))
    try:
        while not uvicorn_server.started:
            if task.done():
                await task
                raise EngineError("the HTTP server exited during startup; its log shows why")
            await asyncio.sleep(0.005)
        yield f"http://{host_and_port(host, listener.getsockname()[1])}"
    finally:
        uvicorn_server.should_exit = True
        server.weights.groups.close()
        await task
        listener.close()


async def _serve(engine: EmbeddedEngine, name: str, args: argparse.Namespace, agents: AgentEndpoints | None) -> None:
    """Serve until SIGINT or SIGTERM, then close the engine, within `EXIT_S`."""
    stop, loop, ends = asyncio.Event(), asyncio.get_running_loop(), list[threading.Timer]()

    def exit_soon(number: int, frame: object) -> None:  # noqa: ARG001  signature of signal handlers
        if not ends:
            ends.append(threading.Timer(EXIT_S, _end_process))
            ends[0].daemon = True
            ends[0].start()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGINT, signal.SIGTERM):  # not through the loop: a large request may keep it for seconds
        signal.signal(number, exit_soon)
    limits = ServerLimits(**{limit.name: getattr(args, limit.name) for limit in dataclasses.fields(ServerLimits)})
    try:
        async with running_server(
            engine,
            model_name=name,
            host=args.host,
            port=args.port,
            api_key=args.api_key,
            limits=limits,
            incremental_streaming=args.incremental_streaming_output,
            agents=agents,
        ) as url:
            sys.stdout.write(f"serving {name} at {url}\n")
            sys.stdout.flush()
            await stop.wait()
            try:
                async with asyncio.timeout(ABORT_S):
                    await engine.pause("abort")
            except TimeoutError:
                logger.warning("the engine is busy; running requests are not answered")
    finally:
        await engine.close()


def _end_process() -> None:
    """End the process without its exit handlers: a model step, a weight load or a process group does not end."""
    tracer.stop()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def _number(low: int, high: int | None = None) -> Callable[[str], int]:
    def number(word: str) -> int:
        value = int(word)
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{value} is not {f'from {low} to {high}' if high else f'{low} or more'}")
        return value

    return number


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name} is not a device; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: {torch.cuda.device_count()} CUDA devices are visible; use --device cpu")
    return device


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="furlong serve", description="Serve a model over HTTP with the protocols of SGLang and OpenAI."
    )
    add = parser.add_argument
    add("--model-path", type=Path, required=True, metavar="DIR", help="Hugging Face model folder")
    add("--served-model-name", metavar="NAME", help="model name in /v1/models (default: name of the folder)")
    add("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1); other addresses require an API key")
    add("--port", type=_number(0, 65535), default=30000, help="port; 0 chooses a free one (default: 30000)")
    add(
        "--api-key",
        default=os.environ.get(API_KEY_VARIABLE),
        metavar="KEY",
        help=f"API key that clients must send as Authorization: Bearer KEY (default: ${API_KEY_VARIABLE})",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="dtype of weights and computation (default: float32)",
    )
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    add(
        "--max-running-requests",
        type=_number(1),
        default=128,
        metavar="N",
        help="requests decoded concurrently (default: 128)",
    )
    add(
        "--context-length",
        type=_number(2),
        metavar="N",
        help="maximum tokens of prompt and response (default: that of the model)",
    )
    add("--threads", type=_number(1, 1024), metavar="N", help="CPU threads of the model (default: PyTorch's)")
    add(
        "--random-seed",
        type=int,
        default=0,
        metavar="SEED",
        help="seed for requests without sampling_seed (default: 0)",
    )
    add("--skip-tokenizer-init", action="store_true", help="accept and return token ids only")
    add(
        "--enable-return-routed-experts",
        action="store_true",
        help="let requests ask for the experts that their tokens were routed to",
    )
    add(
        "--incremental-streaming-output",
        action="store_true",
        help="streams of /generate contain only new tokens; requests may choose with incremental_streaming_output",
    )
    group = parser.add_argument_group("limits")
    for limit in dataclasses.fields(ServerLimits):
        text = f"{limit.metadata['help']} (default: {limit.default})"
        group.add_argument(flag_of(limit.name), type=_number(1), default=limit.default, metavar="N", help=text)
    return parser


def main(words: Sequence[str], agents: AgentEndpoints | None = None) -> int:
    """Run `furlong serve`; `agents` adds the routes of chat.

    Raises ConfigError for an address that other machines can reach without an API key.
    """
    args = _parser().parse_args(words)
    if not args.api_key and not is_loopback(args.host):
        raise ConfigError(
            f"--host {args.host} is reachable from other machines, which could replace the weights of the server; "
            f"set --api-key or {API_KEY_VARIABLE}, or bind 127.0.0.1"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    tracer.start_from_environment(f"engine {args.port}")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    tokenizer: Any = None if args.skip_tokenizer_init else load_tokenizer(args.model_path)
    engine = EmbeddedEngine(
        args.model_path,
        dtype=getattr(torch, args.dtype),
        device=_device(args.device),
        num_slots=args.max_running_requests,
        context_len=args.context_length,
        tokenizer=tokenizer,
        seed=args.random_seed,
        return_routed_experts=args.enable_return_routed_experts,
    )
    name = args.served_model_name or args.model_path.name
    asyncio.run(_serve(engine, name, args, agents))
    if WeightGroups.was_used:
        _end_process()
    return 0
