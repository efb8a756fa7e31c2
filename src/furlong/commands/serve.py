"""`furlong serve`: a model over HTTP; its folder and its port are looked at first."""

from __future__ import annotations

import argparse

from furlong.errors import ConfigError
from furlong.machine import import_without_gc, raise_open_file_limit


def main(words: list[str]) -> int:
    """Check folder and port, then load and serve. Raises ConfigError for a folder without a model, or a port in use."""
    from furlong.models.hf_folder import check_folder
    from furlong.tools.port_check import taken_port

    ports = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    ports.add_argument("--host", default="127.0.0.1")
    ports.add_argument("--port", default="30000")
    ports.add_argument("--model-path")
    ports.add_argument("--skip-tokenizer-init", action="store_true")
    given, _ = ports.parse_known_args(words)
    if not {"-h", "--help"} & set(words):  # what is missing or no number the server itself refuses
        problems: list[str] = []
        if given.port.isdigit() and int(given.port) < 65536:
            found = taken_port("--port", given.host, int(given.port))
            problems += [] if found is None else [found.text()]
        try:
            if given.model_path is not None:
                check_folder(given.model_path, weights=True, tokenizer=not given.skip_tokenizer_init)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(*problems)
    with import_without_gc("furlong.inference.server.serve"):
        from furlong.inference.server.serve import main as serve

    raise_open_file_limit()  # one for each connection; without one left, clients wait seconds to be accepted
    return serve(words)
