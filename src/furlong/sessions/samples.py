"""Samples of a session: one for each leaf of its tree, with every sampled token trained exactly once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from furlong.core.routing import extend_routes
from furlong.core.sample import (
    FIRST_PROMPT,
    ROLE,
    ROLE_GROUP,
    STATUS_BY_FINISH_REASON,
    STEP_REWARDS,
    TURN_ENDS,
    UNKNOWN_VERSION,
    UNNAMED_ROLE,
    Sample,
    Status,
)
from furlong.errors import RolloutError
from furlong.interfaces import Completion
from furlong.sessions.session import Session
from furlong.sessions.tree import TreeNode, hash_of

MESSAGES = "messages"  # sample metadata: the conversation of the leaf
TURNS = "session_turns"  # sample metadata: answers on the leaf's path
EPISODE = "session_counts"  # metadata of the last leaf's sample: counts of the episode
ROLES = "roles"  # metadata of the last leaf's sample: the conversation of each role, with those that are not trained
LEAF = "session_leaf"  # metadata of the other leaves' samples: their number

Leaves = Literal["all", "last", "longest"] | Callable[[Sequence[TreeNode]], Sequence[TreeNode]]


@dataclass(frozen=True)
class _Stretch:
    """Sampled tokens of one answer in a leaf. start: position in the leaf; is_new: no earlier leaf trains them."""

    node: TreeNode
    start: int
    is_new: bool


def samples_from_session(session: Session, origin: Sample, *, leaves: Leaves = "all") -> list[Sample]:
    """Return the samples of an episode, one for each kept leaf, in the order in which leaves were completed.

    They are copies of `origin` and share its `rollout_id`, so that they count as one completion. A token that several
    leaves contain is trained in the first; in the others it is part of the prompt, or has the loss mask 0.
    Raises RolloutError if the session has no answers, or if what would be trained is not what the engine sampled.
    """
    all_leaves = session.tree.leaves()
    kept = _kept([leaf for leaf in all_leaves if leaf.role not in session.frozen_roles], leaves)
    if all_leaves and not kept and session.frozen_roles:
        raise RolloutError(
            f"sample {origin.index} has answers of the roles {', '.join(sorted(session.frozen_roles))} only, which are "
            "not trainable; let another role answer"
        )
    if not kept:
        raise RolloutError(
            f"the agent of sample {origin.index} ended without an answer of the policy; let it call "
            "policy().chat(messages), or the URL of its session"
        )
    trained: set[TreeNode] = set()
    samples: list[Sample] = []
    for leaf in kept:
        sample = _sample(session, origin, leaf, trained)
        trained.update(leaf.path)
        samples.append(sample)
    last = samples[-1]
    for number, sample in enumerate(samples[:-1]):
        sample.metadata[LEAF] = number
    last.metadata[EPISODE] = _counts(session, len(kept))
    if any(leaf.role for leaf in all_leaves):
        last.metadata[ROLES] = {leaf.role or UNNAMED_ROLE: leaf.conversation() for leaf in all_leaves}
        for leaf, sample in zip(kept, samples, strict=True):
            sample.metadata[ROLE] = leaf.role or UNNAMED_ROLE
            if leaf.role in session.role_groups:
                sample.metadata[ROLE_GROUP] = session.role_groups[leaf.role]
    if session.counts["full_contexts"] and last.status is Status.COMPLETED:
        last.status = Status.TRUNCATED
    return samples


def _counts(session: Session, num_leaves: int) -> dict[str, Any]:
    nodes = session.tree.nodes
    num_attached = sum(0 if node.parent is None else node.parent.num_ids for node in nodes)
    num_read = sum(node.num_ids - len(node.sampled) for node in nodes)
    versions = {version for node in nodes for version in node.completion.versions}
    return {
        "leaves": num_leaves,
        "turns": len(nodes),
        "prefix_kept_frac": num_attached / num_read if num_read else 0.0,
        "versions": len(versions),
        "continued": max(len(nodes) - 1, 0),
        "branches": dict(session.tree.branch_reasons),
        "counts": {name: count for name, count in session.counts.items() if count},
    }


def _kept(leaves: Sequence[TreeNode], choice: Leaves) -> list[TreeNode]:
    if choice == "all" or not leaves:
        return list(leaves)
    if choice == "last":
        return [leaves[-1]]
    if choice == "longest":
        return [max(leaves, key=lambda leaf: leaf.num_ids)]
    chosen: Any = cast("Callable[[Sequence[TreeNode]], Any]", choice)(leaves)
    if not isinstance(chosen, list | tuple) or not all(leaf in leaves for leaf in cast("list[Any]", chosen)):
        raise RolloutError(
            f"--session-leaves: the function returned {type(chosen).__name__}; it must return a list of some of the "
            f"{len(leaves)} leaves that it got"
        )
    return [leaf for leaf in leaves if leaf in chosen]


def _sample(session: Session, origin: Sample, leaf: TreeNode, trained: set[TreeNode]) -> Sample:
    """Build the sample of one leaf. Its prompt ends where the first token to train on begins."""
    ids, stretches = leaf.ids(), _stretches(leaf, trained)
    first = next((s.start for s in stretches if s.is_new), len(ids) - len(leaf.sampled))
    response = ids[first:]
    mask, log_probs, versions = [0] * len(response), [0.0] * len(response), [UNKNOWN_VERSION] * len(response)
    ends: list[list[int]] = []
    for stretch in stretches:
        at, done = stretch.start - first, stretch.node.completion
        if at >= 0 and stretch.is_new:
            _check(session, stretch, ids, done)
            end = at + len(done.tokens)
            mask[at:end] = [1] * len(done.tokens)
            log_probs[at:end] = done.log_probs
            versions[at:end] = done.versions
            ends += [[stretch.node.number, end - 1]] if done.tokens else []
    sample = copy.copy(origin)
    sample.tokens, sample.response_length, sample.loss_mask = ids, len(response), mask
    sample.rollout_log_probs, sample.token_versions = log_probs, versions
    sample.weight_versions = [str(node.completion.versions[-1]) for node in leaf.path if node.completion.versions]
    sample.response = _text(session, response)
    sample.status = Status.COMPLETED if leaf.is_cut else STATUS_BY_FINISH_REASON[leaf.completion.finish_reason]
    kept = {key: value for key, value in origin.metadata.items() if key not in (EPISODE, ROLES, LEAF)}
    root, begins_first = leaf.path[0], leaf.path[0].prompt_hash == session.tree.nodes[0].prompt_hash
    known = {MESSAGES: leaf.conversation(), TURNS: leaf.depth + 1, FIRST_PROMPT: len(root.added) * begins_first}
    sample.metadata = {**kept, **known}
    if STEP_REWARDS in kept:
        sample.metadata[TURN_ENDS] = ends
    sample.rollout_routed_experts = None
    for node in leaf.path:
        if node.routed_experts is not None:
            sample.rollout_routed_experts = extend_routes(sample.rollout_routed_experts, node.routed_experts)
    return sample


def _stretches(leaf: TreeNode, trained: set[TreeNode]) -> list[_Stretch]:
    return [_Stretch(node, node.num_ids - len(node.sampled), node not in trained) for node in leaf.path]


def _check(session: Session, stretch: _Stretch, ids: Sequence[int], done: Completion) -> None:
    """Raise RolloutError unless the leaf has the answer where the engine sampled it, after the ids that it read."""
    node, start = stretch.node, stretch.start
    end = start + len(done.tokens)
    where = f"session {session.name}, turn {node.depth + 1}, position {start}"
    if hash_of(ids[:start]) != node.prompt_hash or list(ids[start:end]) != done.tokens:
        raise RolloutError(f"{where}: the sample has other ids than the engine read and sampled; report this as a bug")
    if not len(done.tokens) == len(done.log_probs) == len(done.versions):
        raise RolloutError(
            f"{where}: the engine returned {len(done.tokens)} tokens, {len(done.log_probs)} log-probs and "
            f"{len(done.versions)} weight versions; they must be equal in number"
        )


def _text(session: Session, ids: Sequence[int]) -> str:
    skips = session.params.skip_special_tokens
    return str(session.chat_format.tokenizer.decode(list(ids), skip_special_tokens=skips))
