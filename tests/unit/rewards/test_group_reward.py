from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from furlong.core.outcome import Outcome, outcome_from_value, outcomes_from_list
from furlong.core.sample import Group, Sample, Status
from furlong.errors import ConfigError, RewardError
from furlong.rewards.group_reward import GroupReward
from furlong.rewards.sandbox import Sandbox
from furlong.rollout.metrics import rollout_metrics
from raw_server import endless, http, raw_server


def score(samples, **options):
    async def go():
        reward = GroupReward(**options)
        try:
            return await reward(samples)
        finally:
            await reward.close()

    return asyncio.run(go())


def test_numbers_and_dicts_are_rewards():
    cases = [
        (True, 1.0), (-0.5, -0.5), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.bool_(True), 1.0),
        (np.array(2.0), 2.0), (torch.tensor(0.25), 0.25),
        ({"score": np.float64(1.0), "why": "ok"}, {"score": 1.0, "why": "ok"}),
    ]  # fmt: skip
    for value, reward in cases:
        outcome = outcome_from_value(value)
        assert (outcome.kind, outcome.reward) == ("scored", reward)
        assert type(outcome.reward) in (float, dict)
    assert [o.reward for o in outcomes_from_list(np.array([1.0, 0.0]), 2)] == [1.0, 0.0]


def test_other_values_fail_with_type_and_value():
    cases = [
        (math.nan, "float nan"), (np.float32("nan"), "float nan"), (10**400, "int 1000"), (None, "None"),
        ("1.0", "str '1.0'"), ([1.0], r"list \[1.0\]"), (np.zeros(3), r"ndarray array\("), ({}, "empty dict"),
        ({"score": math.nan}, "'score' is float nan"), ({"parts": [{"a": -math.inf}]}, "'parts' is list"),
    ]  # fmt: skip
    for value, reason in cases:
        outcome = outcome_from_value(value)
        assert (outcome.kind, outcome.reward) == ("failed", None)
        assert re.search(reason, outcome.reason)
    cases = [([1.0] * 4, "4 rewards for 3"), ([], "0 rewards for 3"), (1.0, "not float 1.0"), ("ab", "not str 'ab'")]
    for values, reason in cases:
        outcomes = outcomes_from_list(values, 3)
        assert [o.kind for o in outcomes] == ["failed"] * 3
        assert reason in outcomes[0].reason
    assert [o.kind for o in outcomes_from_list([1.0, "x"], 2)] == ["scored", "failed"]


@pytest.mark.nightly
def test_math_is_scored_with_and_without_algebra_by_workers_that_rewards_share():
    answers = [r"\boxed{0.5}", r"\boxed{\frac{2}{4}}", r"\boxed{\sqrt{0.25}}", r"\boxed{\sqrt{2}}", "no idea"]
    samples = [Sample(response=a, label=r"\frac12") for a in answers]
    sandboxes = {}

    async def go():
        rewards = [GroupReward(rm_type="math", num_workers=1, verifier_sandboxes=sandboxes) for _ in range(2)]
        try:
            return [await reward(samples) for reward in rewards], len(sandboxes)
        finally:
            for reward in rewards:
                await reward.close()

    by_reward, opened = asyncio.run(go())
    assert [[outcome.reward for outcome in outcomes] for outcomes in by_reward] == [[1.0, 1.0, 1.0, 0.0, 0.0]] * 2
    assert (opened, sandboxes) == (1, {})


@pytest.mark.nightly
def test_endless_algebra_is_a_wrong_answer():
    tower = r"\boxed{9^{9^{9^{9}}} + \sqrt{2}}"
    samples = [Sample(response=tower, label=r"9^{9^{9^{8}}}"), Sample(response=r"\boxed{\sqrt{4}}", label="2")]
    started = time.monotonic()
    outcomes = score(samples, rm_type="math", num_workers=1, timeout_s=1)
    assert time.monotonic() - started < 20
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0]
    assert "no answer within 1 s" in outcomes[0].reason


def test_a_missing_label_fails_with_the_flag_to_check():
    outcome = score([Sample(response=r"\boxed{1}")], rm_type="math")[0]
    assert outcome.kind == "failed"
    assert "--label-key" in outcome.reason


def test_metadata_and_sample_paths_override_the_verifier(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def reward(args, sample, **kw):\n    return 7\n")
    samples = [
        Sample(response="B", label="B", metadata={"rm_type": "gpqa"}),
        Sample(response="Paris", label="Paris"),
        Sample(response="x", label="x", custom_rm_path=f"{file}:reward"),
        Sample(response="x", label="x", metadata={"rm_type": "gpqaa"}),
        Sample(response=r"\boxed{Paris}", label="Paris", metadata={"rm_type": "boxed_f1"}),
        Sample(response="x", label="x", status=Status.ABORTED),
        Sample(response="x", label="x", reward=0.25),
    ]
    outcomes = score(samples, rm_type="f1", num_workers=1)
    assert [o.reward for o in outcomes] == [1.0, 1.0, 7.0, None, 1.0, None, 0.25]
    assert "did you mean gpqa" in outcomes[3].reason
    assert "aborted" in outcomes[5].reason


def test_group_rm_leaves_samples_with_their_own_function_out_of_the_group_call(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("async def own(args, samples, **kw):\n    return [-1.0] * len(samples)\n")
    seen = []

    async def whole(args, samples, **kw):
        seen.append([s.index for s in samples])
        return [1.0] * len(samples)

    samples = [Sample(index=i, custom_rm_path=f"{file}:own" if i == 1 else None) for i in range(3)]
    outcomes = score(samples, custom_rm=whole, group_rm=True, num_workers=1)
    assert seen == [[0, 2]]
    assert [o.reward for o in outcomes] == [1.0, -1.0, 1.0]


def test_a_callable_shares_state_with_the_driver():
    seen = []

    async def reward(args, sample, **kw):
        seen.append(sample.index)
        return args["bonus"]

    outcomes = score([Sample(index=3), Sample(index=4)], custom_rm=reward, args={"bonus": 2})
    assert [o.reward for o in outcomes] == [2.0, 2.0]
    assert sorted(seen) == [3, 4]


def test_sync_callables_of_all_styles_work():
    assert score([Sample(response="ab")], custom_rm=lambda args, sample: len(sample.response))[0].reward == 2.0

    def trl(completions, label, **kw):
        return [float(c == x) for c, x in zip(completions, label, strict=True)]

    assert [o.reward for o in score([Sample(response="a", label="a")] * 2, custom_rm=trl)] == [1.0, 1.0]

    def chat(prompts, completions):
        return [float(len(c[0]["content"])) for c in completions]

    prompt = [{"role": "user", "content": "hi"}]
    assert score([Sample(prompt=prompt, response="hello")], custom_rm=chat)[0].reward == 5.0


def test_a_conversation_that_a_template_rendered_is_messages_for_trl():
    turns = [{"role": "user", "content": "1+1="}]

    def chat(prompts, completions, **columns):
        assert (prompts, "conversation" in columns) == ([turns], False)
        return [float(completion[0] == {"role": "assistant", "content": "2"}) for completion in completions]

    sample = Sample(prompt="<user>1+1=", response="2", metadata={"conversation": turns})
    assert [each.reward for each in score([sample], custom_rm=chat)] == [1.0]


def test_trl_columns_carry_the_label_under_its_own_name():
    class Options:
        label_key = "solution"

    def trl(completions, solution, difficulty):
        return [float(s) + d for s, d in zip(solution, difficulty, strict=True)]

    samples = [Sample(label="1", metadata={"difficulty": 2, "unused": 0})]
    assert score(samples, custom_rm=trl, args=Options())[0].reward == 3.0
    missing = score([Sample(label="1")], custom_rm=trl, args=Options())[0]
    assert "difficulty" in missing.reason


def test_callables_that_raise_or_hang_are_outcomes():
    release = threading.Event()

    def naughty(args, sample):
        if sample.response == "hang":
            release.wait(10)
        if sample.response == "raise":
            raise StopIteration("early")
        return 1

    async def slow(args, sample):
        await asyncio.sleep(10)

    samples = [Sample(response=r) for r in ("fine", "hang", "raise")]
    outcomes = score(samples, custom_rm=naughty, timeout_s=0.2)
    release.set()
    assert [o.kind for o in outcomes] == ["scored", "timed_out", "failed"]
    assert outcomes[2].reason.startswith("StopIteration: early")
    assert score([Sample()], custom_rm=slow, timeout_s=0.05)[0].kind == "timed_out"


CANCELLED = """
import asyncio

async def reward(args, sample):
    task = asyncio.create_task(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(task.cancel, "a client of its own")
    await task
"""


def test_a_cancellation_raised_by_an_async_function_is_a_failure(tmp_path):
    for in_process in (True, False):
        file = tmp_path / "cancelled.py"
        file.write_text(CANCELLED)
        outcome = score([Sample()], custom_rm=f"{file}:reward", in_process=in_process, num_workers=1, timeout_s=5)[0]
        assert outcome.kind == "failed"
        assert outcome.reason.startswith("CancelledError")


def test_a_path_runs_in_process_on_request(tmp_path):
    file = tmp_path / "here.py"
    file.write_text("import os\ndef reward(args, sample):\n    return os.getpid()\n")
    assert score([Sample()], custom_rm=f"{file}:reward", in_process=True)[0].reward == os.getpid()
    assert score([Sample()], custom_rm=f"{file}:reward", num_workers=1)[0].reward != os.getpid()


def test_configuration_problems_are_errors_before_anything_runs():
    with pytest.raises(ConfigError, match="--rm-url"):
        GroupReward(rm_type="remote_rm")
    with pytest.raises(ConfigError, match="did you mean math"):
        GroupReward(rm_type="mathh")
    with pytest.raises(RewardError, match=r"has the parameters \(x\)"):
        GroupReward(custom_rm=lambda x: 1.0)
    with pytest.raises(RewardError, match=r"nowhere\.py:f"):
        asyncio.run(GroupReward(custom_rm="nowhere.py:f", num_workers=1).start())
    assert "--rm-type or --custom-rm-path" in score([Sample()])[0].reason


@contextmanager
def server(answer):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = answer(request)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{web.server_address[1]}/rm"
        web.shutdown()
        thread.join()


def test_remote_rewards_and_their_failures_are_outcomes():
    release = threading.Event()

    def answer(request):
        match request["response"]:
            case "boom":
                return 500, b"out of memory"
            case "text":
                return 200, b"not json"
            case "nan":
                return 200, b"null"
            case "slow":
                release.wait(5)
                return 200, b"1"
            case "dict":
                return 200, json.dumps({"score": 1.0, "saw": request}).encode()
            case _:
                return 200, b"0.5"

    samples = [Sample(prompt="p", response=r, label="l") for r in ("fine", "boom", "text", "nan", "slow", "dict")]
    with server(answer) as url:
        outcomes = score(samples, rm_type="remote_rm", rm_url=url, timeout_s=1)
        release.set()
    assert [o.kind for o in outcomes] == ["scored", "failed", "failed", "failed", "timed_out", "scored"]
    assert "HTTP 500: out of memory" in outcomes[1].reason
    assert "not JSON" in outcomes[2].reason
    assert outcomes[5].reward == {"score": 1.0, "saw": {"prompt": "p", "response": "dict", "label": "l"}}
    gone = score([Sample(response="x")], rm_type="remote_rm", rm_url=url, timeout_s=5)[0]
    assert gone.kind == "failed"
    assert "ConnectError" in gone.reason


LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"


def test_a_wrong_reply_of_a_reward_server_is_a_failed_outcome():
    cases = [
        (endless(LONG, b"x" * (1 << 20)), "more than"),
        (http(gzip.compress(b" " * (20 << 20), mtime=0), head="Content-Encoding: gzip\r\n"), "more than"),
        (http(b"not gzip", head="Content-Encoding: gzip\r\n"), "Content-Encoding"),
        (http(b"", status="302 Found", head="Location: http://me:secret@other/\r\n"), "a redirect to"),
        (http(b"0.5", length=20), "RemoteProtocolError"), 
        (http(b"[" * 100_000), "not JSON"), 
         
        (http(b"\x1b[2J" + b"x" * 10_000, status="500 Oops"), "HTTP 500"), (http(b"NaN"), "nan"),
        
    ]  # fmt: skip
    for answer, words in cases:
        with raw_server(answer) as raw:
            [outcome] = score([Sample(response="x")], rm_type="remote_rm", rm_url=f"{raw.url}/rm", timeout_s=20)
        assert outcome.kind == "failed"
        assert words in outcome.reason
        assert raw.url in outcome.reason or words == "nan"
        assert "secret" not in outcome.reason
        assert "\x1b" not in outcome.reason
        assert len(outcome.reason) < 1000


def test_a_reply_that_comes_too_slowly_is_a_timeout():
    with raw_server(endless(LONG, b" ", 0.01)) as raw:
        [outcome] = score([Sample(response="x")], rm_type="remote_rm", rm_url=f"{raw.url}/rm", timeout_s=0.1)
    assert outcome.kind == "timed_out"


def test_an_answer_that_cannot_be_compared_is_0_and_counted(monkeypatch):
    raised = Outcome.failed("TypeError: Invalid NaN comparison\n  sympy/core/numbers.py:1 in f")
    outcomes = iter([raised, Outcome.failed("DataError: the label"), Outcome.timed_out(3)])

    async def score(self, samples):
        return [next(outcomes)]

    monkeypatch.setattr(Sandbox, "score", score)
    samples = [Sample(response=r"\boxed{\sqrt{2}}", label="2", status=Status.COMPLETED) for _ in range(3)]
    found = asyncio.run(GroupReward(rm_type="math")(samples))
    assert [(each.kind, each.reward) for each in found] == [("scored", 0.0), ("failed", None), ("scored", 0.0)]
    for sample, outcome in zip(samples, found, strict=True):
        sample.outcome = outcome
    assert rollout_metrics([Group(0, samples)])["rollout/verifier_errors"].value == 2
