"""Generate and reward functions as users of slime write them: its imports, its names and its order of calls."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import queue
import threading
from dataclasses import dataclass, field

import aiohttp
import httpx
import torch
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput
from miles.rollout.generate_hub.single_turn import generate as generate_single_turn
from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread
from slime.agent.harness import BaseHarness, HarnessContext
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import call_dynamic_filter
from slime.rollout.rm_hub import batched_async_rm
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import encode_image_for_rollout_engine, load_tokenizer
from slime.utils.types import Sample

from furlong.errors import RolloutError

TURNS = 2
OBSERVATION = " 42 "


def router(args):
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"


def ids_of(state, text):
    return state.tokenizer(text, add_special_tokens=False)["input_ids"]


async def generate_with_search(args, sample: Sample, sampling_params) -> Sample:
    """Call a search server between the turns, and set every field at the end."""
    assert not args.partial_rollout
    state = GenerateState(args)
    prompt_ids = ids_of(state, sample.prompt)
    sample.tokens, sample.loss_mask = list(prompt_ids), []
    sample.rollout_top_p_token_ids = None
    text, tokens, mask, log_probs = "", [], [], []
    params = {**sampling_params, "max_new_tokens": 3, "stop": [*(sampling_params.get("stop") or []), "</search>"]}
    for turn in range(TURNS):
        body = {"input_ids": prompt_ids + tokens, "sampling_params": params, "return_logprob": True}
        output = await post(router(args), body)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new = [item[1] for item in meta["output_token_logprobs"]]
        values = [item[0] for item in meta["output_token_logprobs"]]
        sample.append_response_tokens(args, tokens=new, log_probs=values, trainable=True, meta_info=meta)
        text, tokens, mask, log_probs = text + output["text"], tokens + new, mask + [1] * len(new), log_probs + values
        if turn == TURNS - 1:
            break
        async with httpx.AsyncClient(trust_env=False) as client:
            found = (await client.post(os.environ["SEARCH_URL"], json={"queries": [output["text"]]})).json()
        observed = ids_of(state, found["result"])
        sample.append_response_tokens(args, tokens=observed, trainable=False)
        text, tokens = text + found["result"], tokens + observed
        mask, log_probs = mask + [0] * len(observed), log_probs + [0.0] * len(observed)
    sample.tokens, sample.response_length, sample.response = prompt_ids + tokens, len(tokens), text
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    match meta["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_of_search(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    return float(OBSERVATION in sample.prompt + sample.response) + 0.1 * (len(sample.response) % 3)


async def run_code(code):
    process = await asyncio.create_subprocess_exec(
        "python3", "-c", f"print({code})", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    return (await process.communicate())[0].decode().strip()


async def generate_with_code(args, sample: Sample, sampling_params) -> Sample:
    """Ask with token ids, run code between the turns, and count the calls on the sample."""
    sample.rollout_log_probs, sample.response, sample.response_length, sample.loss_mask = None, "", 0, []
    state = GenerateState(args)
    prompt_ids = ids_of(state, sample.prompt)
    sample.tokens = list(prompt_ids)
    masks, calls, tokens, limit = sample.loss_mask, 0, [], args.rollout_max_context_len or args.max_tokens_per_gpu
    for turn in range(TURNS):
        params = sampling_params | {"max_new_tokens": min(3, limit - len(sample.tokens))}
        body = {"input_ids": prompt_ids + tokens, "sampling_params": params, "return_logprob": True}
        meta = (await post(router(args), body))["meta_info"]
        new = [item[1] for item in meta["output_token_logprobs"]]
        values = [item[0] for item in meta["output_token_logprobs"]]
        tokens += new
        sample.append_response_tokens(args, tokens=new, log_probs=values, trainable=True, meta_info=meta)
        if turn == 0:
            observed = ids_of(state, await run_code("6*7"))
            tokens += observed
            calls += 1
            sample.append_response_tokens(args, tokens=observed, trainable=False)
    sample.tokens, sample.response_length = prompt_ids + tokens, len(tokens)
    sample.response, sample.loss_mask = state.tokenizer.decode(tokens), masks
    sample.tool_call_count = calls
    sample.status = Sample.Status.COMPLETED
    return sample


async def reward_of_code(args, sample, **kwargs):
    """Needs the count that the generate function has left on the sample."""
    result = compute_score(sample.prompt + sample.response, sample.label or "", strict_box_verify=True)
    sample.metadata["calls"] = sample.tool_call_count
    result["score"] += sample.tool_call_count + 0.1 * (len(sample.response) % 3)
    result["pred"] = result["pred"] or ""
    return result["score"]


async def solve(args, prompt, key):
    sample = copy.deepcopy(args.sample)
    sample.prompt, sample.tokens = prompt, args.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    params = copy.deepcopy(args.sampling_params)
    params["max_new_tokens"] = min(4, args.rollout_max_context_len - len(sample.tokens))
    output = await post(router(args), {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True})
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in pairs],
        log_probs=[item[0] for item in pairs],
        trainable=True,
        meta_info=output["meta_info"],
    )
    sample.response = sample.response_content = output["text"]
    args.results[key].append(sample)
    return output["text"]


async def run_agents(args, sample):
    args = copy.deepcopy(args)
    args.sample, args.results = sample, {"solver": [], "rewriter": []}
    answers = await asyncio.gather(*(solve(args, sample.prompt, "solver") for _ in range(args.num_parallel)))
    await asyncio.gather(*(solve(args, f"{sample.prompt}{answer}", "rewriter") for answer in answers))
    samples = args.results["solver"] + args.results["rewriter"]
    for each, reward in zip(samples, await batched_async_rm(args, samples), strict=False):
        each.reward, each.rollout_id = reward * args.weight, sample.index
    return samples


async def generate_with_agents(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    """Fan out into solvers that run at the same time and rewriters, with everything passed on in `args`."""
    limit = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    args.sampling_params, args.rollout_max_context_len, args.tokenizer = (
        sampling_params,
        limit,
        GenerateState(args).tokenizer,
    )
    args.num_parallel, args.weight, args.function = 3, 0.5, f"{__file__}:run_agents"
    return await load_function(args.function)(args, sample)


@dataclass
class Interaction:
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    info: dict[str, int] = field(default_factory=dict)


async def generate_with_user(args, sample: Sample, sampling_params: dict) -> Sample:
    """Talk to a simulated user and build a new sample, without log-probs and with a status as text."""
    state, task = GenerateState(args), len(sample.prompt)
    text, result = sample.prompt, Interaction()
    prompt_ids = ids_of(state, text)
    for _ in range(TURNS):
        params = sampling_params | {"max_new_tokens": 3}
        body = {"input_ids": prompt_ids + result.tokens, "sampling_params": params, "return_logprob": True}
        output = await post(router(args), body)
        answer = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        user = ids_of(state, OBSERVATION)
        text += output["text"] + OBSERVATION
        result.tokens += answer + user
        result.loss_mask += [1] * len(answer) + [0] * len(user)
        result.info["steps"] = result.info.get("steps", 0) + 1
    built = Sample(
        index=task,
        prompt=sample.prompt,
        tokens=prompt_ids + result.tokens,
        response=text[len(sample.prompt) :],
        reward=len(text) % 2,
        loss_mask=result.loss_mask,
        status="completed",
        metadata=result.info,
    )
    built.response_length = len(result.loss_mask)
    return built


async def generate_with_client(args, sample: Sample, sampling_params) -> Sample:
    """Ask through an HTTP client of another package, which returns tokens and log-probs only."""
    state = GenerateState(args)
    tokens = ids_of(state, sample.prompt)
    start, mask, log_probs = len(tokens), [], []
    async with httpx.AsyncClient(base_url=router(args).removesuffix("/generate"), trust_env=False) as client:
        for turn in range(TURNS):
            params = {"max_new_tokens": 3, "sampling_seed": sampling_params["sampling_seed"], "temperature": 1.0}
            body = {"input_ids": tokens, "sampling_params": params, "return_logprob": True, "stream": False}
            reply = (await client.post("/generate", json=body)).raise_for_status().json()
            pairs = reply["meta_info"]["output_token_logprobs"]
            tokens, mask = tokens + [pair[1] for pair in pairs], mask + [1] * len(pairs)
            log_probs += [pair[0] for pair in pairs]
            if turn == 0:
                observed = ids_of(state, OBSERVATION)
                tokens, mask, log_probs = (
                    tokens + observed,
                    mask + [0] * len(observed),
                    log_probs + [0.0] * len(observed),
                )
    sample.tokens, sample.loss_mask, sample.rollout_log_probs = tokens, mask, log_probs
    sample.response_length = len(tokens) - start
    sample.response = state.tokenizer.decode(tokens[start:], skip_special_tokens=False)
    sample.status = Sample.Status.COMPLETED
    return sample


async def roll(args, groups):
    state = GenerateState(args)
    return await asyncio.gather(
        *(generate_and_rm_group(args, group, state.sampling_params.copy(), evaluation=False) for group in groups)
    )


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    """A whole rollout: one group more than needed, of which the last is returned."""
    if evaluation:
        return {"held_out": {"rewards": [1.0, 0.0], "truncated": [False, False]}}
    assert args.rollout_global_dataset
    args.calls_of_mine = getattr(args, "calls_of_mine", 0) + 1
    groups = data_buffer.get_samples(args.rollout_batch_size + 1)
    data_buffer.add_samples([groups.pop()])
    done = run(roll(args, groups))
    kept = [group for group in done if call_dynamic_filter(None, args, group).keep]
    return RolloutFnTrainOutput(samples=kept, metrics={"rollout/mine": args.calls_of_mine, "source": "zoo"})


async def generate_in_halves(input: GenerateFnInput) -> GenerateFnOutput:
    """In the form of Miles: split a response into two samples of one rollout."""
    whole = (await generate_single_turn(input)).samples
    assert input.args.n_samples_per_prompt == 4
    whole.rollout_id, cut = whole.index, whole.response_length // 2
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    first.tokens = whole.tokens[: len(whole.tokens) - whole.response_length + cut]
    first.response_length, first.loss_mask = cut, whole.loss_mask[:cut]
    first.rollout_log_probs = whole.rollout_log_probs[:cut]
    second.loss_mask = [0] * cut + whole.loss_mask[cut:]
    return GenerateFnOutput(samples=[first, second])


class Worker:
    """A thread that generates groups all the time; a rollout takes the complete ones, and the others wait."""

    def __init__(self, args, data_buffer):
        self.args, self.data_buffer, self.done = args, data_buffer, queue.Queue()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        with contextlib.suppress(RolloutError):  # the run has ended, and its engine with it
            asyncio.run(self.work())

    async def work(self):
        running = set()
        while True:
            while len(running) + self.done.qsize() < 3 * self.args.rollout_batch_size:
                groups = self.data_buffer.get_samples(1)
                if not groups and not running:
                    return
                running |= {asyncio.create_task(roll(self.args, [group])) for group in groups}
            await asyncio.sleep(0.01)
            finished = {task for task in running if task.done()}
            running -= finished
            for task in finished:
                self.done.put(task.result()[0])


WORKERS = {}


def generate_rollout_between_calls(args, rollout_id, data_buffer, evaluation=False):
    """Take groups of a worker thread, most of which began in earlier calls."""
    worker = WORKERS.setdefault(id(data_buffer), None) or Worker(args, data_buffer)
    WORKERS[id(data_buffer)] = worker
    return [worker.done.get(timeout=60) for _ in range(args.rollout_batch_size)]


def generate_rollout_from_records(args, rollout_id, data_buffer, evaluation=False):
    """Add samples that another service made to the buffer, one group more than needed, and take those of the buffer."""
    metadata = data_buffer.get_metadata()
    assert metadata == {str(i): [i] for i in range(rollout_id)}
    made = [
        [
            Sample(index=number, prompt="p", tokens=[3, 4, 5 + k], response_length=1, reward=k % 2, status="completed")
            for k in range(args.n_samples_per_prompt)
        ]
        for number in range(args.rollout_batch_size + (rollout_id == 0) - data_buffer.get_buffer_length())
    ]
    data_buffer.add_samples(made)
    data_buffer.update_metadata({str(rollout_id): [rollout_id]})
    groups = data_buffer.get_samples(args.rollout_batch_size)
    assert data_buffer.get_buffer_length() == int(rollout_id == 0)
    return groups


class CodingService(metaclass=SingletonMeta):
    """The adapters of a process: one for agents of Anthropic's API, one for those of OpenAI's."""

    def __init__(self, args):
        load_tokenizer(args.hf_checkpoint)
        url = router(args)
        self.adapters = [kind(tokenizer=None, sglang_url=url) for kind in (AnthropicAdapter, OpenAIAdapter)]
        self.handles = [
            run_app_in_thread(
                adapter.app,
                host="127.0.0.1",
                port=0,
                thread_name="adapter",
                runner_kwargs={"access_log_class": FilteredAccessLogger},
            )
            for adapter in self.adapters
        ]


class HttpHarness(BaseHarness):
    """An agent that asks twice over HTTP, as its CLI would from a sandbox."""

    name = "http"

    async def install_cli(self, sb):
        pass

    async def write_config(self, sb, ctx):
        pass

    async def launch_and_wait(self, sb, ctx, prompt, time_budget_sec):
        path, answer = ("messages", "content") if sb == "anthropic" else ("chat/completions", "choices")
        messages = [{"role": "user", "content": prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {ctx.session_id}"}, trust_env=False) as client:
            for _ in range(TURNS):
                body = {"model": ctx.model_label, "max_tokens": 3, "messages": messages}
                reply = (await client.post(f"{ctx.adapter_url}/v1/{path}", json=body)).raise_for_status().json()
                said = reply[answer] if answer == "content" else reply[answer][0]["message"]["content"]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": OBSERVATION}]
        return 0


async def generate_with_coding_agent(args, sample, sampling_params, evaluation=False):
    """Open a session, let a harness run its agent, and fan the session out; samples alternate between the APIs."""
    service = CodingService(args)
    which = sample.index % 2
    adapter, url = service.adapters[which], f"http://127.0.0.1:{service.handles[which].port}"
    sid = sample.session_id = f"agent-{sample.index}-{sample.group_index}"
    adapter.open_session(sid, sampling_defaults=sampling_params, max_context_tokens=args.rollout_max_context_len)
    try:
        context = HarnessContext("/work", sid, url)
        sandbox = ("anthropic", "openai")[which]
        code = await HttpHarness().launch_and_wait(sandbox, context, sample.prompt, 30)
        reward = float(sample.index % 3)
        samples = await adapter.finish_session(
            sid, base_sample=sample, reward=reward, extra_metadata={"exit_code": code}
        )
        assert await adapter.finish_session(sid, base_sample=sample) == []
        return samples
    finally:
        await adapter.drop_session(sid, wait_timeout=30)


async def ask_teacher(args, sample, **kwargs):
    """The reward that slime gives to on-policy distillation: a teacher's reply to the whole sample."""
    request = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": args.rollout_temperature, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if sample.multimodal_inputs and sample.multimodal_inputs.get("images"):
        request["image_data"] = [encode_image_for_rollout_engine(each) for each in sample.multimodal_inputs["images"]]
    async with aiohttp.ClientSession() as session, session.post(args.rm_url, json=request) as reply:
        reply.raise_for_status()
        return await reply.json()


def keep_teacher(args, samples, **kwargs):
    """Keep the log-probs of responses as tensors, and train on rewards of 0."""
    replies = [sample.get_reward_value(args) for sample in samples]
    for sample, reply in zip(samples, replies, strict=True):
        scored = torch.tensor([row[0] for row in reply["meta_info"]["input_token_logprobs"][1:]], dtype=torch.float32)
        sample.teacher_log_probs = scored[-sample.response_length :]
    return [0.0] * len(samples), [0.0] * len(samples)
