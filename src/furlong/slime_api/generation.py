"""Generation for user functions: `slime.rollout.sglang_rollout`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from furlong.config.args_view import get_model_url as model_url
from furlong.core.addresses import host_and_port
from furlong.core.sample import Sample, Status
from furlong.core.user_functions import load_function
from furlong.errors import RolloutError
from furlong.models.tokenizer import load_tokenizer, read_template
from furlong.rollout.user_samples import GenerateFnInput, GenerateFnOutput, generated
from furlong.slime_api.http import get_rollout_num_engines, post
from furlong.slime_api.rewards import async_rm, batched_async_rm


class GenerateState:
    """Tokenizer, sampling parameters and limit of concurrent requests of a run; one object per model.

    The tokenizer is that of `--hf-checkpoint`, with the template of `--chat-template-path`. `processor` is None, as
    images are not supported.
    """

    _states: dict[tuple[str, str | None], GenerateState] = {}  # noqa: RUF012  shared on purpose

    args: Any
    tokenizer: Any
    processor: None
    num_requests: int
    sampling_params: dict[str, Any]
    aborted: bool

    def __new__(cls, args: Any) -> GenerateState:
        """Return the state of the run's model; it is created once."""
        key = (str(args.hf_checkpoint), args.chat_template_path)
        if key not in cls._states:
            cls._states[key] = state = super().__new__(cls)
            state._read(args)
        return cls._states[key]

    def _read(self, args: Any) -> None:
        self.args, self.processor, self.aborted = args, None, False
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        if args.chat_template_path is not None:
            self.tokenizer.chat_template = read_template(args.chat_template_path)
        self.num_requests = args.sglang_server_concurrency * get_rollout_num_engines(args)
        self._semaphores = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        self.sampling_params = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
        }

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """The limit of concurrent requests of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._semaphores:
            self._semaphores[loop] = asyncio.Semaphore(self.num_requests)
        return self._semaphores[loop]

    @contextlib.contextmanager
    def dp_rank_context(self) -> Generator[int]:
        """Yield 0: the run itself balances requests."""
        yield 0

    def reset(self) -> None:
        """Do nothing: the run itself ends its requests."""


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of `endpoint` of a model; with one model its name does not matter. Raises ConfigError."""
    if len(getattr(args, "sglang_model_routers", None) or {}) > 1:
        return model_url(args, model_name, endpoint)
    return f"http://{host_and_port(args.sglang_router_ip.strip('[]'), args.sglang_router_port)}{endpoint}"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate the response of a sample, or continue it, in one request. Raises RolloutError for a finished sample."""
    if sample.status not in (Status.PENDING, Status.ABORTED):
        raise RolloutError(f"sample {sample.index} has status {sample.status}; only pending and aborted ones continue")
    if not sample.tokens:
        sample.tokens = list(GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False))
    params = dict(sampling_params)
    params["max_new_tokens"] -= sample.response_length
    if params["max_new_tokens"] <= 0:
        sample.status = Status.TRUNCATED
        return sample
    if params.get("sampling_seed") is None and sample.seed is not None:
        params["sampling_seed"] = sample.seed
    body = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    output = await post(get_model_url(args, "actor"), body)
    meta = output["meta_info"]
    pairs = meta["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, *_ in pairs],
        log_probs=[log_prob for log_prob, *_ in pairs],
        text=output["text"],
        meta_info=meta,
        **({} if "token_versions" not in meta else {"version": meta["token_versions"]}),
    )
    return sample


async def generate_single_turn(input: GenerateFnInput) -> GenerateFnOutput:
    """Do the same as `generate`, in the form of Miles."""
    return GenerateFnOutput(await generate(input.args, input.sample, input.sampling_params))


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate a sample with the run's generate function, or in one request, and score it unless it was aborted."""
    if sample.status not in (Status.PENDING, Status.ABORTED):
        return sample
    path = sample.generate_function_path or args.custom_generate_function_path
    function = generate if path is None else load_function(path)
    async with GenerateState(args).semaphore:
        produced = await generated(function, args, sample, sampling_params, evaluation)
    samples: list[Sample] = list(produced) if isinstance(produced, list) else [produced]
    if not args.group_rm and all(each.status is not Status.ABORTED for each in samples):
        await _score(args, [each for each in samples if each.reward is None])
    return samples if isinstance(produced, list) else samples[0]


async def generate_and_rm_group(
    args: Any, group: Sequence[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample | list[Sample]]:
    """Generate and score the samples of a prompt concurrently; with `--group-rm` they are scored together."""
    produced = await asyncio.gather(
        *(generate_and_rm(args, sample, dict(sampling_params), evaluation) for sample in group)
    )
    flat = [each for item in produced for each in (item if isinstance(item, list) else [item])]
    if args.group_rm and all(each.status is not Status.ABORTED for each in flat):
        await _score(args, flat)
    return produced


async def _score(args: Any, samples: list[Sample]) -> None:
    if len(samples) == 1 and not args.group_rm:
        samples[0].reward = await async_rm(args, samples[0])
    elif samples:
        for sample, reward in zip(samples, await batched_async_rm(args, samples), strict=True):
            sample.reward = reward
