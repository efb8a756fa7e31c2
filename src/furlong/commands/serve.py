"""`furlong serve`: serve a model over HTTP, after a check of its directory and port."""

from __future__ import annotations

import argparse
import contextlib
import errno
import socket

from furlong.catalogue import Diagnosis, diagnosis
from furlong.core.addresses import host_and_port, socket_for
from furlong.core.garbage import import_without_gc
from furlong.errors import ConfigError
from furlong.machine import limit_malloc_arenas, raise_open_file_limit


def serve(words: list[str]) -> int:
    """Check model and port, then load and serve. Raises ConfigError for an invalid model or a port in use."""
    from furlong.config.hub import resolve_model
    from furlong.models.hf_folder import check_folder

    ports = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    ports.add_argument("--host", default="127.0.0.1")
    ports.add_argument("--port", default="30000")
    ports.add_argument("--model-path")
    ports.add_argument("--skip-tokenizer-init", action="store_true")
    options, _ = ports.parse_known_args(words)
    if not {"-h", "--help"} & set(words):  # the server itself reports missing and invalid values
        problems: list[str] = []
        if options.port.isdigit() and int(options.port) < 65536:
            taken = taken_port("--port", options.host, int(options.port))
            problems += [] if taken is None else [taken.text()]
        try:
            if options.model_path is not None:
                folder = resolve_model("--model-path", options.model_path)
                words = [*words, "--model-path", folder] if folder != options.model_path else words
                check_folder(folder, weights=True, tokenizer=not options.skip_tokenizer_init)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(*problems)
    limit_malloc_arenas()
    with import_without_gc("furlong.inference.server.http_server"):
        from furlong.inference.server.http_server import main
        from furlong.sessions.served_model import served_routes

    raise_open_file_limit()  # one per connection; without a free one, clients wait seconds
    return main(words, served_routes)


def taken_port(flag: str, host: str, port: int) -> Diagnosis | None:
    """Check whether a port can be bound (0 always can); return GPU03 if not."""
    with contextlib.ExitStack() as opened:
        try:
            probe, address = socket_for(host, port)
            opened.callback(probe.close)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        except PermissionError as error:
            cause = "Ports below 1024 need administrator rights."
            return diagnosis("GPU03", f"{flag} {port}: {error}", cause=cause, remedy=f"use {flag} 0 for a free port")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                cause = "This machine does not have that address."
                remedy = "use --host 127.0.0.1, or 0.0.0.0 for all addresses of this machine"
                return diagnosis("GPU03", f"--host {host}: {error.strerror}", cause=cause, remedy=remedy)
            return diagnosis(
                "GPU03",
                f"{flag} {port}: cannot listen on {host_and_port(host, port)} ({error.strerror})",
                remedy=f"end the process that has it (`ss -ltnp sport = :{port}`), or use {flag} 0 for a free port",
                evidence={"host": host, "port": port},
            )
    return None
