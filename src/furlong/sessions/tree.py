"""The tree of a session: one node for each answer, with the ids that the engine read and sampled for it.

The ids of a committed node are never rendered again. A request attaches to the deepest node whose messages it repeats,
and what does not repeat any is the root of a branch; nothing is refused.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from furlong.chat.messages import KeyFunction, Message, chain, link, same_reasoning
from furlong.core.routing import Routes
from furlong.interfaces import Completion, SamplingParams

BranchReason = Literal["stripped", "edited", "compacted", "retry", "tools", "subagent"]


def hash_of(ids: Sequence[int]) -> str:
    """Return the hash of token ids."""
    return xxhash.xxh3_128_hexdigest(array("q", ids).tobytes())


@dataclass(eq=False)
class TreeNode:
    """One answer of the policy.

    added: ids between the parent's last one and the first sampled one. messages: those since the parent's answer;
    empty for requests of token ids. reply: the answer as the client got it. num_messages: messages up to and including
    the answer. num_ids: ids up to and including the last sampled one. number: order of completion in the session.
    is_delivered: False if the client was gone when the answer was ready. is_cut: the client left during the stream,
    which ended the answer. is_branch: not on the first conversation.
    prompt_hash: of the ids that the engine read.
    """

    parent: TreeNode | None
    number: int
    added: Sequence[int]
    completion: Completion
    messages: Sequence[Message] = ()
    reply: Message | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    role: str = ""
    seconds: float = 0.0
    response_id: str = ""
    num_messages: int = 0
    is_delivered: bool = True
    is_cut: bool = False
    is_branch: bool = False
    prompt_hash: str = ""
    num_children: int = 0
    num_ids: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        before = 0 if self.parent is None else self.parent.num_ids
        self.num_ids = before + len(self.added) + len(self.sampled)
        self.depth = 0 if self.parent is None else self.parent.depth + 1

    @property
    def sampled(self) -> list[int]:
        """The ids that the engine sampled."""
        return self.completion.tokens

    @property
    def routed_experts(self) -> Routes | None:
        """The experts of prompt and answer, if they were recorded."""
        return self.completion.routed_experts

    @property
    def path(self) -> list[TreeNode]:
        """The nodes from the root to this one."""
        nodes: list[TreeNode] = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    def ids(self) -> list[int]:
        """Return all ids up to the last sampled one."""
        return [id for node in self.path for part in (node.added, node.sampled) for id in part]

    def conversation(self) -> list[Message]:
        """Return all messages up to the answer."""
        messages: list[Message] = []
        for node in self.path:
            messages += node.messages
            if node.reply is not None:
                messages.append(node.reply)
        return messages


@dataclass(frozen=True)
class ChatRequest:
    """The messages of a request with their keys. hashes[i] identifies the first i messages, tools and kwargs."""

    messages: Sequence[Message]
    keys: Sequence[str]
    hashes: Sequence[str]
    root: str


class SessionTree:
    """Nodes of one session, in the order in which they were completed.

    branch_reasons counts why requests did not extend the conversation before.
    """

    def __init__(self, key: KeyFunction) -> None:
        self._key = key
        self.nodes: list[TreeNode] = []
        self.branch_reasons: Counter[BranchReason] = Counter()
        self._by_hash: dict[str, list[TreeNode]] = {}  # nodes by their messages, with tools and template kwargs
        self._replies: set[str] = set()  # keys of answers
        self._seen: dict[str, int] = {}  # prefixes of requests and answers, without tools -> messages of the longest

    def request(self, messages: Sequence[Message], root: str) -> ChatRequest:
        """Return a request; `root` has the tools and the template kwargs."""
        keys = [self._key(message) for message in messages]
        return ChatRequest(messages, keys, chain(root, keys), root)

    def candidates(self, request: ChatRequest) -> Iterator[TreeNode]:
        """Yield the nodes whose messages the request repeats, the deepest and latest first."""
        for count in range(len(request.messages), 0, -1):
            for node in reversed(self._by_hash.get(request.hashes[count], ())):
                is_kept = (
                    each.reply is None or same_reasoning(each.reply, request.messages[each.num_messages - 1])
                    for each in node.path
                )
                if all(is_kept):
                    yield node

    def longest_prefix(self, ids: Sequence[int], role: str = "") -> TreeNode | None:
        """Return the deepest node of a role all of whose ids begin `ids`."""
        children: dict[TreeNode | None, list[TreeNode]] = {}
        for node in self.nodes:
            if node.role == role:
                children.setdefault(node.parent, []).append(node)
        found: TreeNode | None = None
        open_nodes: list[TreeNode | None] = [None]
        while open_nodes:
            parent = open_nodes.pop()
            start = 0 if parent is None else parent.num_ids
            for node in children.get(parent, ()):
                part = [*node.added, *node.sampled]
                if node.num_ids <= len(ids) and list(ids[start : node.num_ids]) == part:
                    open_nodes.append(node)
                    if found is None or node.num_ids >= found.num_ids:
                        found = node
        return found

    def commit(self, node: TreeNode, request: ChatRequest | None = None) -> None:
        """Add a node, so that later requests can attach to it. `request` is the one that it answers, if in messages."""
        self.nodes.append(node)
        if node.parent is not None:
            node.parent.num_children += 1
        if request is None or node.reply is None:
            return
        key = self._key(node.reply)
        self._replies.add(key)
        self._by_hash.setdefault(link(request.hashes[-1], key), []).append(node)
        prefixes = chain("", [*request.keys, key])[1:]
        for prefix in prefixes:
            self._seen[prefix] = max(self._seen.get(prefix, 0), len(prefixes))

    def siblings(self, request: ChatRequest, parent: TreeNode | None) -> list[TreeNode]:
        """Return the answers to the same messages, after the same node."""
        keys = [self._key(message) for message in request.messages[0 if parent is None else parent.num_messages :]]
        return [
            node
            for node in self.nodes
            if node.parent is parent and [self._key(message) for message in node.messages] == keys
        ]

    def branch_reason(self, request: ChatRequest, parent: TreeNode | None, role: str = "") -> BranchReason | None:
        """Return why a request does not extend the latest answer of its conversation; None if it does."""
        if parent is not None and parent.num_children == 0:
            return None
        if not any(node.role == role for node in self.nodes):
            return None
        prefixes = chain("", request.keys)[1:]
        shared = [self._seen[prefix] for prefix in prefixes if prefix in self._seen]
        if not shared:
            return "subagent" if self._replies.isdisjoint(request.keys) else "edited"
        if len(shared) == len(prefixes):
            return "retry" if self.siblings(request, parent) else "tools"
        return "compacted" if len(prefixes) + 1 < shared[-1] else "edited"

    def leaves(self) -> list[TreeNode]:
        """Return the nodes without children, in order of completion; superseded ones are left out.

        An answer is superseded if its client never got it, and got another one to the same request.
        """
        return [node for node in self.nodes if not node.num_children and not self._is_superseded(node)]

    def _is_superseded(self, node: TreeNode) -> bool:
        if node.is_delivered:
            return False
        asked = (list(node.added), [self._key(message) for message in node.messages])
        return any(
            other.is_delivered
            and other.parent is node.parent
            and (list(other.added), [self._key(message) for message in other.messages]) == asked
            for other in self.nodes
        )
