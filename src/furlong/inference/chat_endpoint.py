"""An engine in front of any OpenAI chat endpoint, for evaluation: it samples, and has no weights to update.

Its tokenizer's ids are the bytes of a conversation, because those of the endpoint's model are unknown. A conversation
is a sequence of records, each ended by the byte `END`: tools as T + JSON, messages as M + JSON, and answers of the
model as A + text, with tool calls in Hermes' form. Sessions extend it as any other chat template, and
`conversation_of` turns it back into messages for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx

from furlong.chat.parsers import parse_hermes, parse_reply
from furlong.core.text import redact_credentials
from furlong.errors import ConfigError, EngineError, InfraError
from furlong.interfaces import Completion, Engine, FinishReason, PauseMode, SamplingParams

NO_LIMIT = 1 << 29  # max_new_tokens from here on is left to the endpoint
ATTEMPTS = 5
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)
_FULL = ("context_length_exceeded", "maximum context length")  # in the error of a conversation that is too long
_FINISH: dict[str, FinishReason] = {"length": "length", "max_tokens": "length"}


@dataclass
class Usage:
    """Tokens of the requests of one session, as the endpoint counts them, and their number."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0


class ChatEndpoint(Engine):
    """Completes prompts of `WireTokenizer` with `base_url`/chat/completions.

    extra: fields added to each request. concurrency: of requests. Statuses of overload and lost connections are tried
    again, then InfraError is raised; a refused key, model or field is a ConfigError.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key: str | None = None,
        extra: Mapping[str, Any] | None = None,
        concurrency: int = 32,
        timeout_s: float = 600.0,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self.refusal: ConfigError | None = (
            None  # the first request that the endpoint refused; further ones would be, too
        )
        self.usage: defaultdict[str, Usage] = defaultdict(Usage)
        self._url, self._model, self._extra = base_url.rstrip("/"), model, dict(extra or {})
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout_s)
        self._permits = asyncio.Semaphore(concurrency)
        self._first_wait_s = first_wait_s

    async def generate(self, prompt: list[int], params: SamplingParams, *, session: str | None = None) -> Completion:
        """Complete a conversation. Raises InfraError, ConfigError, and EngineError for a reply without a message."""
        messages, tools = conversation_of(prompt)
        body = {"model": self._model, "messages": messages, **_fields(params), **self._extra}
        if tools:
            body["tools"] = tools
        async with self._permits:
            try:
                reply = await self._post(body)
            except ConfigError as error:
                self.refusal = self.refusal or error
                raise
        if reply is None:
            return Completion([], [], [], "length")
        try:
            choice: dict[str, Any] = reply["choices"][0]
            message: dict[str, Any] = choice["message"]
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self._where} answered without choices[0].message: {str(reply)[:300]}") from error
        usage: Any = reply.get("usage") or {}
        count = self.usage[session or ""]
        count.prompt_tokens += int(usage.get("prompt_tokens") or 0)
        count.completion_tokens += int(usage.get("completion_tokens") or 0)
        count.requests += 1
        reason = _FINISH.get(str(choice.get("finish_reason")), "stop")
        text = answer_text(message)
        tokens = list((text + (END if reason == "stop" else "")).encode("utf-8", "surrogatepass"))
        return Completion(tokens, [0.0] * len(tokens), [0] * len(tokens), reason, text)

    @property
    def _where(self) -> str:
        return f"POST {redact_credentials(self._url)}/chat/completions"

    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send a request; again after failures that pass. Returns None if the conversation exceeds the context."""
        problem, wait_s = "", self._first_wait_s
        for attempt in range(ATTEMPTS):
            try:
                reply = await self._client.post(f"{self._url}/chat/completions", json=body)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            except httpx.InvalidURL as error:
                raise ConfigError(f"--base-url {self._url} is not a URL: {error}") from error
            else:
                if reply.status_code == 200:
                    return _decoded(reply, self._where)
                problem = f"status {reply.status_code}: {reply.text[:300]}"
                if any(sign in reply.text for sign in _FULL):
                    return None
                if reply.status_code not in _AGAIN:
                    self._refuse(reply)
            if attempt < ATTEMPTS - 1:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, MAX_WAIT_S)
        raise InfraError(f"{self._where} failed {ATTEMPTS} times, the last time with {problem}")

    def _refuse(self, reply: httpx.Response) -> None:
        text = reply.text[:300]
        fix = {
            401: "set the key in the environment variable of --api-key-env",
            403: "set the key in the environment variable of --api-key-env",
            404: "check --base-url, which usually ends in /v1, and --model",
        }.get(reply.status_code, "check --model, the sampling flags and --extra-body")
        raise ConfigError(f"{self._where} answered {reply.status_code}: {text}; {fix}")

    async def pause(self, mode: PauseMode) -> None:
        """Do nothing: there are no weight updates."""

    async def resume(self) -> None:
        """Do nothing."""

    async def abort(self, sessions: Collection[str]) -> None:
        """Do nothing: requests end with the tasks that wait for them."""

    async def load_weights(self, source: Any, version: int) -> dict[str, str]:
        """Raise EngineError: an endpoint has no weights to load."""
        del source, version
        raise EngineError("a chat endpoint cannot load weights; train with --engine embedded or sglang")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _fields(params: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": params.temperature}
    if params.top_p != 1.0:
        fields["top_p"] = params.top_p
    if params.top_k > 0:
        fields["top_k"] = params.top_k
    if params.min_p > 0:
        fields["min_p"] = params.min_p
    if params.max_new_tokens < NO_LIMIT:
        fields["max_tokens"] = params.max_new_tokens
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.sampling_seed is not None:
        fields["seed"] = params.sampling_seed % 2**31
    if params.json_schema is not None:
        schema = {"name": "reply", "schema": json.loads(params.json_schema)}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _decoded(reply: httpx.Response, where: str) -> dict[str, Any]:
    try:
        return reply.json()
    except ValueError as error:
        raise EngineError(f"{where} did not answer JSON: {reply.text[:200]!r}; check --base-url") from error


# -- conversations as bytes --------------------------------------------------------------------------------------

END = "\x1e"  # the record separator of ASCII, which ends an answer
TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}\x1e{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}A{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\x1e"
    "{% else %}M{{ m | tojson }}\x1e{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


class WireTokenizer:
    """Encodes text as its UTF-8 bytes. `decode` without special tokens returns text as a person reads it."""

    chat_template = TEMPLATE
    eos_token_id = pad_token_id = ord(END)
    eos_token = pad_token = END
    all_special_ids = (ord(END),)
    all_special_tokens = (END,)
    added_tokens_decoder: Mapping[int, str] = {}

    def __len__(self) -> int:
        return 256

    def __call__(self, text: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        """Return the bytes of several texts."""
        return {"input_ids": [self.encode(each) for each in text]}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the bytes of a text."""
        del add_special_tokens
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of bytes; without special tokens, the contents of the records."""
        text = bytes(token_ids).decode("utf-8", "replace")
        if not skip_special_tokens:
            return text
        return "\n".join(_readable(record) for record in text.split(END) if record)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        **_: Any,
    ) -> Any:
        """Return the records of a conversation, as text or as ids."""
        records = ["T" + json.dumps(tools)] if tools else []
        for message in conversation:
            is_answer = message.get("role") == "assistant"
            records.append("A" + answer_text(message) if is_answer else "M" + json.dumps(dict(message)))
        text = "".join(record + END for record in records) + ("A" if add_generation_prompt else "")
        return self.encode(text) if tokenize else text


def answer_text(message: Mapping[str, Any]) -> str:
    """Return the text of an answer of the model, with reasoning in tags and calls in Hermes' form."""
    reasoning: Any = message.get("reasoning_content") or message.get("reasoning")
    text = f"<think>{reasoning}</think>" if reasoning else ""
    text += str(message.get("content") or "")
    for call in cast("list[dict[str, Any]]", message.get("tool_calls") or []):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        with contextlib.suppress(ValueError):  # kept as the model wrote it; the parser counts the call as ill-formed
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        text += f"<tool_call>{json.dumps({'name': function.get('name'), 'arguments': arguments})}</tool_call>"
    return text.replace(END, "")


def conversation_of(ids: Sequence[int]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return messages and tools of a prompt. Tool calls and their results are numbered anew, in order."""
    messages: list[dict[str, Any]] = []
    tools: list[Any] = []
    waiting: list[str] = []
    for record in bytes(ids).decode("utf-8", "replace").split(END)[:-1]:
        kind, text = record[:1], record[1:]
        if kind == "T":
            tools = json.loads(text)
        elif kind == "M":
            message: dict[str, Any] = json.loads(text)
            if message.get("role") == "tool" and waiting:
                message["tool_call_id"] = waiting.pop(0)
            messages.append(message)
        else:
            parsed = parse_reply(text, tools, parse_hermes)
            answer: dict[str, Any] = {"role": "assistant", "content": parsed.content}
            waiting = [f"call_{len(messages)}_{i}" for i in range(len(parsed.calls))]
            if parsed.calls:
                answer["tool_calls"] = [
                    {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for id, call in zip(waiting, parsed.calls, strict=True)
                ]
            messages.append(answer)
    return messages, tools


def _readable(record: str) -> str:
    if record[:1] != "M":
        return record.removeprefix("A")
    try:
        return str(json.loads(record[1:]).get("content", ""))
    except ValueError:
        return record
