"""Calls, replies and errors as they are sent between the process of the HTTP server and that of the run."""

from __future__ import annotations

import dataclasses
from typing import Any

from furlong.chat.messages import CheckedMessages, MessageError
from furlong.errors import EngineError, RolloutError
from furlong.inference.request_error import RequestError
from furlong.inference.server.limits import RefusedError
from furlong.sessions.endpoints.client_call import ClientCall
from furlong.sessions.reply import Reply
from furlong.sessions.reply_stream import ReplyPiece
from furlong.sessions.session_errors import EndedError, FullContextError

_EMPTY = ClientCall()
_CALL_FIELDS = [
    (each.name, getattr(_EMPTY, each.name))
    for each in dataclasses.fields(ClientCall)
    if each.name not in ("body", "sampling")
]
_REPLY_FIELDS = [each.name for each in dataclasses.fields(Reply) if each.name != "node"]
_OF_TOKENS = ("tokens", "log_probs", "versions")
_ERRORS = {
    each.__name__: each
    for each in (EndedError, FullContextError, MessageError, RequestError, EngineError, RolloutError)
}


class UnexpectedError(RolloutError):
    """An error of the run that no request can explain; its log has the traceback."""


def call_fields(call: ClientCall) -> dict[str, Any]:
    """Return what the session needs of a call, without values that are the default."""
    sampling = {name: value for name, value in call.sampling.items() if value is not None}
    changed = {name: value for name, default in _CALL_FIELDS if (value := getattr(call, name)) != default}
    return {"sampling": sampling, **changed}


def call_from(fields: dict[str, Any]) -> ClientCall:
    """Return a call; its messages were checked by the other process."""
    fields["messages"] = CheckedMessages(fields.get("messages", ()))
    return ClientCall(**fields)


def reply_values(reply: Reply, *, with_tokens: bool) -> list[Any]:
    """Return a reply without its node, and with the tokens only if the client asked for them."""
    return [getattr(reply, name) if with_tokens or name not in _OF_TOKENS else [] for name in _REPLY_FIELDS]


def reply_from(values: list[Any]) -> Reply:
    """Return a reply."""
    return Reply(**dict(zip(_REPLY_FIELDS, values, strict=True)))


def piece_values(piece: ReplyPiece, *, with_tokens: bool) -> list[Any]:
    """Return what an answer grew by, and the tokens only if the client asked for them."""
    tokens = [piece.tokens, piece.log_probs, piece.texts] if with_tokens else []
    return [piece.reasoning, piece.content, *tokens]


def piece_from(values: list[Any]) -> ReplyPiece:
    """Return what an answer grew by."""
    return ReplyPiece(*values)


def error_values(error: BaseException) -> list[Any]:
    """Return the class, text and status of an error."""
    if isinstance(error, RefusedError):
        return ["RefusedError", sendable(str(error)), error.status]
    name = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS), "")
    return [name, sendable(str(error) if name else f"{type(error).__name__}: {error}"), 0]


def sendable(text: str) -> str:
    """Return a text that JSON can represent."""
    return text.encode("utf-8", "replace").decode()


def error_from(name: str, text: str, status: int) -> Exception:
    """Return an error."""
    if name == "RefusedError":
        return RefusedError(text, status)
    return _ERRORS[name](text) if name else UnexpectedError(f"{text}; the log has the traceback")
