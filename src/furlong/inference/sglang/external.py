"""Connects to engine servers that the run did not start (--engine external)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from furlong.config.facts import returns_routes
from furlong.config.sections import Config
from furlong.core.addresses import host_and_port
from furlong.core.token_stream import TextTokenizer
from furlong.core.transports import transport_spec
from furlong.errors import ConfigError, EngineError
from furlong.inference.sglang.answers import reading
from furlong.inference.sglang.server import PROBE_S, ServerInfo, SglangServer, connected, probe, url_of

logger = logging.getLogger(__name__)

SHOWN_TEXT = "12 + 30 = 42, naïve façade"


def connect_external(config: Config, tokenizer: TextTokenizer | None) -> tuple[list[SglangServer], SglangServer | None]:
    """Return the servers and the router in front of them, if any. Raises ConfigError naming one that does not answer.

    A server with settings that this run cannot use is a ConfigError, too.
    """
    cluster = config.cluster
    addresses, router_url = external_addresses(config)
    servers = [_connect(config, url) for url in addresses]
    if tokenizer is not None:
        asyncio.run(_check_tokenizers(servers, tokenizer))
    if router_url is None:
        return servers, None
    router = SglangServer(
        router_url,
        ServerInfo.read({}),
        api_key=cluster.sglang_api_key,
        concurrency=cluster.sglang_server_concurrency * len(addresses),
        timeout_s=cluster.sglang_router_request_timeout_secs,
        keeps_together=False,
    )
    return servers, router


def external_addresses(config: Config) -> tuple[Sequence[str], str | None]:
    """Return the URLs of the servers, and that of the router in front of them, if any.

    Raises ConfigError for a malformed address, a router that does not answer, or one with other servers.
    """
    cluster = config.cluster
    addresses = [url_of(address) for address in cluster.rollout_external_engine_addrs or ()]
    if cluster.sglang_router_ip is None:
        return addresses, None
    url = url_of(host_and_port(cluster.sglang_router_ip, cluster.sglang_router_port or 0))
    return _behind_router(url, addresses, cluster.sglang_api_key), url


def read_external(config: Config, url: str) -> ServerInfo:
    """Ask a server for its settings. Raises ConfigError if it does not answer, or this run cannot use it."""
    answer = probe(url, api_key=config.cluster.sglang_api_key)
    try:
        info = ServerInfo.read(answer, f"GET {url}/server_info")
    except EngineError as error:
        raise ConfigError(str(error)) from error
    _check_external(info, url, config)
    return info


def _connect(config: Config, url: str) -> SglangServer:
    cluster, info = config.cluster, read_external(config, url)
    logger.info("engine %s: %s, dtype %s, tp %d", url, info.software, info.dtype, info.tp_size)
    return SglangServer(
        url,
        info,
        api_key=cluster.sglang_api_key,
        concurrency=cluster.sglang_server_concurrency,
        timeout_s=cluster.sglang_router_request_timeout_secs,
        report_s=config.sync.update_weight_timeout,
    )


async def _check_tokenizers(servers: Sequence[SglangServer], tokenizer: TextTokenizer) -> None:
    """Raise ConfigError for a server with another tokenizer; one that does not tokenize is not checked."""
    for server in servers:
        try:
            async with connected([server.address], api_key=server.api_key) as [client]:
                answer = await client.ask("/tokenize", {"prompt": SHOWN_TEXT}, timeout_s=PROBE_S)
            with reading(f"POST {server.url}/tokenize", answer):
                text = tokenizer.decode(answer["tokens"], skip_special_tokens=True)
        except EngineError as error:
            logger.debug("%s does not tokenize: %s", server.url, error)
            continue
        if SHOWN_TEXT not in text:
            raise ConfigError(
                f"the engine at {server.url} has another tokenizer than --hf-checkpoint: the tokens that it gives "
                f"{SHOWN_TEXT!r} mean {text!r}; start it with the model of this run"
            )


def _check_external(info: ServerInfo, url: str, config: Config) -> None:
    required = config.rollout.rollout_max_context_len
    if required is not None and info.context_len is not None and info.context_len < required:
        raise ConfigError(
            f"--rollout-max-context-len {required} exceeds the context length {info.context_len} of the engine at "
            f"{url}; lower it or start the engine with a longer context"
        )
    if info.num_http_processes > 1 and not config.debug.debug_rollout_only:
        raise ConfigError(
            f"the engine at {url} has {info.num_http_processes} HTTP processes, and only one of them learns about "
            "new weight versions; start it without --tokenizer-worker-num"
        )
    transport = config.sync.update_weight_transport
    problem = transport_spec(transport).speculation_problem
    if info.speculation and problem and not config.debug.debug_rollout_only:
        raise ConfigError(
            f"--update-weight-transport {transport} with the engine at {url}, which has --speculative-algorithm "
            f"{info.speculation}: {problem}"
        )
    if returns_routes(config) and not info.returns_routes:
        flag = "--use-rollout-routing-replay" if config.moe.use_rollout_routing_replay else "--log-routing-agreement"
        raise ConfigError(
            f"{flag} needs the routed experts of the engine at {url}, which does not return them; start it with "
            "--enable-return-routed-experts"
        )


def _behind_router(url: str, addresses: Sequence[str], api_key: str | None) -> list[str]:
    """Return the servers of a router. Raises ConfigError if `addresses` differ: a server would get no weights."""
    answer = probe(url, api_key=api_key, path="/workers")
    try:
        with reading(f"GET {url}/workers", answer):
            workers = [str(worker["url"]).rstrip("/") for worker in answer["workers"]]
    except EngineError as error:
        raise ConfigError(f"{error}; is {url} the address of a router?") from error
    if not workers:
        raise ConfigError(f"the router at {url} has no workers; start it with --worker-urls")
    if addresses and set(addresses) != set(workers):
        raise ConfigError(
            f"the router at {url} sends requests to {', '.join(sorted(workers))}, but --rollout-external-engine-addrs "
            f"names {', '.join(sorted(addresses))}; remove that flag to use the servers of the router"
        )
    return workers
