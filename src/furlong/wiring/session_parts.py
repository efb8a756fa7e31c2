"""Builds what sessions need: their settings from flags, and the server for agents that speak HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from furlong.chat.messages import KeyFunction, key_of
from furlong.chat.parsers.parsed_reply import ToolParser
from furlong.chat.parsers.registry import PARSERS
from furlong.config.checks.environment_specs import parse_env_workers, parse_environments
from furlong.config.evaluation import EvalSpec
from furlong.config.hooks import Hooks
from furlong.config.sections import SessionFlags
from furlong.core.addresses import host_and_port
from furlong.core.process_environment import SESSIONS_KEY_VARIABLE
from furlong.core.user_functions import load_function
from furlong.core.user_modules import import_module_of
from furlong.rollout.agent_hooks import AgentHooks
from furlong.sessions.samples import Leaves
from furlong.sessions.session import SessionSettings
from furlong.wiring.run_context import RunContext

if TYPE_CHECKING:
    from furlong.sessions.session_server import SessionServer

logger = logging.getLogger(__name__)


def session_settings(flags: SessionFlags, hooks: Hooks) -> SessionSettings:
    """Return the settings of all sessions."""
    key: KeyFunction = partial(key_of, match="strict") if flags.session_match == "strict" else key_of
    parser: ToolParser | None = PARSERS.get(flags.session_tool_parser) or hooks.session_tool_parser
    return SessionSettings(hooks.session_match or key, cast("Any", flags.session_history), parser)


def session_leaves(flags: SessionFlags, hooks: Hooks) -> Leaves:
    """Return which leaves are trained on."""
    return hooks.session_leaves or cast("Any", flags.session_leaves)


def build_agent_hooks(context: RunContext) -> AgentHooks | None:
    """Return `setup` and `teardown` beside the agent function, and those of the classes of environments.

    None without agents, environments and generate functions.
    """
    flags = context.config.session
    if context.hooks.custom_generate_function is None:
        return None
    owners: dict[str, Any] = {}
    if flags.agent_function_path is not None:
        owners["--agent-function-path"] = import_module_of(flags.agent_function_path)
    for spec in parse_environments(flags.environment):
        owners[f"--environment {spec.path}"] = load_function(spec.path)
    has_processes = bool(owners) and parse_env_workers(flags.env_workers)[0] == "process"
    return AgentHooks(owners, context.args, has_processes=has_processes)


def build_session_server(
    context: RunContext, specs: Sequence[EvalSpec], opened: contextlib.ExitStack
) -> SessionServer | None:
    """Open the port of the session server; None if the run has no generate function. `opened` gets its cleanup."""
    functions = [context.hooks.custom_generate_function, *(spec.custom_generate_function_path for spec in specs)]
    if context.tokenizer is None or all(function is None for function in functions):
        return None
    from furlong.sessions.session_offers import SessionOffers  # import a web server, which most runs do not need
    from furlong.sessions.session_server import SessionServer

    flags = context.config.session
    server = SessionServer(
        host=flags.session_server_host,
        port=flags.session_server_port,
        model_name=str(context.model_dir),
        client_sampling=flags.session_client_sampling,
        offers=SessionOffers(os.environ.get(SESSIONS_KEY_VARIABLE)) if flags.online_sessions else None,
    )
    opened.callback(lambda: asyncio.run(server.close()))
    if flags.online_sessions:
        logger.info("applications take sessions with POST http://%s/sessions", host_and_port(*server.address))
    logger.info("sessions of agents: http://%s:%d", *server.address)
    return server
