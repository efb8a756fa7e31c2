"""Flags of agents and of their sessions."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag_spec import flag

TOOL_PARSERS = ("hermes", "qwen3", "qwen3_coder", "llama3_json", "mistral", "glm45", "deepseek", "gpt-oss")


@dataclass(frozen=True)
class SessionFlags:
    """Agents that talk to the policy, in this process or over HTTP."""

    agent_function_path: str | None = flag(
        None,
        "User function that runs an agent: `f(base_url, api_key, prompt, request_kwargs, metadata)`, async or not. The "
        "agent calls base_url + /v1/chat/completions, /v1/messages or /v1/responses with the key.",
        excludes="custom_generate_function_path apply_chat_template",
    )
    agent_command: str | None = flag(
        None,
        "Command that runs an agent, once per sample. OPENAI_BASE_URL, ANTHROPIC_BASE_URL and the key are in its "
        "environment, the task is JSON on stdin.",
        excludes="agent_function_path custom_generate_function_path apply_chat_template",
        metavar="COMMAND",
    )
    agent_memory_limit: float | None = flag(
        None,
        "Memory in GiB of all processes of one `--agent-command` together, or of one process of `--env-workers` with "
        "those that it starts. An agent or environment that exceeds it fails.",
        within="(0, inf)",
        needs="agent_command or agent_function_path or environment",
    )
    agent_env: tuple[str, ...] = flag(
        (),
        "Names of environment variables that `--agent-command` gets, in addition to those of programs in general, such "
        "as PATH, HOME and LANG. Secrets of the run are not among these.",
        kind="many",
        needs="agent_command",
        metavar="NAME",
    )
    environment: tuple[str, ...] = flag(
        (),
        "Class of the environment, as file.py:Class or file.py:Class?key=value&key=value with arguments of the class. "
        "Several are a mixture: `weight` is the share of an environment, `prompt_data` its data, `name` its name in "
        "metrics, and `max_turns` and the other limits of episodes replace those of the run.",
        kind="many",
        excludes="agent_function_path agent_command custom_generate_function_path apply_chat_template",
        metavar="FILE.py:CLASS",
        hub="dataset",
    )
    env_workers: tuple[str, ...] = flag(
        ("thread", "32"),
        "Where environments and agent functions run: `thread N` calls methods and functions that are not async in N "
        "threads of the run, `process N` calls all of them in N processes, so that their work does not slow down the "
        "run, and their crashes do not end it.",
        kind="many",
        needs="environment or agent_function_path",
    )
    sandbox_isolation: str = flag(
        "required",
        "Isolation of sandboxes on this machine: `required` refuses to open a sandbox where bubblewrap cannot isolate "
        "it, `none` runs its commands within limits, but with all rights of this user.",
        choices=("required", "none"),
    )
    online_sessions: bool = flag(
        False,
        "Applications outside of the run play the episodes: POST /sessions of the session server returns the session "
        "of one sample, and POST .../end sets its reward.",
        excludes="agent_function_path agent_command environment custom_generate_function_path apply_chat_template",
    )
    session_idle_timeout: float = flag(
        600.0,
        "Seconds without a call of the policy after which a session that an application took expires.",
        within="(0, inf)",
        needs="online_sessions",
    )
    session_server_host: str = flag("127.0.0.1", "Address that the session server listens on.")
    session_server_port: int = flag(0, "Port of the session server; 0 chooses a free one.", within="[0, 65535]")
    session_match: str = flag(
        "echo",
        "How messages are recognized as those of earlier turns: `echo` ignores what client libraries change (ids, "
        "names, dropped reasoning, JSON formatting of arguments), `strict` compares reasoning and whitespace, too, and "
        "FILE:fn is a function from a message to its key.",
    )
    session_history: str = flag(
        "keep",
        "History of a conversation: `keep` continues the stored token ids, `template` renders it again, and what "
        "differs is a branch.",
        choices=("keep", "template"),
    )
    session_leaves: str = flag(
        "all",
        "Branches of an episode to train on: `all`, `last`, `longest`, or FILE:fn, a function from the list of leaves "
        "to those to keep.",
    )
    session_tool_parser: str = flag(
        "auto",
        f"Parser of tool calls: `auto` (by the chat template), {', '.join(TOOL_PARSERS)}, or FILE:fn, a function "
        "from (text, tools) to a ParsedReply.",
    )
    session_client_sampling: bool = flag(
        False, "Let clients set temperature, top_p, top_k and min_p. By default those of the run apply."
    )
