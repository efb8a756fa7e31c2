"""Token ids of prompts: texts and chat messages, judged by their length before they are tokenized.

A model's own chat template runs in this process, after a trial when the server starts. A template or template arguments
of a request are refused unless the server was started with --trust-request-chat-template, and then run in a process
with limits.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson

from furlong.chat.messages import MessageError, check_extras
from furlong.chat.prompt_size import longest_token, num_chars
from furlong.core.chat_template import apply_template, template_messages
from furlong.core.event_loop import call_in_thread
from furlong.inference.embedded.engine import EmbeddedEngine
from furlong.inference.request_error import RequestError
from furlong.inference.server.bodies import off_loop
from furlong.inference.server.fields import quote, shorten
from furlong.inference.server.limits import ServerLimits, flag_of
from furlong.models.template_trial import worker_command

TRUST_FLAG = "--trust-request-chat-template"
PIECE_CHARS = 64 * 1024
PIECE_SLACK = 1.25  # cutting a text into pieces adds few tokens at each cut; this is far above them
MAX_TEMPLATE_CHARS = 256 * 1024
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize")
CONCURRENT_TEMPLATES = 2  # processes


class PromptEncoder:
    """Converts texts and messages to token ids for one engine."""

    def __init__(self, engine: EmbeddedEngine, limits: ServerLimits, *, trusts_templates: bool = False) -> None:
        self._tokenizer: Any = engine.tokenizer
        self._context_len, self._limits, self._trusts_templates = engine.context_len, limits, trusts_templates
        self._processes = asyncio.Semaphore(CONCURRENT_TEMPLATES)
        self.max_chars = self._context_len * longest_token(self._tokenizer)

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts. Raises RequestError without a tokenizer, or if a text cannot fit into the context."""
        if self._tokenizer is None or not hasattr(self._tokenizer, "encode"):
            raise RequestError(
                "the server has no tokenizer; send input_ids, or serve a folder that has tokenizer files"
            )
        for text in texts:
            self._check_chars(len(text), "the prompt")
        return await off_loop(sum(map(len, texts)), lambda: [self._ids(text) for text in texts])

    async def encode_chat(self, body: Mapping[str, Any]) -> list[int]:
        """Render the messages of a request with a chat template, and tokenize the text."""
        messages = messages_of(body.get("messages"))
        tools = _tools_of(body.get("tools"))
        source, values = self._request_template(body)
        size = await asyncio.to_thread(num_chars, messages, tools) if len(messages) > 64 else num_chars(messages, tools)
        self._check_chars(size, "the messages and tools")
        if getattr(self._tokenizer, "chat_template", None) is None and source is None:
            raise RequestError("the tokenizer has no chat template; use /v1/completions or /generate")
        if source is None and not values:
            text = await off_loop(size, self._render, messages, tools)
        else:
            text = await self._render_in_process(source, messages, tools, values)
        self._check_chars(len(text), "the rendered chat")
        return await off_loop(len(text), lambda: self._ids(text, add_special_tokens=False))

    def _check_chars(self, num_chars: int, what: str) -> None:
        if num_chars > self.max_chars:
            raise RequestError(
                f"{what} has {num_chars} characters, which cannot fit: the context length is {self._context_len} "
                f"tokens and a token has at most {self.max_chars // self._context_len} characters; shorten it"
            )

    def _ids(self, text: str, **options: Any) -> list[int]:
        """Tokenize one text; a much too long one is refused after a part of it."""
        limit = PIECE_SLACK * self._context_len + 64
        if len(text) > 4 * max(PIECE_CHARS, limit):
            num_tokens = 0
            for start in range(0, len(text), PIECE_CHARS):
                num_tokens += len(self._tokenizer.encode(text[start : start + PIECE_CHARS], add_special_tokens=False))
                if num_tokens > limit:
                    raise RequestError(
                        f"the prompt has {len(text)} characters, and {num_tokens} tokens in the first "
                        f"{min(len(text), start + PIECE_CHARS)} of them, but the context length is "
                        f"{self._context_len}; shorten the prompt or raise the context length"
                    )
        return list(self._tokenizer.encode(text, **options))

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        try:
            return apply_template(self._tokenizer, messages, tools=tools, add_generation_prompt=True, tokenize=False)
        except Exception as error:
            raise RequestError(
                f"the chat template rejects these messages ({type(error).__name__}): {shorten(str(error), 300)}"
            ) from error

    # -- templates of requests ---------------------------------------------------------------------------------

    def _request_template(self, body: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
        """Return `chat_template` and `chat_template_kwargs` of a request, if the server allows them."""
        source, values = body.get("chat_template"), body.get("chat_template_kwargs") or {}
        if not isinstance(values, dict) or not all(str(key).isidentifier() for key in cast("dict[str, Any]", values)):
            raise RequestError(f"chat_template_kwargs is {quote(values)}, must be an object of named values")
        if source is None and not values:
            return None, {}
        if not self._trusts_templates:
            raise RequestError(
                "chat_template and chat_template_kwargs are not accepted from requests; leave them out, or start the "
                f"server with {TRUST_FLAG}"
            )
        if source is not None and (not isinstance(source, str) or not 0 < len(source) <= MAX_TEMPLATE_CHARS):
            raise RequestError(
                f"chat_template is {quote(source)}, must be a Jinja template of at most {MAX_TEMPLATE_CHARS} characters"
            )
        if reserved := sorted(set(cast("dict[str, Any]", values)) & set(RESERVED)):
            raise RequestError(f"chat_template_kwargs has {reserved}, which the request itself sets; remove them")
        return source, cast("dict[str, Any]", values)

    async def _render_in_process(
        self, source: str | None, messages: list[dict[str, Any]], tools: list[Any] | None, values: dict[str, Any]
    ) -> str:
        """Render in a separate process, within the limits of time, memory and output."""
        named: dict[str, Any] = getattr(self._tokenizer, "special_tokens_map", {})
        task = {
            "source": source if source is not None else self._tokenizer.chat_template,
            "values": {
                **{name: str(token) for name, token in named.items() if not isinstance(token, list)},
                **values,
                "messages": template_messages(messages),
                "tools": tools,
                "documents": None,
                "add_generation_prompt": True,
            },
            "max_chars": self.max_chars,
            "memory_bytes": self._limits.chat_template_bytes,
            "cpu_s": self._limits.chat_template_timeout + 1,
        }
        async with self._processes:
            reply = await self._run_worker(orjson.dumps(task))
        if problem := reply.get("error") or reply.get("limit"):
            raise RequestError(f"the chat template of the request failed: {shorten(str(problem), 300)}")
        return reply["text"]

    async def _run_worker(self, task: bytes) -> dict[str, Any]:
        limit_s = self._limits.chat_template_timeout
        # Not a process of asyncio, whose end needs the event loop: this one may end with the server.
        process = subprocess.Popen(
            worker_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            said, error = await call_in_thread(
                lambda: process.communicate(task, timeout=limit_s)[0], name="furlong-template"
            )
        finally:
            process.kill()
        if isinstance(error, subprocess.TimeoutExpired):
            process.wait()
            return {"error": f"no text within {limit_s} s ({flag_of('chat_template_timeout')})"}
        if error is not None:
            raise error
        output: bytes = said
        if process.returncode != 0 or not output:
            return {
                "error": f"the process ended with code {process.returncode}; the limits are {limit_s} s and "
                f"{self._limits.chat_template_bytes} bytes ({flag_of('chat_template_bytes')})"
            }
        return await off_loop(len(output), orjson.loads, output)


def _tools_of(value: Any) -> list[Any] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", value)):
        raise RequestError(f"tools is {quote(value)}, must be a list of objects")
    return cast("list[Any]", value)


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Validate the messages and join the text parts of each. Raises RequestError for images and audio."""
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list with at least one message")
    return [_message(i, message) for i, message in enumerate(cast("list[Any]", value))]


def _message(i: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RequestError(f"messages[{i}] must be an object with role and content")
    message = cast("dict[str, Any]", value)
    try:
        check_extras(message, f"messages[{i}]")
    except MessageError as error:
        raise RequestError(str(error)) from None
    content: Any = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if not isinstance(content, list) or not content:
        raise RequestError(
            f"messages[{i}].content is {quote(content)}, must be a string or a list of parts of type text"
        )
    texts: list[str] = []
    for part in cast("list[Any]", content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(f"messages[{i}].content has a part of type {quote(kind)}; only text is supported")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}
