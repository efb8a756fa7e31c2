"""`Reply`: an answer of the policy, in the process of the session and in that of its HTTP server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from furlong.chat.messages import Message

if TYPE_CHECKING:  # import torch
    from furlong.interfaces import FinishReason
    from furlong.sessions.tree import TreeNode


@dataclass(frozen=True)
class Reply:
    """An answer of the policy.

    message: as clients append it to their messages. tokens, log_probs and versions are those of the engine, num_tokens
    their number; prompt_tokens is the number of ids that it read, of which it had cached_tokens. texts (of the tokens)
    and prompt_ids are empty unless a client asked for them; so are tokens, log_probs and versions in the process of the
    HTTP server.
    """

    message: Message
    tokens: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    id: str
    num_tokens: int
    node: TreeNode | None = field(default=None, repr=False)
    texts: list[str] = field(default_factory=list[str], repr=False)
    prompt_ids: list[int] = field(default_factory=list[int], repr=False)

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls."""
        return self.message["content"] or ""

    @property
    def reasoning(self) -> str | None:
        """The reasoning, if the reply has any."""
        return self.message.get("reasoning_content")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in OpenAI's form: `id`, `function.name` and `function.arguments`, which is JSON text."""
        return self.message.get("tool_calls", [])
