"""Custom generate functions: the policy that they call, and the checks of the samples that they return.

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

import functools
import inspect
import itertools
import math
from numbers import Integral, Real
from typing import Any

from furlong.config.args_view import Args
from furlong.config.hooks import HOOKS, check_signature
from furlong.core.routing import extend_routes
from furlong.core.sample import UNKNOWN_VERSION, Sample, Status
from furlong.core.user_code import is_raised_by_user, message_of
from furlong.core.user_functions import Function, load_function
from furlong.errors import ConfigError, RolloutError
from furlong.interfaces import Completion, Engine, SamplingParams
from furlong.rollout.asked_context import ContextDifference, context_differences
from furlong.rollout.blocking_timer import BlockingTimer
from furlong.rollout.current_policy import current
from furlong.rollout.current_policy import policy as policy  # user code may import it from here
from furlong.rollout.policy import Policy, dict_from_params
from furlong.rollout.sample_metrics import OTHER_CONTEXT, RETOKENISED, UNSAMPLED

MAX_LOG_PROB = 1e-2  # above 0, for rounding in engines
MAX_ID, MAX_VERSION = 2**63 - 1, 2**31 - 1  # of the integers that a batch stores

_by_seed: dict[int, Policy] = {}  # policies of the generate functions that run now, by the seed of their sample


async def complete_request(engine: Engine, ids: list[int], params: SamplingParams) -> Completion:
    """Complete a request that user code sent over HTTP.

    `sampling_params` of a generate function contain the sample's seed, so its requests are recorded like calls of
    `policy().generate`, and calls differ although they send one seed.
    """
    policy = None if params.sampling_seed is None else _by_seed.get(params.sampling_seed)
    return await engine.generate(ids, params) if policy is None else await policy.complete(ids, params)


@functools.cache
def load_generate_function(path: str) -> Function:
    """Load the generate function named by a sample. Raises ConfigError if it is missing or has a wrong signature."""
    function = load_function(path)
    if problem := check_signature(HOOKS["custom_generate_function"], function):
        raise ConfigError(f"Sample.generate_function_path {path!r} cannot be called. {problem}")
    return function


class GenerateFunctionError(Exception):
    """Wraps an exception raised by user code, to tell it from errors of the engine."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(message_of(cause))
        self.cause = cause


async def call_generate_function(
    function: Function,
    sample: Sample,
    params: SamplingParams,
    policy: Policy,
    *,
    args: Any,
    evaluation: bool,
    timer: BlockingTimer,
) -> list[Sample]:
    """Call a generate function, which gets `policy` from `policy()`, and return the samples that it made of `sample`.

    `args` may be changed by the function, for this call only. Raises GenerateFunctionError for an exception in the
    function, RolloutError for a result of another type.
    """
    sampling_params = dict_from_params(params)
    args = args.for_call() if isinstance(args, Args) else args
    if params.sampling_seed is not None:
        _by_seed[params.sampling_seed] = policy
    extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    token = current.set(policy)
    try:
        result = await timer.timed(lambda: function(args, sample, sampling_params, **extra))
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


def check_produced(
    produced: Sample,
    origin: Sample,
    policy: Policy,
    *,
    group_index: int | None,
    vocab_size: int | None,
    max_tokens: int | None,
) -> list[ContextDifference]:
    """Check a sample of a generate function, and set its identity, its routes, and the positions of unsampled tokens.

    `group_index` is that of the prompt group, as `origin` may be the same object as `produced`. Untrained tokens beyond
    `max_tokens` are cut; such a sample, and one whose context was full, becomes TRUNCATED. Returns the parts that were
    sampled in another context than they are trained in, which it also sets.
    Raises GenerateFunctionError for a sample of more than `max_tokens`, and RolloutError like `check_sample`.
    """
    copy_identity(produced, origin)
    check_sample(produced, "custom generate function", vocab_size)
    check_group(produced, group_index, "the custom generate function")
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
    for tokens, routes in policy.routed:  # completions whose prompt and tokens are a prefix of the sample
        if produced.tokens[: len(tokens)] == tokens:
            produced.rollout_routed_experts = extend_routes(produced.rollout_routed_experts, routes)
    unsampled = produced.effective_response_length - sum(map(len, policy.sampled))
    if policy.sampled and unsampled > 0:  # the origin of tokens not sampled through policy() is unknown
        produced.metadata[UNSAMPLED] = unsampled
    elif (position := _first_unsampled(produced, policy.sampled)) is not None:
        produced.metadata[RETOKENISED] = position
    elif differences := context_differences(produced, policy.asked, policy.sampled):
        produced.metadata[OTHER_CONTEXT] = [[each.start, each.stop] for each in differences]
        return differences
    return []


def _record_versions(sample: Sample, policy: Policy) -> None:
    """Set the weight versions of trained tokens that the function left out, from the completions that have them."""
    if any(version != UNKNOWN_VERSION for version in sample.token_versions) or not policy.sampled:
        return
    response = sample.tokens[sample.prompt_length :]
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(response)
    recorded = [*zip(policy.sampled, policy.versions, strict=True)]
    recorded.append((list(itertools.chain(*policy.sampled)), list(itertools.chain(*policy.versions))))
    versions: list[int] = []
    for is_trained, run in itertools.groupby(mask):
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
    for name in ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs", "token_versions"):
        if column := getattr(sample, name):
            setattr(sample, name, list(column[:-surplus]))
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
    fields: dict[str, Any] = vars(sample)  # user code may have put anything into them
    n = sample.response_length
    if not _is_integer(n) or not isinstance(fields["tokens"], list):
        raise RolloutError(
            f"{source}: sample {sample.index} has response_length {n!r} and tokens of type "
            f"{type(sample.tokens).__name__}; use Sample.append_response_tokens, which keeps a number and a list"
        )
    if not isinstance(fields["status"], Status):
        sample.status = _status_from(fields["status"], sample, source)
    if sample.status is Status.PENDING and not n:
        raise RolloutError(
            f"{source}: sample {sample.index} came back without a response; add one with "
            "Sample.append_response_tokens, or set its status to ABORTED or FAILED"
        )
    if sample.status is Status.PENDING:
        sample.status = Status.COMPLETED
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "token_versions"):
        column = getattr(sample, name)
        if column is not None and len(column) not in (0, n):
            raise RolloutError(
                f"{source}: sample {sample.index} has response_length {n} but {name} has {len(column)} entries; use "
                "Sample.append_response_tokens, which keeps them consistent"
            )
    log_probs = [] if sample.rollout_log_probs is None else sample.rollout_log_probs
    if not all(issubclass(kind, Real) for kind in set(map(type, log_probs))) or not all(map(math.isfinite, log_probs)):
        raise RolloutError(
            f"{source}: sample {sample.index} has rollout_log_probs that are not finite numbers; "
            "set them to None if they are unknown, and to 0.0 for tokens that the policy did not generate"
        )
    if len(log_probs) and max(log_probs) > MAX_LOG_PROB:
        raise RolloutError(
            f"{source}: sample {sample.index} has a log-prob of {max(log_probs):g} in rollout_log_probs; log-probs are "
            "at most 0: pass the natural logarithm of each token's probability"
        )
    check_fields(sample, source)
    _check_versions(sample, source)
    if len(sample.tokens) <= n:
        raise RolloutError(
            f"{source}: sample {sample.index} has {len(sample.tokens)} tokens and response_length {n}; "
            "`tokens` must contain prompt + response"
        )
    _check_token_ids(sample, source, vocab_size)


def check_fields(sample: Sample, source: str) -> None:
    """Raise RolloutError for metadata that is not a dict, and for ids that are not integers."""
    values = vars(sample)
    for name in ("metadata", "train_metadata"):
        value = values[name]
        if not isinstance(value, dict) and (name == "metadata" or value is not None):
            raise RolloutError(
                f"{source}: sample {sample.index} has {name} of type {type(value).__name__}; set it to a dict"
            )
    for name in ("index", "group_index", "rollout_id"):
        value = values[name]
        if value is not None and not (_is_integer(value) and abs(value) <= MAX_ID):
            raise RolloutError(
                f"{source}: a sample has {name} {str(value)[:40]!r}; keep the number set by the data source"
            )


def _check_versions(sample: Sample, source: str) -> None:
    """Raise RolloutError for weight versions that are not integers, or out of range."""
    recorded: Any = vars(sample)["token_versions"]
    versions: Any = [] if recorded is None else recorded
    kinds = set(map(type, versions))
    if not all(issubclass(kind, Integral) for kind in kinds):
        wrong = f"values of type {', '.join(sorted(kind.__name__ for kind in kinds))}"
    elif len(versions) and not (min(versions) >= UNKNOWN_VERSION and max(versions) <= MAX_VERSION):
        wrong = f"values from {str(min(versions))[:40]} to {str(max(versions))[:40]}"
    else:
        return
    raise RolloutError(
        f"{source}: sample {sample.index} has {wrong} in token_versions; use Completion.versions, or "
        f"{UNKNOWN_VERSION} for tokens that the policy did not generate"
    )


def _status_from(value: Any, sample: Sample, source: str) -> Status:
    """Return the status that user code set as text. Raises RolloutError if there is no such status."""
    try:
        return Status(value)
    except ValueError:
        raise RolloutError(
            f"{source}: sample {sample.index} has status {value!r}; use one of {', '.join(Status)}"
        ) from None


def _is_integer(value: Any) -> bool:
    return type(value) is int or (issubclass(type(value), Integral) and type(value) is not bool)


def check_group(sample: Sample, group_index: int | None, source: str) -> None:
    """Raise RolloutError if user code moved a sample to another prompt group: its reward would be compared there."""
    if sample.group_index != group_index:
        raise RolloutError(
            f"{source} changed group_index of sample {sample.index} from {group_index} to {sample.group_index}; keep "
            "it: rewards are normalized within the group of a prompt"
        )


def _check_token_ids(sample: Sample, source: str, vocab_size: int | None) -> None:
    """Raise RolloutError for token ids outside the model's vocabulary, which no engine has checked."""
    if wrong := [kind.__name__ for kind in set(map(type, sample.tokens)) if not issubclass(kind, Integral)]:
        raise RolloutError(
            f"{source}: sample {sample.index} has {', '.join(wrong)} among its tokens; give token ids, for example "
            "from policy().encode in a generate function"
        )
    if vocab_size is not None and (min(sample.tokens) < 0 or max(sample.tokens) >= vocab_size):
        raise RolloutError(
            f"{source}: sample {sample.index} has token ids from {min(sample.tokens)} to {max(sample.tokens)}, but the "
            f"model has ids 0 to {vocab_size - 1}; encode text with its tokenizer"
        )


def _first_unsampled(sample: Sample, sampled: list[list[int]]) -> int | None:
    """Return the response position of the first trained token that the engine did not sample, None if there is none.

    Each run of trained tokens must be a prefix of one completion, or of all completions concatenated.
    """
    if not sampled:
        return None
    response = sample.tokens[sample.prompt_length :]
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(response)
    concatenated = [token for completion in sampled for token in completion]
    position = 0
    for is_trained, run in itertools.groupby(mask):
        size = len(list(run))
        tokens = response[position : position + size]
        if is_trained and not any(completion[:size] == tokens for completion in (*sampled, concatenated)):
            return position
        position += size
    return None
