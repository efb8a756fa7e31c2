"""A prompt with one response, and the group of samples that share a prompt. Field names are slime's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from furlong.core.outcome import Outcome
from furlong.errors import DataError

MADE_BY_FUNCTION = -2  # epoch of groups that a rollout function made itself
UNKNOWN_VERSION = -1  # weight version of tokens from the environment, or of tokens that user code added without one

FIRST_PROMPT = "session_prompt_ids"  # metadata: tokens of an agent's first prompt that the sample begins with; or 0
STEP_REWARDS = "step_rewards"  # metadata: parts of the reward that were earned in each turn
TURN_ENDS = (
    "turn_ends"  # metadata: number and last response token of each trained turn; without it, of each trained run
)
ROLE = "role"  # metadata: which of several agents of an episode the sample is of
ROLE_GROUP = "role_group"  # metadata: the roles of one episode that the sample's role is compared with
UNSAMPLED = "trained_unsampled_tokens"  # metadata: number of trained tokens that the engine did not sample
OTHER_CONTEXT = "sampled_in_another_context"  # metadata: it failed as its tokens, or those before, are not the engine's
UNNAMED_ROLE = "policy"  # the role of agents that name none

# Fields with one value, or one row, per response token.
PER_TOKEN = (
    *("loss_mask", "rollout_log_probs", "teacher_log_probs", "teacher_mask", "teacher_top_ids"),
    *("teacher_top_log_probs", "token_versions"),
)
_ARRAYS = {"rollout_routed_experts": "int16", "teacher_top_ids": "int32", "teacher_top_log_probs": "float32"}


class Status(StrEnum):
    """State of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


STATUS_BY_FINISH_REASON = {
    "stop": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
}  # by finish reason


def status_from_meta(meta_info: Mapping[str, Any]) -> Status | None:
    """Return the status that an SGLang reply's `finish_reason` stands for; None if generation has not ended.

    Raises DataError for a finish reason that SGLang does not have.
    """
    reason: Any = meta_info.get("finish_reason")
    if not reason:
        return None
    kind: Any = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind not in STATUS_BY_FINISH_REASON:
        raise DataError(
            f"meta_info has the finish_reason {reason!r}, which is none of {', '.join(STATUS_BY_FINISH_REASON)}; pass "
            "the meta_info of an SGLang reply, or update_terminal_info=False and set the status yourself"
        )
    return STATUS_BY_FINISH_REASON[kind]


def _listed(values: Any) -> list[Any]:
    """Return a list of a sequence, array or tensor; None is empty."""
    if values is None:
        return []
    return values.tolist() if hasattr(values, "tolist") else list(values)


# Fields of slime for images and for the sampling mask of the engine, which functions for text read, too.
_NEVER_SET = frozenset(
    ("multimodal_inputs", "multimodal_train_inputs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets")
)


def _extended_routes(known: Any, routes: Any, meta_info: Mapping[str, Any], num_tokens: int) -> Any:
    """Return the routes of `num_tokens` tokens. Without any, numpy is not imported, which takes long in a worker."""
    if known is None and routes is None and meta_info.get("routed_experts") is None:
        return None
    from furlong.core.routing import extend_routes, routes_from_meta

    routes = extend_routes(known, routes)
    return extend_routes(routes, routes_from_meta(meta_info, num_tokens, routes))


class _Uncounted:
    """Counters that slime's samples have: cached and speculated tokens are counted for the whole run."""

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Do nothing."""


@dataclass
class Sample:
    """One prompt, its response and everything that training needs to know about it.

    `tokens` is prompt + response; the last `response_length` of them are the response. What has a value per token
    (`PER_TOKEN`) has length `response_length`.
    A `loss_mask` of None means that every response token was sampled from the policy and is trained on.
    A teacher's log-probs are those of the tokens, `teacher_log_probs`, and of K others at each position:
    `teacher_top_ids` and `teacher_top_log_probs` are int32 and float32 arrays [response_length, K]. `teacher_mask` is 0
    for tokens without a teacher's value; None if all have one.
    `rollout_routed_experts` is an integer array [tokens - 1, layers, experts per token] (`core.routing`), or None.

    >>> sample = Sample(prompt="1+1=", tokens=[5, 6])
    >>> sample.append_response_tokens(tokens=[7], log_probs=[-0.1], text="2", version=3)
    >>> sample.tokens, sample.loss_mask, sample.token_versions
    ([5, 6, 7], [1], [3])
    """

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list[int])
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    outcome: Outcome | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list[str])
    token_versions: list[int] = field(default_factory=list[int])
    rollout_log_probs: list[float] | None = None
    teacher_log_probs: list[float] | None = None
    teacher_mask: list[int] | None = None
    teacher_top_ids: Any = field(default=None, compare=False)
    teacher_top_log_probs: Any = field(default=None, compare=False)
    rollout_routed_experts: Any = field(default=None, compare=False)  # arrays do not compare to a bool
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    train_metadata: dict[str, Any] | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    tools: list[dict[str, Any]] | None = None
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    seed: int | None = None

    Status = Status

    if not TYPE_CHECKING:  # type checkers must still report wrong names

        def __getattr__(self, name: str) -> Any:
            """Return None for what slime's samples have and no run here sets; raise AttributeError for other names."""
            if name in ("prefix_cache_info", "spec_info"):
                return _Uncounted()
            if name in _NEVER_SET:
                return None
            raise AttributeError(
                f"a Sample has no {name}; attributes that your functions set reach rewards, dumps and checkpoints if "
                "they are JSON values: set it first, or store it in `metadata`"
            )

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens; 0 before tokenization."""
        return len(self.tokens) - self.response_length

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def append_response_tokens(
        self,
        args: Any = None,  # slime's first parameter; hooks written for slime pass it
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = "",
        update_terminal_info: bool = True,
        version: int | Sequence[int] = UNKNOWN_VERSION,
        routed_experts: Any = None,
    ) -> None:
        """Append tokens to the response and update every per-token list.

        Trainable tokens need their log-probs. Tokens from the environment (tool output) have `trainable=False` and no
        log-probs, or 0.0: their mask and log-prob are 0. Tensors and arrays are accepted for both.
        `version` is the weight version of all tokens, or one per token (`Completion.versions`). `routed_experts` covers
        all tokens so far except the last, prompt included (`Completion.routed_experts`). `meta_info` is that of an
        SGLang reply: its `routed_experts` are decoded, and with `update_terminal_info` its `finish_reason` sets the
        status, and its `weight_version`, that of the last token, is appended to `weight_versions`.
        Raises DataError, and leaves the sample unchanged, if lengths differ, if log-probs are missing for trainable
        tokens, here or before, and for an unknown finish reason or routed experts that do not fit the tokens.
        """
        if tokens is None and hasattr(args, "__len__"):
            raise DataError("the first parameter of append_response_tokens is slime's args; pass the ids as tokens=")
        ids, values = _listed(tokens), None if log_probs is None else _listed(log_probs)
        versions = [version] * len(ids) if isinstance(version, int) else list(version)
        self._check_append(ids, values, versions, trainable=trainable)
        status = status_from_meta(meta_info) if meta_info is not None and update_terminal_info else None
        routes = _extended_routes(
            self.rollout_routed_experts, routed_experts, meta_info or {}, len(self.tokens) + len(ids)
        )
        before = self.response_length
        if ids:
            self.loss_mask = [1] * before if self.loss_mask is None else self.loss_mask
            if self.rollout_log_probs or trainable or not any(self.loss_mask):  # else none of them has log-probs
                self.rollout_log_probs = self.rollout_log_probs or [0.0] * before
                self.rollout_log_probs.extend([0.0] * len(ids) if values is None else values)
            self.loss_mask.extend([int(trainable)] * len(ids))
        self.tokens.extend(ids)
        self.token_versions.extend([UNKNOWN_VERSION] * (before - len(self.token_versions)) + versions)
        self.response += text or ""
        self.response_length += len(ids)
        self.rollout_routed_experts = routes
        if meta_info is not None and status is not None:
            self.status = status
            if "weight_version" in meta_info:
                self.weight_versions.append(str(meta_info["weight_version"]))

    def _check_append(
        self, tokens: list[Any], log_probs: list[Any] | None, versions: list[int], *, trainable: bool
    ) -> None:
        what = "append_response_tokens"
        if log_probs is not None and len(log_probs) != len(tokens):
            raise DataError(f"{what} got {len(tokens)} tokens but {len(log_probs)} log-probs")
        if len(versions) != len(tokens):
            raise DataError(f"{what} got {len(tokens)} tokens but {len(versions)} weight versions")
        if tokens and trainable and log_probs is None:
            raise DataError(
                f"{what} got {len(tokens)} trainable tokens without log-probs; pass log_probs (of the reply that has "
                "the tokens), or trainable=False for tokens that the policy did not sample"
            )
        if not trainable and any(log_probs or ()):
            raise DataError(
                f"{what} got log-probs of {len(tokens)} tokens that are not trainable; leave log_probs out, or pass "
                "0.0: the policy did not sample them"
            )
        mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        if tokens and trainable and any(mask) and not self.rollout_log_probs:
            raise DataError(
                f"{what}: the {sum(mask)} trainable tokens before have no log-probs; set rollout_log_probs, one per "
                "response token, or append those tokens with their log-probs as well"
            )

    def get_reward_value(self, args: Any = None) -> Any:
        """Return the scalar reward. From a dict, `args.reward_key` selects it; without a key, return the dict.

        Raises DataError if there is none.
        """
        key = getattr(args, "reward_key", None)
        return self.reward if key is None and isinstance(self.reward, dict) else scalar_reward(self, key)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data, the inverse of `from_dict`. JSON values that user code has set are in `attributes`."""
        data = vars(self).copy()
        if data.keys() != Sample.__dataclass_fields__.keys():  # user code has set or deleted attributes
            given, data = data, {name: getattr(self, name) for name in Sample.__dataclass_fields__}
            if attributes := {k: v for k, v in given.items() if k not in data and _is_json(v)}:
                data["attributes"] = attributes
        data["status"] = Status(self.status).value  # user code may set the text
        data["outcome"] = self.outcome and {name: getattr(self.outcome, name) for name in Outcome.__slots__}
        for name, dtype in _ARRAYS.items():
            if data[name] is not None:
                from furlong.core.routing import json_from_array

                data[name] = json_from_array(data[name], dtype)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`. Raises DataError for unknown keys."""
        known = {f.name for f in dataclasses.fields(cls)}
        values = dict(data)
        attributes: dict[str, Any] = values.pop("attributes", {})
        if extra := sorted(set(values) - known):
            raise DataError(f"Sample.from_dict: unknown keys {extra}; store your own values in `metadata`")
        values["status"] = Status(values.get("status", "pending"))
        if values.get("outcome") is not None:
            values["outcome"] = Outcome(**values["outcome"])
        for name in _ARRAYS:
            if values.get(name) is not None:
                from furlong.core.routing import array_from_json

                values[name] = array_from_json(values[name])
        sample = cls(**values)
        vars(sample).update({name: value for name, value in attributes.items() if name not in known})
        return sample


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in cast("dict[Any, Any]", value).items())
    if isinstance(value, list):
        return all(map(_is_json, cast("list[Any]", value)))
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))


def _or_roles(sample: Sample) -> str:
    return f", or return a dict by role, with a key {sample.metadata[ROLE]!r}" if ROLE in sample.metadata else ""


def metadata_keys(samples: Iterable[Sample]) -> set[str]:
    """Return the keys that the metadata of any sample has."""
    return set[str]().union(*(sample.metadata for sample in samples))


def scalar_reward(sample: Sample, reward_key: str | None) -> float:
    """Return the scalar reward of a sample. Raises DataError naming the sample, the reward and the key."""
    reward = sample.reward
    if isinstance(reward, dict):
        if reward_key is None:
            raise DataError(
                f"sample {sample.index} has a dict reward with keys {sorted(reward)}, but --reward-key is not set; "
                f"set --reward-key to one of them{_or_roles(sample)}"
            )
        if reward_key not in reward:
            raise DataError(f"sample {sample.index}: --reward-key {reward_key} is not in {sorted(reward)}")
        reward = reward[reward_key]
    if reward is None and sample.status is Status.FAILED:
        why = f": {sample.outcome.reason}" if sample.outcome is not None else ""
        raise DataError(
            f"sample {sample.index} has no reward because it failed{why}; functions that read rewards must skip "
            "samples with status Sample.Status.FAILED"
        )
    if reward is None:
        raise DataError(
            f"sample {sample.index} has no reward (status {sample.status.value}); a custom rollout function must set "
            "`reward`, because no reward function is called for its samples"
        )
    try:
        return float(reward)
    except (TypeError, ValueError):
        key = "the reward" if reward_key is None else f"--reward-key {reward_key}"
        raise DataError(
            f"sample {sample.index}: {key} is {type(reward).__name__} {str(reward)[:80]!r}, not a number; return a "
            "number there, or name another key"
        ) from None


@dataclass
class Group:
    """The samples of one prompt, as issued by the data source.

    `index` is unique in a run and strictly increasing; (`epoch`, `row`) is the origin of the prompt, with
    `MADE_BY_FUNCTION` as the epoch if a rollout function made the group. A sample that a
    custom generate function fanned out into several appears here as several samples with the same `rollout_id`.
    """

    index: int
    samples: list[Sample]
    epoch: int = 0
    row: int = 0

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able data."""
        return {
            "index": self.index,
            "epoch": self.epoch,
            "row": self.row,
            "samples": [s.to_dict() for s in self.samples],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Group:
        """Inverse of `to_dict`."""
        return cls(data["index"], [Sample.from_dict(s) for s in data["samples"]], data["epoch"], data["row"])


_OUTCOME_FIELDS = ("reward", "outcome")  # returned by themselves


def changed_fields(sample: Sample, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that user code in another process changed; `before` is what `Sample.to_dict` returned."""
    after = sample.to_dict()
    return {name: value for name, value in after.items() if value != before.get(name) and name not in _OUTCOME_FIELDS}


def apply_changes(sample: Sample, changes: Mapping[str, Any]) -> None:
    """Apply the result of `changed_fields` to the sample in the driver."""
    for name, value in changes.items():
        if name == "attributes":  # of user code, by name
            vars(sample).update(value)
            continue
        setattr(sample, name, Status(value) if name == "status" else value)
