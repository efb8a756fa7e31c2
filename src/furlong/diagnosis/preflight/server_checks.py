"""GPU05, ENG05, REW01, SYNC03 and SYNC04: servers that the run needs, and engines that mishandle weights."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from furlong.config.topology import uses_ray
from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.preflight.context import PreflightContext
from furlong.sglang_layout.layout_facts import HASHED, KEEPS_ROUTER, OWN_HEAD

RAY_CONNECT_S = 3.0  # to connect to a running cluster
CONNECT_S = 1.0  # to connect to a server


def ray_cluster(context: PreflightContext) -> Iterator[Diagnosis]:
    """GPU05: no Ray cluster at --ray-address; Ray itself would retry for minutes."""
    address = context.config.cluster.ray_address
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not uses_ray(context.config):
        return  # `auto`: Ray finds a cluster on this machine
    try:
        socket.create_connection((host, int(port)), RAY_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        yield diagnosis(
            "GPU05",
            f"--ray-address {address}: cannot connect ({error})",
            evidence={"address": address},
        )


def engine_servers(context: PreflightContext) -> Iterator[Diagnosis]:
    """ENG05: external engines that do not listen."""
    for address in context.config.cluster.rollout_external_engine_addrs or ():
        url = address if "://" in address else f"http://{address}"
        yield from _not_listening("ENG05", "--rollout-external-engine-addrs", address, url)


def remote_server(context: PreflightContext) -> Iterator[Diagnosis]:
    """REW01: a --rm-url without a server."""
    url = context.config.reward.rm_url
    if url is not None and context.generates:
        yield from _not_listening("REW01", "--rm-url", url, url)


def _not_listening(row: str, flag: str, address: str, url: str) -> Iterator[Diagnosis]:
    """Warn if `url` refuses a connection: the server may start later, or be reachable from elsewhere only."""
    try:
        where = urlsplit(url)
        port = where.port or (443 if where.scheme == "https" else 80)
        socket.create_connection((where.hostname or "", port), CONNECT_S).close()
    except (OSError, ValueError) as error:
        yield diagnosis(
            row,
            f"{flag} {address}: cannot connect ({error})",
            cause="No server listens there, or this machine cannot reach it.",
            remedy=f"start it before the run, or correct {flag}",
            severity="warning",
            evidence={"address": address},
        )


ROUTERS = r"mlp\.gate\.weight"


def kept_routers(context: PreflightContext) -> Iterator[Diagnosis]:
    """SYNC03: a trained router whose outdated copy SGLang keeps using."""
    config, model = context.config, context.model
    if config.cluster.engine != "sglang" or model is None or config.debug.debug_rollout_only:
        return
    family = model.text_config.get("model_type")
    if family not in KEEPS_ROUTER:
        return
    only, frozen = config.train.only_train_params_name_list, config.train.freeze_params_name_list or ()
    trained = [
        name
        for name in model.weight_map
        if re.search(ROUTERS, name)
        and (only is None or any(re.search(pattern, name) for pattern in only))
        and not any(re.search(pattern, name) for pattern in frozen)
    ]
    if trained:
        yield diagnosis(
            "SYNC03",
            f"{len(trained)} routers of this {family} model are trained ({trained[0]} is the first), but {HASHED[0]} "
            "keeps using the weights that they had in its first forward pass",
            evidence={"model_type": family, "routers": len(trained)},
        )


def own_head(context: PreflightContext) -> Iterator[Diagnosis]:
    """SYNC04: a tied output layer in a family that SGLang implements with a separate one."""
    config, model = context.config, context.model
    if config.cluster.engine != "sglang" or model is None:
        return
    family, is_tied = model.text_config.get("model_type"), model.text_config.get("tie_word_embeddings", False)
    if family in OWN_HEAD and is_tied:
        yield diagnosis(
            "SYNC04",
            f"the output layer of this {family} model is tied to its embedding (tie_word_embeddings in "
            f"{model.folder}/config.json), but {HASHED[0]} has a separate one, which gets no weights",
            evidence={"model_type": family, "tie_word_embeddings": is_tied},
        )
