"""What is wrong with the flags of agents, environments and applications that play episodes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from furlong.config.checks.environment_specs import environment_problems
from furlong.config.resolve import AGENT_PATH, ENVIRONMENT_PATH, ONLINE_PATH
from furlong.config.sections import Config
from furlong.core.addresses import is_loopback
from furlong.core.process_environment import SESSIONS_KEY_VARIABLE


def agent_problems(config: Config) -> Iterator[str]:
    """Yield contradictions between what generates samples, and addresses that are open to everybody."""
    flags, generates = config.session, config.rollout.custom_generate_function_path
    given = {
        f"--agent-function-path {flags.agent_function_path}": flags.agent_function_path,
        f"--agent-command {flags.agent_command}": flags.agent_command,
        f"--environment {' '.join(flags.environment)}": flags.environment,
        "--online-sessions": flags.online_sessions,
    }
    agent = next((name for name, value in given.items() if value), None)
    if agent is not None and generates not in (AGENT_PATH, ENVIRONMENT_PATH, ONLINE_PATH):
        yield (
            f"--custom-generate-function-path {generates} and {agent} are both given, but one of them generates a "
            "sample; remove one"
        )
    if agent is not None and config.data.apply_chat_template:
        yield (
            f"--apply-chat-template and {agent} render the chat template twice: the session renders messages, and a "
            "prompt that is rendered already would be text inside a message; remove --apply-chat-template"
        )
    if flags.online_sessions and not (is_loopback(flags.session_server_host) or os.environ.get(SESSIONS_KEY_VARIABLE)):
        yield (
            f"--session-server-host {flags.session_server_host} is reachable from other machines, which could take "
            f"sessions; set {SESSIONS_KEY_VARIABLE} to a key that applications send, or use 127.0.0.1"
        )
    if flags.environment:
        yield from environment_problems(config)
