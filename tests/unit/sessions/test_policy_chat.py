"""`policy().chat` and agents over HTTP in the generation of samples: one batch, whatever way an agent speaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from chat_zoo import bpe_tokenizer
from fakes_engine import reference_log_probs, source_of, tiny_engine, tiny_model
from furlong.agent import policy, session
from furlong.chat.template_boundary import ChatFormat
from furlong.config.hooks import Hooks
from furlong.core.outcome import Outcome
from furlong.core.sample import Group, Sample, Status
from furlong.errors import RolloutError
from furlong.inference.embedded import EmbeddedEngine
from furlong.interfaces import SamplingParams
from furlong.rollout import agents, environments
from furlong.rollout.episodes import RewardWait
from furlong.rollout.generate import Generation, run_group
from furlong.rollout.metrics import rollout_metrics
from furlong.sessions.session_server import SessionServer

TURNS = 6
NO_FLAGS = dict.fromkeys(
    ("agent_function_path", "agent_command", "agent_memory_limit", "agent_env", "custom_rm_path", "rm_type")
)


class Rewards:
    def __init__(self) -> None:
        self.scored = 0

    async def __call__(self, group: Any) -> list[Outcome]:
        self.scored += len(group)
        return [Outcome.scored(float(len(sample.tokens) % 3)) for sample in group]


def question(turn: int) -> dict[str, Any]:
    return {"role": "user", "content": f"and the sum of {turn} and 12?"}


async def in_process(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    messages: list[Any] = list(sample.prompt)
    for turn in range(TURNS):
        reply = await policy().chat(messages)
        messages += [reply.message, question(turn)]
    return sample


async def over_http(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> None:
    messages = list(prompt)
    async with httpx.AsyncClient(timeout=60) as client:
        for turn in range(TURNS):
            body = {"messages": messages, **request_kwargs}
            reply = await client.post(f"{base_url}/v1/chat/completions", json=body)
            messages += [reply.json()["choices"][0]["message"], question(turn)]


async def with_token_ids(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    opened, form = session(sample), ChatFormat(policy().tokenizer)
    ids = form.encode(form.render(sample.prompt))
    async with httpx.AsyncClient(timeout=60, headers={"X-Api-Key": opened.key}) as client:
        for turn in range(TURNS):
            reply = await client.post(f"{opened.url}/inference/v1/generate", json={"token_ids": ids})
            sampled = reply.json()["choices"][0]["token_ids"]
            end = form.decode(sampled[-1:]) if sampled[-1] == form.tokenizer.eos_token_id else ""
            text = form.appended({"role": "assistant", "content": ""}, end, [question(turn)])
            ids = [*ids, *sampled, *form.encode(text)]
    return sample


SUBPROCESS = f"""
import json, os, sys, urllib.request
task = json.load(sys.stdin)
messages = task["prompt"]
for turn in range({TURNS}):
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + key}}
    body = json.dumps({{"messages": messages}}).encode()
    reply = json.load(urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)))
    messages += [reply["choices"][0]["message"], {{"role": "user", "content": f"and the sum of {{turn}} and 12?"}}]
print(json.dumps({{"said": "done"}}))
"""


def episodes(
    function: Callable[..., Any],
    *,
    num_groups: int = 2,
    family: str = "qwen",
    during: Callable[[Any, Any], Any] | None = None,
    context_len: int = 1024,
    **args: Any,
) -> tuple[list[Sample], Any, Rewards]:
    """Run groups of two samples with a tiny engine; returns the samples, the model and the rewards."""
    tokenizer = bpe_tokenizer(family)
    config, model = tiny_model("qwen3", vocab_size=416, max_position_embeddings=context_len)
    config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id

    async def main() -> tuple[list[Sample], Any, Rewards]:
        engine = tiny_engine(config, model.state_dict(), tokenizer=tokenizer)
        server = SessionServer()
        await server.start()
        rewards = Rewards()
        generation = Generation(
            engine=engine,
            tokenizer=tokenizer,
            reward=rewards,
            params=SamplingParams(max_new_tokens=8, skip_special_tokens=False),
            hooks=Hooks(custom_generate_function=function),
            vocab_size=416,
            max_tokens=context_len,
            args=SimpleNamespace(**NO_FLAGS, **args),
            chat_format=ChatFormat(tokenizer),
            session_server=server,
        )
        groups = [
            Group(g, [Sample(g, 2 * g + i, prompt=[question(g)], tokens=[2], seed=7 + 2 * g + i) for i in range(2)])
            for g in range(num_groups)
        ]
        works = [
            run_group(group, generation, rollout_id=0, continues=lambda: True, wait=RewardWait()) for group in groups
        ]
        try:
            running = asyncio.gather(*works)
            if during is not None:
                await during(engine, running)
            done = await running
            assert server.num_open == 0
            return [sample for group in done for sample in group.samples], model, rewards
        finally:
            await server.close()
            await engine.close()

    return asyncio.run(main())


def columns(samples: list[Sample]) -> list[Any]:
    names = (
        "index",
        "tokens",
        "response_length",
        "loss_mask",
        "rollout_log_probs",
        "token_versions",
        "status",
        "reward",
    )
    return [[getattr(sample, name) for name in names] for sample in samples]


def test_64_episodes_are_64_samples_with_the_engines_ids_and_the_trainers_log_probs(monkeypatch):
    answers: dict[tuple[int, ...], list[list[int]]] = {}
    generate = EmbeddedEngine.generate

    async def recorded(engine: Any, prompt: list[int], params: Any, **options: Any) -> Any:
        done = await generate(engine, prompt, params, **options)
        answers.setdefault(tuple(prompt), []).append(done.tokens)
        return done

    monkeypatch.setattr(EmbeddedEngine, "generate", recorded)
    samples, model, _ = _http(num_groups=32)
    assert len(samples) == 64
    assert sum(map(len, answers.values())) == 64 * TURNS
    tokenizer, changed = bpe_tokenizer("qwen"), 0
    for sample in samples:
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
        assert sample.metadata["session_counts"]["turns"] == TURNS
        assert "sampled_in_another_context" not in sample.metadata
        assert "retokenised_from" not in sample.metadata
        changed += tokenizer.encode(tokenizer.decode(sample.tokens), add_special_tokens=False) != sample.tokens
    assert changed > 32
    num_trained = 0
    for sample in samples:
        n, mask = sample.prompt_length, sample.loss_mask or ()
        starts = [i for i, is_trained in enumerate(mask) if is_trained and (not i or not mask[i - 1])]
        assert len(starts) == TURNS
        for i in starts:
            end = next((j for j in range(i, len(mask)) if not mask[j]), len(mask))
            assert sample.tokens[n + i : n + end] in answers[tuple(sample.tokens[: n + i])]
            num_trained += end - i
        known = reference_log_probs(model, sample.tokens[:n], sample.tokens[n:])
        for value, expected, is_trained in zip(
            sample.rollout_log_probs or (), known, sample.loss_mask or (), strict=True
        ):
            assert not is_trained or abs(value - float(expected)) < 1e-4
    assert num_trained == sum(len(tokens) for each in answers.values() for tokens in each)


def _http(**options: Any) -> tuple[list[Sample], Any, Rewards]:
    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        await over_http(session(sample).url_with_key, sample.prompt, agents.request_kwargs(sampling_params), {})
        return sample

    return episodes(generate, **options)


def test_one_agent_in_process_over_http_in_a_subprocess_and_with_token_ids_gives_one_batch(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(SUBPROCESS)

    async def command(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        args.agent_function_path, args.agent_command = None, f"{sys.executable} {script}"
        return await agents.generate(args, sample, sampling_params)

    here = episodes(in_process)[0]
    assert columns(here) == columns(_http()[0])
    outside = episodes(command)[0]
    assert columns(here) == columns(outside)
    assert outside[0].metadata["said"] == "done"
    assert columns(here) == columns(episodes(with_token_ids)[0])


async def fifty_turns(args: Any, sample: Sample, sampling_params: Any) -> Sample:
    messages: list[Any] = list(sample.prompt)
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(50):
            reply = await client.post(
                f"{session(sample).url_with_key}/v1/chat/completions", json={"messages": messages}
            )
            messages += [reply.raise_for_status().json()["choices"][0]["message"], {"role": "user", "content": "+"}]
    return sample


@pytest.mark.parametrize("mode", ["finish", "hold", "abort"])
def test_every_token_of_50_turns_has_the_log_prob_of_its_versions_weights(mode):
    _, model = tiny_model("qwen3", vocab_size=416, max_position_embeddings=2048)
    draw = torch.Generator().manual_seed(0)
    states = [{name: tensor.clone() for name, tensor in model.state_dict().items()}]
    for _ in range(5):
        states.append({k: t + 0.1 * t.std() * torch.randn(t.shape, generator=draw) for k, t in states[-1].items()})
    waited: list[int] = []

    async def update(engine: Any, running: Any) -> None:
        for version in range(1, 6):
            generated = engine.stats().tokens_generated
            while engine.stats().tokens_generated < generated + 200 and not running.done():
                await asyncio.sleep(0.001)
            assert not running.done()
            before = engine.stats().tokens_generated
            await engine.pause(mode)
            waited.append(engine.stats().tokens_generated - before)
            await engine.load_weights(source_of(states[version]), version)
            await engine.resume()

    samples, _, rewards = episodes(fifty_turns, during=update, context_len=2048)
    assert (len(samples), rewards.scored, len(waited)) == (4, 4, 5)
    assert max(waited) <= 4 * 8  # at most one request of each episode
    seen: set[int] = set()
    for sample in samples:
        assert sample.metadata["session_counts"]["turns"] == 50
        n, mask, versions = sample.prompt_length, sample.loss_mask or (), sample.token_versions or ()
        trained = [version for version, is_trained in zip(versions, mask, strict=True) if is_trained]
        assert trained == sorted(trained)
        seen |= set(trained)
        for version in set(trained):
            model.load_state_dict(states[version])
            known = reference_log_probs(model, sample.tokens[:n], sample.tokens[n:])
            for i, value in enumerate(sample.rollout_log_probs or ()):
                assert not mask[i] or versions[i] != version or abs(value - float(known[i])) < 1e-4
    assert seen == set(range(6))


def test_leaves_share_the_reward_of_the_last_one():
    async def forks(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        await policy().chat([{"role": "system", "content": "you plan"}, *sample.prompt])
        await policy().chat(sample.prompt)
        return sample

    samples, _, rewards = episodes(forks, num_groups=1)
    assert rewards.scored == 2
    assert [sample.index for sample in samples] == [0, 0, 1, 1]
    assert [sample.reward for sample in samples[::2]] == [sample.reward for sample in samples[1::2]]
    metrics = rollout_metrics([Group(0, samples)])
    assert metrics["session/leaves"].value == 2
    assert metrics["session/branch_reason/subagent"].value == 2


def test_an_agent_that_fails_or_never_asks_fails_its_sample():
    async def silent(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        args.agent_command = "exit 3"
        return await agents.generate(args, sample, sampling_params)

    async def quiet(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        args.agent_command = "true"
        return await agents.generate(args, sample, sampling_params)

    for function, reason in ((silent, "exit code 3"), (quiet, "without an answer")):
        samples, _, _ = episodes(function, num_groups=1)
        assert all(sample.status is Status.FAILED for sample in samples)
        assert all(reason in sample.outcome.reason for sample in samples if sample.outcome)


def test_results_of_agents_become_rewards_and_metadata():
    sample = Sample()
    environments.record_result(sample, {"reward": 0.5, "steps": 3})
    assert (sample.reward, sample.metadata["steps"]) == (0.5, 3)
    environments.record_result(sample, 1)
    assert sample.reward == 1.0
    environments.record_result(sample, json.dumps("text"))
    assert sample.metadata["agent_result"] == '"text"'


def test_the_last_refused_request_is_in_the_error_of_an_agent_that_swallowed_it():
    requests = {
        "/v1/chat/completions": ({"messages": [question(0)], "presence_penalty": 1}, True, "presence_penalty"),
        "/chat/completion": ({}, True, "POST /chat/completion is not served"),
        "/v1/messages": ({"messages": [question(0)]}, False, "status 401: the key of this session"),
    }
    for path, (body, sends_key, named) in requests.items():

        async def swallows(args: Any, sample: Sample, sampling_params: Any) -> Sample:
            args.agent_command = "true"
            opened = session(sample)
            url = opened.url_with_key if sends_key else opened.url  # noqa: B023
            async with httpx.AsyncClient(timeout=60) as client:
                assert (await client.post(url + path, json=body)).status_code >= 400  # noqa: B023
            return await agents.generate(args, sample, sampling_params)

        samples, _, _ = episodes(swallows, num_groups=1)
        assert all(named in sample.outcome.reason for sample in samples if sample.outcome), path


def test_a_command_gets_no_secret_of_the_run(monkeypatch):
    secrets = ("FURLONG_API_KEY", "FURLONG_SESSIONS_KEY", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MINE")
    for name in secrets:
        monkeypatch.setenv(name, "secret of the host")
    monkeypatch.setenv("CHOSEN", "yes")
    seen: list[dict[str, str]] = []

    async def command(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        show = "import json, os; print(json.dumps({'seen': dict(os.environ)}))"
        args.agent_command, args.agent_env = f'{sys.executable} -c "{show}"', ("CHOSEN",)
        with contextlib.suppress(RolloutError):  # it does not ask the policy
            await agents.generate(args, sample, sampling_params)
        seen.append(sample.metadata["seen"])
        return await in_process(args, sample, sampling_params)

    episodes(command, num_groups=1)
    for variables in seen:
        assert "secret of the host" not in variables.values()
        assert {"PATH", "HOME", "TMPDIR", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "CHOSEN"} <= variables.keys()


def test_a_command_sets_neither_reward_nor_metadata_of_the_row_where_a_reward_function_scores(caplog):
    printed = {"reward": 99, "case": [], "rm_type": "random", "said": "done"}
    rows: dict[str, tuple[dict[str, Any], Any, float | None, dict[str, Any]]] = {
        "own function": ({"custom_rm_path": "own.py:fn"}, printed, None, {"case": [1], "said": "done"}),
        "own function, number": ({"custom_rm_path": "own.py:fn"}, 99, None, {"case": [1], "agent_result": "99"}),
        "verifier": ({"rm_type": "math"}, printed, None, {"case": [1]}),
        "none": ({}, {"reward": 0.5, "said": "done"}, 0.5, {"case": [1], "said": "done"}),
        "none, number": ({}, 1, 1.0, {"case": [1]}),
        "recorded": (
            {},
            {"reward": 1, "role_group": "g", "trained_unsampled_tokens": 3, "session_leaf": 0},
            1,
            {"case": [1]},
        ),
    }
    for name, (flags, result, reward, metadata) in rows.items():
        sample, args = (
            Sample(metadata={"case": [1]}),
            SimpleNamespace(**{"custom_rm_path": None, "rm_type": None} | flags),
        )
        agents.record_command_result(args, sample, result)
        assert (name, sample.reward, sample.metadata) == (name, reward, metadata)
    assert "printed case, reward, rm_type, which is ignored" in caplog.text
    assert "printed role_group, session_leaf, trained_unsampled_tokens, which is ignored" in caplog.text
