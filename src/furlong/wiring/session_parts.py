"""Builds what sessions need: their settings from flags, and the server for agents that speak HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from furlong.chat.messages import KeyFunction, key_of
from furlong.chat.parsers.parsed_reply import ToolParser
from furlong.chat.parsers.registry import PARSERS
from furlong.config.evaluation import EvalSpec
from furlong.config.hooks import load_function
from furlong.config.sections import SessionFlags
from furlong.errors import ConfigError
from furlong.sessions.samples import Leaves
from furlong.sessions.session import SessionSettings
from furlong.wiring.run_context import RunContext

if TYPE_CHECKING:
    from furlong.sessions.session_server import SessionServer

logger = logging.getLogger(__name__)


def session_settings(flags: SessionFlags) -> SessionSettings:
    """Return the settings of all sessions. Raises ConfigError for a name that is neither known nor FILE:fn."""
    key: KeyFunction = key_of
    if flags.session_match == "strict":
        key = partial(key_of, match="strict")
    elif flags.session_match != "echo":
        key = _function("--session-match", flags.session_match, ("echo", "strict"))
    parser: ToolParser | None = None
    if flags.session_tool_parser != "auto":
        name = flags.session_tool_parser
        parser = PARSERS.get(name) or _function("--session-tool-parser", name, ("auto", *PARSERS))
    return SessionSettings(key, cast("Any", flags.session_history), parser)


def session_leaves(flags: SessionFlags) -> Leaves:
    """Return which leaves are trained on. Raises ConfigError."""
    if flags.session_leaves in ("all", "last", "longest"):
        return cast("Any", flags.session_leaves)
    return _function("--session-leaves", flags.session_leaves, ("all", "last", "longest"))


def _function(flag: str, value: str, names: Sequence[str]) -> Any:
    if ":" not in value and "." not in value:
        raise ConfigError(f"{flag} {value} is none of {', '.join(names)}, and not a function; name one")
    return load_function(value)


def build_session_server(
    context: RunContext, specs: Sequence[EvalSpec], opened: contextlib.ExitStack
) -> SessionServer | None:
    """Open the port of the session server; None if the run has no generate function. `opened` gets its cleanup."""
    functions = [context.hooks.custom_generate_function, *(spec.custom_generate_function_path for spec in specs)]
    if context.tokenizer is None or all(function is None for function in functions):
        return None
    from furlong.sessions.session_server import SessionServer  # imports a web server, which most runs do not need

    flags = context.config.session
    server = SessionServer(
        host=flags.session_server_host,
        port=flags.session_server_port,
        model_name=str(context.model_dir),
        client_sampling=flags.session_client_sampling,
    )
    opened.callback(lambda: asyncio.run(server.close()))
    logger.info("sessions of agents: http://%s:%d", *server.address)
    return server
