"""GPU05, ENG05 and REW01: what a run does not start itself has to listen: a Ray cluster, engines, a reward server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from furlong.config.topology import uses_ray
from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.preflight.context import Context

RAY_CONNECT_S = 3.0  # for a cluster that is there to take a connection
CONNECT_S = 1.0  # for a server that listens to take a connection


def ray_cluster(context: Context) -> Iterator[Diagnosis]:
    """GPU05: a cluster that the run would wait for; Ray itself tries for minutes."""
    address = context.config.cluster.ray_address
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not uses_ray(context.config):
        return  # `auto`: Ray finds its own on this machine
    try:
        socket.create_connection((host, int(port)), RAY_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        yield diagnosis(
            "GPU05",
            f"--ray-address {address}: no connection to it ({error})",
            remedy="start it (`ray start`), give the address that it printed, or leave --ray-address out for a "
            "cluster of this run's own on this machine",
            evidence={"address": address},
        )


def engine_servers(context: Context) -> Iterator[Diagnosis]:
    """ENG05: servers that are already there have to listen."""
    for address in context.config.cluster.rollout_external_engine_addrs or ():
        url = address if "://" in address else f"http://{address}"
        yield from _not_listening("ENG05", "--rollout-external-engine-addrs", address, url)


def remote_server(context: Context) -> Iterator[Diagnosis]:
    """REW01: a --rm-url that nobody answers."""
    url = context.config.reward.rm_url
    if url is not None and context.generates:
        yield from _not_listening("REW01", "--rm-url", url, url)


def _not_listening(row: str, flag: str, given: str, url: str) -> Iterator[Diagnosis]:
    """A warning where no connection to `url` is taken: the server may be started later, or reached from elsewhere."""
    try:
        where = urlsplit(url)
        port = where.port or (443 if where.scheme == "https" else 80)
        socket.create_connection((where.hostname or "", port), CONNECT_S).close()
    except (OSError, ValueError) as error:
        yield diagnosis(
            row,
            f"{flag} {given}: no connection to it ({error})",
            cause="No server listens there, or this machine does not reach it.",
            remedy=f"start it before the run, or correct {flag}",
            severity="warning",
            evidence={"address": given},
        )
