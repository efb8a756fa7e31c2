"""Serves the run page on an address, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import contextlib
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence

import uvicorn

from furlong.core.addresses import bound_socket, host_and_port
from furlong.view.page_app import PageApp
from furlong.view.run_reader import RunReader

MAX_CONNECTIONS = 64
EXIT_S = 3  # for answers to end once the server exits
MAX_HEADER_BYTES = 16 * 1024


class _Server(uvicorn.Server):
    """A server that ends the streams of changes when it exits; uvicorn would wait for them and then cancel them."""

    def __init__(self, config: uvicorn.Config, pages: PageApp) -> None:
        super().__init__(config)
        self._pages = pages

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then the server."""
        self._pages.end_streams()
        await super().shutdown(sockets)


def serve_page(
    runs: Sequence[RunReader], *, host: str, port: int, opens_browser: bool, announce: Callable[[str], None]
) -> None:
    """Serve the runs, and pass the address, which contains the token, to `announce`. Returns after a signal.

    Raises EngineError if the address cannot be bound.
    """
    listener = bound_socket(host, port)
    token, bound_port = secrets.token_urlsafe(18), listener.getsockname()[1]
    pages = PageApp(runs, token, cookie=f"furlong_view_{bound_port}")  # cookies do not distinguish ports
    config = uvicorn.Config(
        pages.app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=EXIT_S,
    )
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{host_and_port(shown, bound_port)}/?token={token}"
    pages.start()
    try:
        announce(url)
        if opens_browser:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):
            _Server(config, pages).run(sockets=[listener])
    finally:
        pages.close()
        listener.close()
