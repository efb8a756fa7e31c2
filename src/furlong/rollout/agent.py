"""Access to the policy for custom generate functions.

    from furlong.rollout.agent import policy

    async def generate(args, sample, sampling_params):
        turn = await policy().generate(sample.tokens, **sampling_params)
        sample.append_response_tokens(
            tokens=turn.tokens, log_probs=turn.log_probs, text=turn.text, version=turn.versions
        )
        observation = await my_tool(turn.text)
        sample.append_response_tokens(tokens=policy().encode(observation), trainable=False, text=observation)
        ...
        return sample

The policy is passed in a context variable, so the same function works with the embedded engine and with servers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from furlong.core.routing import Routes
from furlong.errors import RolloutError
from furlong.interfaces import Completion, Engine, SamplingParams

_SEED_STRIDE = 0x9E3779B97F4A7C15  # golden ratio: the parts of one sample draw from separate streams
_PARAM_NAMES = frozenset(f.name for f in dataclasses.fields(SamplingParams))


def params_from_dict(values: dict[str, Any]) -> SamplingParams:
    """Build sampling parameters from SGLang's names. Raises RolloutError for an unknown name."""
    if unknown := sorted(set(values) - _PARAM_NAMES):
        raise RolloutError(f"unknown sampling parameters {unknown}; known are {sorted(_PARAM_NAMES)}")
    fixed = dict(values)
    for name in ("stop", "stop_token_ids"):
        if name in fixed:
            value: Any = fixed[name]
            fixed[name] = () if value is None else (value,) if isinstance(value, str | int) else tuple(value)
    return SamplingParams(**fixed)


def dict_from_params(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as the dict that slime passes to custom generate functions.

    It is valid as `sampling_params` of an SGLang request, so it leaves out `return_routed_experts`, which `Policy` has.
    """
    values = dataclasses.asdict(params)
    del values["return_routed_experts"]
    values["stop"] = list(params.stop)
    values["stop_token_ids"] = list(params.stop_token_ids)
    return values


def seed_of_part(seed: int, part: int) -> int:
    """Return the seed of the n-th engine call of a sample; part 0 has the sample's seed."""
    return (seed + _SEED_STRIDE * part) % 2**63


@dataclass(frozen=True)
class Policy:
    """The engine that serves the current weights, and its tokenizer.

    With `return_routed_experts` every call requests them; `routed` has prompt and completion tokens of each call with
    their experts.
    """

    engine: Engine
    tokenizer: Any
    session: str
    return_routed_experts: bool = False
    calls: Iterator[int] = field(default_factory=itertools.count, repr=False)
    sampled: list[list[int]] = field(default_factory=list[list[int]], repr=False)  # tokens of each completion
    routed: list[tuple[list[int], Routes]] = field(default_factory=list[tuple[list[int], Routes]], repr=False)

    async def generate(self, prompt: str | Sequence[int], **sampling_params: Any) -> Completion:
        """Complete a prompt given as text or token ids. Parameters have SGLang's names.

        Each call of a sample has its own seed, derived from the number of the call, so that the turns of a conversation
        do not share random numbers.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if ids and isinstance(ids[0], Mapping):
            raise RolloutError(
                "policy().generate needs text or token ids, got chat messages; render them first: "
                "policy().tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)"
            )
        params = params_from_dict({"return_routed_experts": self.return_routed_experts} | sampling_params)
        call = next(self.calls)
        if params.sampling_seed is not None:
            params = dataclasses.replace(params, sampling_seed=seed_of_part(params.sampling_seed, call))
        completion = await self.engine.generate(ids, params, session=self.session)
        self.sampled.append(list(completion.tokens))
        if completion.routed_experts is not None:
            self.routed.append(([*ids, *completion.tokens], completion.routed_experts))
        return completion

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without adding special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


_policy: ContextVar[Policy] = ContextVar("furlong_policy")


def policy() -> Policy:
    """Return the policy of the current rollout. Raises RolloutError outside a custom generate function."""
    try:
        return _policy.get()
    except LookupError:
        raise RolloutError("furlong.rollout.agent.policy() was called outside a custom generate function") from None


@contextlib.contextmanager
def serving(current: Policy) -> Generator[None]:
    """Make `policy()` return `current` in this task and the tasks it starts."""
    token = _policy.set(current)
    try:
        yield
    finally:
        _policy.reset(token)
