"""A typical user function for every `--*-path` flag. Calls are logged in OUTPUT_DIR/calls.jsonl."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import httpx
import torch

from furlong import Sample, get_model_url
from furlong.rollout.agent import policy
from furlong.rollout.filters import DynamicFilterOutput
from furlong.rollout.replay import RolloutFnEvalOutput, RolloutFnTrainOutput

TOOL = " 42 "


def note(args, name, **what):
    with (Path(args.output_dir) / "calls.jsonl").open("a") as file:
        file.write(json.dumps({"hook": name, **what}) + "\n")


async def reward_by_judge(args, sample):
    """Return a judge model's reply to a response, and the judge's weight version."""
    body = {"input_ids": sample.tokens[-4:], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    async with httpx.AsyncClient(trust_env=False) as client:
        reply = (await client.post(get_model_url(args, "judge"), json=body)).raise_for_status().json()
    sample.metadata["judge"] = [reply["meta_info"]["weight_version"], reply["output_ids"]]
    return float(reply["output_ids"][0] % 2)


async def generate_with_tool(args, sample, sampling_params):
    limits = sampling_params | {"max_new_tokens": 3}
    for turn in range(2):
        answer = await policy().generate(sample.tokens, **limits | {"sampling_seed": sample.seed + turn})
        sample.append_response_tokens(
            tokens=answer.tokens, log_probs=answer.log_probs, text=answer.text, version=answer.versions[-1]
        )
        if turn == 0:
            sample.append_response_tokens(tokens=policy().encode(TOOL), trainable=False, text=TOOL)
    sample.metadata["round_number"] = 2
    return sample


async def generate_fan_out(args, sample, sampling_params):
    """Generate two branches for odd samples, and one for even ones."""
    branches = []
    for i in range(1 + sample.index % 2):
        branch = copy.deepcopy(sample)
        answer = await policy().generate(branch.tokens, **sampling_params | {"sampling_seed": sample.seed + i})
        branch.append_response_tokens(
            tokens=answer.tokens, log_probs=answer.log_probs, text=answer.text, version=answer.versions[-1]
        )
        branches.append(branch)
    return branches


async def generate_unseen(args, sample, sampling_params, evaluation=False):
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1.0, -1.0], text="ab")
    sample.reward = float(sample.index % 2)
    note(args, "generate_unseen", evaluation=evaluation)
    return sample


def filter_by_index(args, samples, **kwargs):
    """Drop every third group."""
    keep = samples[0].group_index % 3 != 2
    return DynamicFilterOutput(keep, reason="" if keep else "third")


def filter_branches(args, samples, **kwargs):
    counts = Counter(s.rollout_id for s in samples)
    note(args, "filter_branches", group=samples[0].group_index, branches=sorted(counts.values()))
    return len({s.reward for s in samples}) > 1


def sample_filter(args, data):
    for group in data:
        group[0].remove_sample = True


def all_samples_process(args, all_samples, data_source):
    assert len(data_source) == 40
    note(args, "all_samples_process", groups=[group[0].group_index for group in all_samples])


def buffer_filter(args, rollout_id, buffer, num_samples):
    """Return groups newest first, without those whose index is a multiple of five."""
    note(args, "buffer_filter", buffer=[group[0].group_index for group in buffer], num_samples=num_samples)
    buffer[:] = [group for group in buffer if group[0].group_index % 5]
    picked, buffer[:] = buffer[::-1][:num_samples], buffer[::-1][num_samples:]
    return picked


def sample_hook(args, sample, *, rollout_id, evaluation):
    sample.metadata["seen_in"] = "evaluation" if evaluation else rollout_id
    note(args, "sample_hook", index=sample.index, evaluation=evaluation)


def convert(args, samples):
    return {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": [1.0 if i % 2 else -1.0 for i, _ in enumerate(samples)],
        "raw_reward": [s.get_reward_value(args) for s in samples],
        "loss_masks": [[1] * s.response_length for s in samples],
        "rollout_log_probs": [s.rollout_log_probs for s in samples],
    }


def log_rollout(rollout_id, args, samples, extra_metrics, rollout_time):
    note(args, "log_rollout", rollout_id=rollout_id, samples=len(samples), extra=sorted(extra_metrics))
    return rollout_id % 2 == 1


def log_evaluation(rollout_id, args, data, extra_metrics):
    note(args, "log_evaluation", rollout_id=rollout_id, sets={k: len(v["rewards"]) for k, v in data.items()})
    return rollout_id == 2


def postprocess(args, rollout_id, rollout_data):
    for mask in rollout_data["loss_masks"][::2]:
        mask.zero_()
    note(args, "postprocess", keys=sorted(rollout_data))


def advantages(args, rollout_data):
    rollout_data["advantages"] = [torch.full((n,), 0.5) for n in rollout_data["response_lengths"]]
    rollout_data["returns"] = rollout_data["advantages"]


def penalized_advantages(args, rollout_data):
    """Return one minus the KL to the reference."""
    gaps = [p - q for p, q in zip(rollout_data["log_probs"], rollout_data["ref_log_probs"], strict=True)]
    assert torch.equal(torch.cat(gaps), torch.cat(rollout_data["kl"]))
    rollout_data["advantages"] = [1 - args.kl_coef * gap for gap in gaps]


def loss(args, batch, logits, sum_of_sample_mean):
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    lists = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    _, values = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **lists)
    log_probs = torch.cat(values["log_probs"])
    assert torch.equal(log_probs, torch.log_softmax(logits, -1).gather(-1, batch["tokens"][:, None])[:, 0])
    every = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(values["entropy"], list(every.split(batch["response_lengths"])))
    value = sum_of_sample_mean(-log_probs)
    moved = (log_probs.detach() - torch.cat(batch["log_probs"])).abs()  # slime's lists have one entry per sample
    assert [len(t) for t in batch["unconcat_tokens"]] == batch["total_lengths"]
    assert [len(a) for a in batch["advantages"]] == [len(m) for m in batch["loss_masks"]] == batch["response_lengths"]
    return value, {"my_loss": value, "my_gap": sum_of_sample_mean(moved)}


def loss_by_token(args, batch, logits, sum_of_sample_mean):
    """Return a value per token instead of a scalar."""
    return -torch.log_softmax(logits, -1)[:, 0], {}


def loss_with_list(args, batch, logits, sum_of_sample_mean):
    return 0 * logits.sum(), {"my_log_probs": torch.cat(batch["log_probs"])}


def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs):
    ratio = torch.cat(list(train_log_probs)).sub(torch.cat(list(rollout_log_probs))).exp()
    return pg_loss * 0.5, list(loss_masks), {"my_ratio": ratio}


def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Return three times slime's reduction: the mean over each response, summed over responses."""

    def reduce(values):
        parts = values.split(list(response_lengths))
        return 3 * sum((v * m).sum() / m.sum().clamp_min(1) for v, m in zip(parts, loss_masks, strict=True))

    return reduce


def provider(pre_process, post_process):
    from furlong.training.megatron.model_build import default_model

    return default_model(pre_process, post_process)


def before_log_prob(args, model, store_prefix):
    pass


def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    pass


def rollout_function(args, rollout_id, data_source, evaluation=False):
    """Build responses without an engine: the letter a or b, repeated according to the sample index."""
    if evaluation:
        return RolloutFnEvalOutput({"own": {"rewards": [0.0, 1.0], "truncated": [True, False]}}, {"eval/extra": 3.0})
    groups = data_source.get_samples(args.rollout_batch_size + 2)
    for group in groups:
        for sample in group:
            n = 1 + sample.index % 3
            sample.append_response_tokens(tokens=[5 + sample.index % 2] * n, log_probs=[-1.0] * n, text="a" * n)
            sample.reward = float(sample.index % 2)
    data_source.add_samples(groups[-1:])
    return RolloutFnTrainOutput(groups[: args.rollout_batch_size], {"rollout/own": float(rollout_id)})


def rollout_function_with_prompts(args, rollout_id, data_source, evaluation=False):
    """Fill blank samples with prompts; take one group more than needed, and return it."""
    groups = data_source.get_samples(args.rollout_batch_size + 1)
    data_source.add_samples(groups[-1:])
    for sample in (sample for group in groups[:-1] for sample in group):
        assert (sample.prompt, sample.tokens, sample.label) == ("", [], None)
        sample.prompt, sample.tokens = "own", [3, 4]
        sample.append_response_tokens(tokens=[5], log_probs=[-1.0], text="a")
        sample.reward = float(sample.index % 2)
    return groups[:-1]


class Endless:
    """A data source in slime's form."""

    def __init__(self, args):
        self.args, self.next, self.returned = args, 0, []

    def get_samples(self, num_samples):
        groups, self.returned = self.returned[:num_samples], self.returned[num_samples:]
        while len(groups) < num_samples:
            self.next += 1
            groups.append([Sample(prompt=f"{self.next}=") for _ in range(self.args.n_samples_per_prompt)])
        return groups

    def add_samples(self, samples):
        self.returned += samples

    def save(self, rollout_id):
        folder = Path(self.args.save) / "own_source"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{rollout_id}.json").write_text(json.dumps({"next": self.next}))

    def load(self, rollout_id=None):
        self.next = json.loads((Path(self.args.save) / "own_source" / f"{rollout_id}.json").read_text())["next"]

    def __len__(self):
        return 1000


class Naming(Endless):
    """A source in which every second prompt names a custom generate function."""

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for sample in (sample for group in groups[::2] for sample in group):
            sample.generate_function_path = f"{Path(__file__).resolve()}:generate_unseen"
        return groups


class NamingNone(Endless):
    """A source whose samples name an invalid generate function."""

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        groups[0][0].generate_function_path = f"{Path(__file__).resolve()}:filter_by_index"
        return groups
