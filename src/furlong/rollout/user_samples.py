"""Custom generate functions: their call, and the check of the samples that they return.

    from furlong import policy

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

import importlib
import inspect
import itertools
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from furlong.config.args_view import Args
from furlong.core.routing import extend_routes
from furlong.core.sample import OTHER_CONTEXT, PER_TOKEN, UNKNOWN_VERSION, UNSAMPLED, Sample, Status
from furlong.core.user_code import is_raised_by_user, message_of
from furlong.core.user_functions import Function, takes_input
from furlong.errors import RolloutError
from furlong.interfaces import Completion, Engine, SamplingParams
from furlong.rollout.agent import current
from furlong.rollout.episodes import LIMIT
from furlong.rollout.policy import Policy, dict_from_params
from furlong.sessions.samples import Leaves, samples_from_session

MAX_LOG_PROB = 1e-2  # above 0, for rounding in engines

_by_seed: dict[int, Policy] = {}  # policies of the generate functions that run now, by the seed of their sample


async def complete_request(engine: Engine, ids: list[int], params: SamplingParams) -> Completion:
    """Complete a request that user code sent over HTTP.

    `sampling_params` of a generate function contain the sample's seed, so its requests are recorded like calls of
    `policy().generate`, and calls differ although they send one seed. An agent could send the seed of another episode,
    whose limits would count that, so requests are not recorded where one plays the episode: it has a session.
    """
    policy = None if params.sampling_seed is None else _by_seed.get(params.sampling_seed)
    if policy is None or policy.opened:
        return await engine.generate(ids, params)
    return await policy.complete(ids, params)


@dataclass(frozen=True)
class GenerateFnInput:
    """The argument of a generate function in the form of Miles. state: `GenerateState` of slime's names."""

    state: Any
    sample: Sample
    sampling_params: dict[str, Any]
    evaluation: bool
    call_args: Any = None

    @property
    def args(self) -> Any:
        """The flags of the run, for this call."""
        return self.state.args if self.call_args is None else self.call_args


@dataclass(frozen=True)
class GenerateFnOutput:
    """The result of a generate function in the form of Miles."""

    samples: Sample | list[Sample]


async def generated(function: Function, args: Any, sample: Sample, params: dict[str, Any], evaluation: bool) -> Any:
    """Call a generate function in the form of slime or Miles, and return what it made of the sample."""
    if takes_input(function):
        names = importlib.import_module("furlong.slime_api.generation")  # above this layer
        output = await function(GenerateFnInput(names.GenerateState(args), sample, params, evaluation, args))
        return output.samples if isinstance(output, GenerateFnOutput) else output
    extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    return await function(args, sample, params, **extra)


class GenerateFunctionError(Exception):
    """Wraps an exception raised by user code, to tell it from errors of the engine."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(message_of(cause))
        self.cause = cause


async def call_generate_function(
    function: Function, sample: Sample, params: SamplingParams, policy: Policy, *, args: Any, evaluation: bool
) -> list[Sample]:
    """Call a generate function, which gets `policy` from `policy()`, and return the samples that it made of `sample`.

    `args` may be changed by the function, for this call only. Raises GenerateFunctionError for an exception in the
    function, RolloutError for a result of another type.
    """
    sampling_params = dict_from_params(params)
    args = args.for_call() if isinstance(args, Args) else args
    is_own = getattr(function, "__module__", "").startswith(
        "furlong."
    )  # those of environments and agents, which do not post
    if params.sampling_seed is not None and not is_own:
        _by_seed[params.sampling_seed] = policy
    token = current.set(policy)
    try:
        result = await policy.load.timed(lambda: generated(function, args, sample, sampling_params, evaluation))
    except BaseException as error:
        if not is_raised_by_user(error):
            raise
        raise GenerateFunctionError(error) from error
    finally:
        current.reset(token)
        if params.sampling_seed is not None and _by_seed.get(params.sampling_seed) is policy:
            del _by_seed[params.sampling_seed]
    produced: list[Any] = list(result) if isinstance(result, list | tuple) else [result]
    if not produced or not all(isinstance(each, Sample) for each in produced):
        wrong = next((type(each) for each in produced if not isinstance(each, Sample)), type(result))
        name = type(result).__name__ if wrong.__name__ != "Sample" else f"a {wrong.__module__}.Sample"
        raise RolloutError(
            f"--custom-generate-function-path returned {name} for sample {sample.index}; "
            "it must return a Sample of furlong or a non-empty list of them"
        )
    return produced


def session_samples(produced: list[Sample], policy: Policy, leaves: Leaves) -> list[Sample]:
    """Return the samples of the function's conversations if it returned a sample without a response.

    Raises GenerateFunctionError if the conversations are not what would be trained.
    """
    session = policy.conversation
    if session is None or not session.tree.nodes or len(produced) != 1 or produced[0].response_length:
        return produced
    if produced[0].status in (Status.ABORTED, Status.FAILED):
        return produced
    try:
        samples = samples_from_session(session, produced[0], leaves=leaves)
    except RolloutError as error:
        raise GenerateFunctionError(error) from error
    if LIMIT in produced[0].metadata:  # of an environment
        for sample in samples:
            sample.status = Status.TRUNCATED if sample.status is Status.COMPLETED else sample.status
    return samples


def check_produced(
    produced: Sample, origin: Sample, policy: Policy, *, vocab_size: int | None, max_tokens: int | None
) -> None:
    """Check a sample of a generate function once, and set its identity, weight versions and routes.

    Untrained tokens beyond `max_tokens` are cut; such a sample, and one whose context was full, becomes TRUNCATED.
    Raises GenerateFunctionError, which fails the sample, for more than `max_tokens`, and if it trains other tokens than
    the engine sampled, or in another context; RolloutError like `check_sample`.
    """
    copy_identity(produced, origin)
    if len(produced.token_versions) != produced.response_length:  # functions that cut a sample may not know this field
        produced.token_versions = []
    check_sample(produced, "custom generate function", vocab_size)
    if max_tokens is not None:
        _cut_untrained(produced, max_tokens)
    if policy.full and produced.status is Status.COMPLETED and len(produced.tokens) >= min(policy.full):
        produced.status = Status.TRUNCATED
    if max_tokens is not None and (count := len(produced.tokens)) > max_tokens:
        raise GenerateFunctionError(
            RolloutError(
                f"the function returned a sample of {count} tokens (prompt {produced.prompt_length}, response "
                f"{produced.response_length}), but the model's context has {max_tokens}: end its last turn earlier, "
                "truncate tool output, or raise --rollout-max-context-len if the model supports it"
            )
        )
    _record_versions(produced, policy)
    for ids, done in policy.answered:  # whose prompt and tokens are a prefix of the sample
        tokens = [*ids, *done.tokens]
        if done.routed_experts is not None and produced.tokens[: len(tokens)] == tokens:
            produced.rollout_routed_experts = extend_routes(produced.rollout_routed_experts, done.routed_experts)
    if not policy.answered or produced.status in (Status.ABORTED, Status.FAILED):
        return
    unsampled = produced.effective_response_length - sum(len(done.tokens) for _, done in policy.answered)
    if unsampled > 0:  # the origin of tokens not sampled through policy() is unknown
        produced.metadata[UNSAMPLED] = unsampled
    elif problem := foreign_tokens(produced, policy.answered):
        origin.metadata[OTHER_CONTEXT] = produced.metadata[OTHER_CONTEXT] = True
        raise GenerateFunctionError(RolloutError(problem))


def foreign_tokens(sample: Sample, answered: list[tuple[list[int], Completion]]) -> str:
    """Describe the first trained tokens that are not those of the engine, or had other tokens before them; "" if none.

    A run of trained tokens is read as completions one after another, each of which answered a request with the tokens
    before it. The last one may be cut, and the first one may have begun in tokens that are not trained.
    """
    start, tokens = sample.prompt_length, sample.tokens
    at = start
    for is_trained, run in itertools.groupby(_mask(sample)):
        end = at + len(list(run))
        while is_trained and at < end:
            rests = [
                done.tokens[at - len(ids) :]
                for ids, done in answered
                if len(ids) <= at < len(ids) + len(done.tokens) and [*ids, *done.tokens[: at - len(ids)]] == tokens[:at]
            ]
            same = [len(rest) for rest in rests if tokens[at : min(at + len(rest), end)] == list(rest[: end - at])]
            if same:
                at = min(at + max(same), end)
                continue
            fitting = [
                (ids, done.tokens)
                for ids, done in answered
                if done.tokens and tokens[at : at + min(len(done.tokens), end - at)] == list(done.tokens[: end - at])
            ]
            if not fitting:
                return (
                    f"the function trains response tokens from {at - start} on which the engine did not sample: append "
                    "the tokens of its completion, not its text encoded again, and others with trainable=False"
                )
            asked, sampled = max(fitting, key=lambda each: len(each[1]))
            stop = min(at + len(sampled), end)
            common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(asked, tokens[:at])))  # noqa: B905
            return (
                "the function asked the engine with another context than it trains on: response tokens "
                f"{at - start} to {stop - start} were sampled after {len(asked)} tokens and are trained after {at} "
                f"(the first {common} are equal); return one sample per context, or ask with sample.tokens"
            )
        at = end
    return ""


def _mask(sample: Sample) -> list[int]:
    return [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask


def _record_versions(sample: Sample, policy: Policy) -> None:
    """Set the weight versions of trained tokens that the function left out, from the completions that have them."""
    if any(version != UNKNOWN_VERSION for version in sample.token_versions) or not policy.answered:
        return
    response = sample.tokens[sample.prompt_length :]
    recorded = [(list(done.tokens), list(done.versions)) for _, done in policy.answered]
    chain = itertools.chain.from_iterable
    recorded.append((list(chain(each[0] for each in recorded)), list(chain(each[1] for each in recorded))))
    versions: list[int] = []
    for is_trained, run in itertools.groupby(_mask(sample)):
        start, size = len(versions), len(list(run))
        tokens = response[start : start + size]
        same = next((known for sampled, known in recorded if is_trained and sampled[:size] == tokens), None)
        versions += [UNKNOWN_VERSION] * size if same is None else same[:size]
    sample.token_versions = versions
    if not sample.weight_versions:
        sample.weight_versions = [str(max(versions))] if any(v != UNKNOWN_VERSION for v in versions) else []


def _cut_untrained(sample: Sample, max_tokens: int) -> None:
    """Cut the tokens of the environment beyond `max_tokens`; a sample with trained ones there stays unchanged.

    The text `response` stays whole.
    """
    surplus = len(sample.tokens) - max_tokens
    mask = sample.loss_mask
    if surplus <= 0 or surplus >= sample.response_length or not mask or any(mask[-surplus:]):
        return
    for name in ("tokens", *PER_TOKEN):
        if (column := getattr(sample, name)) is not None:
            setattr(sample, name, column[:-surplus])
    sample.response_length -= surplus
    if sample.rollout_routed_experts is not None:
        sample.rollout_routed_experts = sample.rollout_routed_experts[: max_tokens - 1]
    sample.status = Status.TRUNCATED


def copy_identity(produced: Sample, origin: Sample) -> None:
    """Fill in missing ids and label of a sample built by user code from its origin."""
    for name in ("group_index", "index", "rollout_id", "label"):
        if getattr(produced, name) is None:
            setattr(produced, name, getattr(origin, name))


def check_sample(sample: Sample, source: str, vocab_size: int | None) -> None:
    """Check tokens and per-token lists of a sample from user code; a PENDING one becomes COMPLETED.

    `source` names the function in messages. Tokens must be below `vocab_size` if it is known. Raises RolloutError.
    """
    n, tokens, where = sample.response_length, sample.tokens, f"{source}: sample {sample.index} has"
    try:
        sample.status = Status(sample.status)
    except ValueError:
        raise RolloutError(f"{where} status {sample.status!r}; use one of {', '.join(Status)}") from None
    if sample.status is Status.PENDING and not n:
        raise RolloutError(
            f"{source}: sample {sample.index} came back without a response; add one with "
            "Sample.append_response_tokens, or set its status to ABORTED or FAILED"
        )
    if sample.status is Status.PENDING:
        sample.status = Status.COMPLETED
    if len(tokens) <= n:
        raise RolloutError(f"{where} {len(tokens)} tokens and response_length {n}; `tokens` must be prompt + response")
    for name in PER_TOKEN:
        column = getattr(sample, name)
        if column is not None and len(column) not in (0, n):
            raise RolloutError(
                f"{where} response_length {n} but {name} has {len(column)} entries; use "
                "Sample.append_response_tokens, which keeps them consistent"
            )
    log_probs = [] if sample.rollout_log_probs is None else sample.rollout_log_probs
    if not all(issubclass(kind, Real) for kind in set(map(type, log_probs))) or not all(map(math.isfinite, log_probs)):
        raise RolloutError(
            f"{where} rollout_log_probs that are not finite numbers; "
            "set them to None if they are unknown, and to 0.0 for tokens that the policy did not generate"
        )
    if len(log_probs) and max(log_probs) > MAX_LOG_PROB:
        raise RolloutError(
            f"{where} a log-prob of {max(log_probs):g} in rollout_log_probs; log-probs are "
            "at most 0: pass the natural logarithm of each token's probability"
        )
    if wrong := [kind.__name__ for kind in set(map(type, tokens)) if not issubclass(kind, Integral)]:
        raise RolloutError(
            f"{where} {', '.join(wrong)} among its tokens; give token ids, for example from policy().encode in a "
            "generate function"
        )
    if vocab_size is not None and (min(tokens) < 0 or max(tokens) >= vocab_size):
        raise RolloutError(
            f"{where} token ids from {min(tokens)} to {max(tokens)}, but the model has ids 0 to {vocab_size - 1}; "
            "encode text with its tokenizer"
        )
