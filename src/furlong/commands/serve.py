"""`furlong serve`: a model over HTTP, on a port that is found to be free first."""

from __future__ import annotations

import argparse

from furlong.errors import ConfigError
from furlong.machine import heap_at_rest


def main(words: list[str]) -> int:
    """Check the port, which needs no model, then serve. Raises ConfigError for a port that another process has."""
    from furlong.doctor.ports import taken_port

    ports = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    ports.add_argument("--host", default="127.0.0.1")
    ports.add_argument("--port", default="30000")
    given, _ = ports.parse_known_args(words)
    if given.port.isdigit() and not {"-h", "--help"} & set(words):  # what is no number the server itself refuses
        found = taken_port("--port", given.host, int(given.port))
        if found is not None:
            raise ConfigError(found.text())
    with heap_at_rest("furlong.engines.embedded.server"):
        from furlong.engines.embedded.server import main as serve

    return serve(words)
