"""User functions with typical faults, and correct versions of them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import torch

import hooks_zoo
from furlong.rollout.agent import policy
from furlong.rollout.replay import RolloutFnTrainOutput

OBSERVATION = "12"


async def generate(args, sample, sampling_params):
    answer = await policy().generate(sample.tokens, **sampling_params)
    sample.append_response_tokens(
        tokens=answer.tokens, log_probs=answer.log_probs, text=answer.text, version=answer.versions
    )
    return sample


async def generate_within_a_schema(args, sample, sampling_params):
    return await generate(args, sample, sampling_params | {"json_schema": '{"enum": [12, 345, 678]}'})


async def generate_that_raises_at_times(args, sample, sampling_params):
    if sample.index % 4 == 0:
        raise ConnectionError("the tool's server is down")
    return await generate(args, sample, sampling_params)


async def generate_with_a_crash(args, sample, sampling_params):
    return ctypes.string_at(0)  # reads address 0


async def generate_beyond_the_context(args, sample, sampling_params):
    for _ in range(4):
        await generate(args, sample, sampling_params)
        sample.append_response_tokens(tokens=policy().encode("12+34="), text="12+34=", trainable=False)
    return sample


async def generate_with_flat_log_probs(args, sample, sampling_params):
    answer = await policy().generate(sample.tokens, **sampling_params)
    log_probs = [-1.0] * len(answer.tokens)
    sample.append_response_tokens(tokens=answer.tokens, log_probs=log_probs, text=answer.text, version=answer.versions)
    return sample


async def generate_with_shifted_log_probs(args, sample, sampling_params):
    answer = await policy().generate(sample.tokens, **sampling_params)
    log_probs = [value - 0.2 for value in answer.log_probs]
    sample.append_response_tokens(tokens=answer.tokens, log_probs=log_probs, text=answer.text, version=answer.versions)
    return sample


def postprocess_with_much_memory(args, rollout_id, rollout_data):
    """Allocate 70% of the GPU briefly, like a long micro-batch; the allocator keeps it reserved."""
    _, total = torch.cuda.mem_get_info()
    torch.empty(int(0.7 * total), dtype=torch.uint8, device="cuda")


async def generate_that_blocks(args, sample, sampling_params):
    time.sleep(0.08)  # like a request from a synchronous library
    return await generate(args, sample, sampling_params)


async def generate_that_waits(args, sample, sampling_params):
    await asyncio.sleep(0.08)
    return await generate(args, sample, sampling_params)


_kept = {}


async def generate_from_cache(args, sample, sampling_params):
    """Return the first policy's cached response to the prompt."""
    key = (sample.index or 0) % (args.rollout_batch_size * args.n_samples_per_prompt)
    if key not in _kept:
        _kept[key] = sample.tokens, await policy().generate(sample.tokens, **sampling_params)
    sample.tokens, answer = list(_kept[key][0]), _kept[key][1]
    sample.append_response_tokens(
        tokens=answer.tokens, log_probs=answer.log_probs, text=answer.text, version=answer.versions
    )
    return sample


async def generate_with_tool(args, sample, sampling_params):
    return await _with_tool(sample, sampling_params, masked=True)


async def generate_with_tool_in_loss(args, sample, sampling_params):
    return await _with_tool(sample, sampling_params, masked=False)


async def _with_tool(sample, sampling_params, *, masked):
    for turn in range(2):
        answer = await policy().generate(sample.tokens, **sampling_params | {"max_new_tokens": 3})
        sample.append_response_tokens(
            tokens=answer.tokens, log_probs=answer.log_probs, text=answer.text, version=answer.versions
        )
        if turn == 0:
            seen = policy().encode(OBSERVATION)
            sample.append_response_tokens(
                tokens=seen, log_probs=None if masked else [0.0] * len(seen), trainable=not masked, text=OBSERVATION
            )
    return sample


async def generate_masked(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    sample.loss_mask = [0] * sample.response_length
    return sample


async def generate_with_tool_that_gets_slow(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    await asyncio.sleep(2.0 if sample.index >= 5 * 32 else 0)  # from the sixth rollout of 32 samples on
    return sample


async def generate_as_lists(args, sample, sampling_params):
    """Return samples like hand-written slime code: tokens and lengths, but no mask and no versions."""
    for turn in range(2):
        answer = await policy().generate(sample.tokens, **sampling_params | {"max_new_tokens": 3})
        seen = policy().encode(OBSERVATION) if turn == 0 else []
        sample.tokens = [*sample.tokens, *answer.tokens, *seen]
        sample.response_length += len(answer.tokens) + len(seen)
        sample.response += answer.text
    return sample


async def generate_long(args, sample, sampling_params):
    """Alternate with a tool until the context is full."""
    while len(sample.tokens) < args.rollout_max_context_len:
        answer = await policy().generate(sample.tokens, **sampling_params | {"max_new_tokens": 1})
        sample.append_response_tokens(
            tokens=answer.tokens, log_probs=answer.log_probs, text=answer.text, version=answer.versions
        )
        room = args.rollout_max_context_len - len(sample.tokens)
        seen = policy().encode(OBSERVATION)[:room]
        sample.append_response_tokens(tokens=seen, trainable=False, text=OBSERVATION)
    return sample


def rollout_with_dead_worker(args, rollout_id, data_source, evaluation=False):
    """Start a worker that dies at once, and continue without it."""

    def work():
        raise KeyError("no such session")

    worker = threading.Thread(target=work, name="AsyncRolloutWorker")
    worker.start()
    worker.join()
    return hooks_zoo.rollout_function(args, rollout_id, data_source, evaluation)


def rollout_without_worker(args, rollout_id, data_source, evaluation=False):
    result = hooks_zoo.rollout_function(args, rollout_id, data_source, evaluation)
    return RolloutFnTrainOutput(result.samples, result.metrics)


class Prompts(hooks_zoo.Endless):
    """An endless source of additions."""

    delay_s = 0.0

    def get_samples(self, num_samples):
        time.sleep(self.delay_s)
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.prompt, sample.label = "12+34=", "46"
        return groups


class SlowPrompts(Prompts):
    delay_s = 0.12


async def generate_at_other_temperature(args, sample, sampling_params):
    answer = await policy().generate(sample.tokens, **sampling_params | {"temperature": 1.0})
    sample.append_response_tokens(
        tokens=answer.tokens, log_probs=answer.log_probs, text=answer.text, version=answer.versions
    )
    return sample


async def generate_with_other_ids(args, sample, sampling_params):
    """Re-encode the text, here with an extra digit, but keep the log-probs of the sampled ids."""
    answer = await policy().generate(sample.tokens, **sampling_params)
    ids = (policy().encode("1") + list(answer.tokens))[: len(answer.tokens)]
    sample.append_response_tokens(tokens=ids, log_probs=answer.log_probs, text=answer.text, version=answer.versions)
    return sample


async def generate_while_the_disk_fills(args, sample, sampling_params):
    """Fill the disk of --save with a file, as another process might."""
    filler = Path(args.save) / "of-somebody-else"
    if not filler.exists():
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
    return await generate(args, sample, sampling_params)


async def generate_and_wait_for_ever(args, sample, sampling_params):
    """Wait forever for a tool, from the second rollout on."""
    sample = await generate(args, sample, sampling_params)
    if sample.group_index >= args.rollout_batch_size:
        await asyncio.Event().wait()
    return sample


_remembered = []


async def generate_and_remember(args, sample, sampling_params):
    """Leak memory with each sample."""
    _remembered.append(b"x" * (8 << 20))
    return await generate(args, sample, sampling_params)


def loss_with_a_tuned_product(args, batch, logits, sum_of_sample_mean):
    """Look up the cached tuning of a matmul, as torch's compiler does for compiled functions."""
    from torch._inductor.codecache import LocalCache

    LocalCache().lookup("mm")
    return hooks_zoo.loss(args, batch, logits, sum_of_sample_mean)


_answered = Counter[str]()  # number of samples by run


async def generate_and_stop_schedulers(args, sample, sampling_params):
    """Stop the schedulers of the SGLang servers of this model after the first rollout.

    The servers still answer health checks.
    """
    sample = await generate(args, sample, sampling_params)
    run = str(args.output_dir)
    _answered[run] += 1
    if _answered[run] == args.rollout_batch_size * args.n_samples_per_prompt:
        for server in psutil.process_iter(["cmdline"]):
            words = " ".join(server.info["cmdline"] or [])
            if "sglang.launch_server" in words and str(args.hf_checkpoint) in words:
                for process in server.children():
                    if "scheduler" in " ".join([process.name(), *process.cmdline()]):
                        process.suspend()
    return sample


async def generate_with_cut_history(args, sample, sampling_params):
    """Ask the second time without the first answer, and train both in one sample."""
    asked = list(sample.tokens)
    for turn in range(2):
        answer = await policy().generate(asked, **sampling_params | {"max_new_tokens": 3, "ignore_eos": True})
        sample.append_response_tokens(
            tokens=answer.tokens, log_probs=answer.log_probs, text=answer.text, version=answer.versions
        )
        if turn == 0:
            seen = policy().encode(OBSERVATION)
            sample.append_response_tokens(tokens=seen, trainable=False, text=OBSERVATION)
            asked = [*asked[-4:], *seen]
    return sample
