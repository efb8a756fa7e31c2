"""HttpEngine against scripted servers: requests, retries and errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import time

import pytest

from fakes_engine import run, tiny_model
from furlong.errors import (
    ENGINE_HANGS,
    ENGINE_UNANSWERED,
    ConfigError,
    EngineError,
    EngineTimeoutError,
    Loss,
    UnreachableError,
)
from furlong.inference.sglang.engine import HttpEngine
from furlong.inference.sglang.pool import ServerPool
from furlong.inference.sglang.request_queue import MAX_SENDING
from furlong.inference.sglang.server import CONTROL_S, PAUSE_S, ServerInfo, SglangServer, connected, probe, url_of
from furlong.interfaces import SamplingParams
from served_engine import ScriptedServer, ServedEngine, reply

SGLANG = ServerInfo.read({"version": "0.5.16", "tp_size": 1, "context_length": None})
PARAMS = SamplingParams(max_new_tokens=3, sampling_seed=7, stop=("x",), stop_token_ids=(9,))


@contextlib.contextmanager
def scripted(*answers, **options):
    """Servers with these answers to /generate (every other path is 200 {}), and an engine of them."""
    servers = []
    for answer in answers:

        async def respond(path, body, answer=answer):
            if path == "/generate":
                result = answer(body)
                return await result if asyncio.iscoroutine(result) else result
            return 200, {}

        servers.append(ScriptedServer(respond))
    try:
        yield servers, HttpEngine([SglangServer(s.url, SGLANG, **options) for s in servers])
    finally:
        for server in servers:
            server.stop()


def generated(server):
    return [body for path, body in server.asked if path == "/generate"]


def test_a_request_contains_everything_that_determines_the_answer():
    with scripted(lambda body: (200, reply([4, 5])), api_key="secret") as (servers, engine):
        done = run(engine, lambda: engine.generate([1, 2], PARAMS, session="s"))
    (body,) = generated(servers[0])
    assert body["input_ids"] == [1, 2]
    assert body["return_logprob"] is True
    asked = body["sampling_params"]
    assert (asked["sampling_seed"], asked["stop"], asked["stop_token_ids"], asked["max_new_tokens"]) == (
        7,
        ["x"],
        [9],
        3,
    )
    assert servers[0].headers[0]["authorization"] == "Bearer secret"
    assert (done.tokens, done.log_probs, done.finish_reason) == ([4, 5], [-1.0, -2.0], "length")
    assert done.versions == [-1, -1]  # "default" is not a version number


def test_log_probs_within_a_schema_are_asked_for_without_it():
    versions = iter(["1", "2", "2", "2"])  # an update comes between the first completion and its log-probs

    def answer(body):
        version = next(versions)
        if "json_schema" in body["sampling_params"]:
            return 200, reply([4, 5], version=version)
        rows = [[None, 2, None], [-7.0, 4, None], [-8.0, 5, None]]
        return 200, reply([], version=version, input_token_logprobs=rows)

    params = SamplingParams(max_new_tokens=3, stop=("x",), json_schema="{}")
    with scripted(answer) as (servers, engine):
        done = run(engine, lambda: engine.generate([1, 2], params))
    assert (done.tokens, done.log_probs, done.versions) == ([4, 5], [-7.0, -8.0], [2, 2])
    asked = generated(servers[0])
    assert [body["input_ids"] for body in asked] == [[1, 2], [1, 2, 4, 5]] * 2
    scored = asked[1]
    assert (scored["logprob_start_len"], scored["sampling_params"]["max_new_tokens"]) == (1, 0)


def test_a_completion_within_a_schema_that_is_aborted_has_no_tokens():
    async def answer(body):
        while all(path != "/abort_request" for path, _ in servers[0].asked):
            await asyncio.sleep(0.001)
        return 200, reply([4], reason="abort")

    with scripted(answer) as (servers, engine):

        async def main():
            call = asyncio.create_task(engine.generate([1], SamplingParams(json_schema="{}"), session="s"))
            while not generated(servers[0]):
                await asyncio.sleep(0.001)
            await engine.abort(["s"])
            return await call

        done = run(engine, main)
    assert (done.tokens, done.log_probs, done.finish_reason) == ([], [], "abort")
    assert len(generated(servers[0])) == 1


def test_no_id_begins_with_another_since_an_abort_ends_all_that_do():
    with scripted(lambda body: (200, reply([4]))) as (servers, engine):

        async def main():
            for _ in range(12):
                await engine.generate([1], PARAMS)

        run(engine, main)
    rids = [body["rid"] for body in generated(servers[0])]
    assert [(a, b) for a in rids for b in rids if a != b and b.startswith(a)] == []


@pytest.mark.parametrize("status", [400, 500])
def test_a_refusal_is_an_error_at_once_with_the_servers_reason(status):
    with scripted(lambda body: (status, {"error": {"message": "no such thing"}})) as (servers, engine):
        with pytest.raises(EngineError, match=rf"{servers[0].url}/generate answered {status}: no such thing"):
            run(engine, lambda: engine.generate([1], PARAMS))
        assert len(generated(servers[0])) == 1


@pytest.mark.parametrize("names_engine", [True, False])
def test_an_error_behind_a_router_names_the_engine_or_all_engines(names_engine, monkeypatch):
    monkeypatch.setattr("furlong.inference.sglang.engine.BACKOFF_S", 1e-4)
    said = ["no worker"]
    with scripted(lambda body: (503, {"message": said[0]}), lambda body: (200, reply([4]))) as (servers, direct):
        front, behind = direct.servers
        said[0] = f"error sending request for url ({behind.url}/generate)" if names_engine else said[0]
        engine = HttpEngine([behind], router=front)
        with pytest.raises(EngineError, match=r"no answer after 9 attempts") as caught:
            run(engine, lambda: engine.generate([1], PARAMS))
        rids = [body["rid"] for body in generated(servers[0])]
        assert [headers["x-request-id"] for headers in servers[0].headers] == rids
        assert len(set(rids)) == 9
    message = str(caught.value)
    assert behind.url in message
    assert (rids[-1] in message, "--router-log-level" in message) == (not names_engine, not names_engine)


def test_a_server_that_passes_health_checks_but_generates_nothing_is_lost(monkeypatch, caplog):
    monkeypatch.setattr("furlong.inference.sglang.engine.BACKOFF_S", 1e-4)

    async def dead(path, body):
        return (200, {}) if path == "/health" else (503, {"message": "its scheduler is gone"})

    async def alive(path, body):
        return 200, reply([4])

    servers = [ScriptedServer(dead), ScriptedServer(alive)]
    try:
        clients = [SglangServer(server.url, SGLANG) for server in servers]
        engine = HttpEngine(clients, is_supervised=True)
        assert run(engine, lambda: group(engine, [1], 8)) == [[4]] * 8
    finally:
        for server in servers:
            server.stop()
    assert clients[0].lost.code == ENGINE_HANGS
    assert not clients[1].lost
    assert sum(path == "/health_generate" for path, _ in servers[0].asked) == 1  # all of them share the check
    assert sum("retrying requests (1 since" in message for message in caplog.messages) == 1


def test_a_server_that_hangs_is_an_error_after_the_limit():
    async def hang():
        await asyncio.sleep(0.3)
        return 200, reply([4])

    with scripted(lambda body: hang(), timeout_s=0.05) as (servers, engine):
        with pytest.raises(EngineError, match=r"did not answer within 0\.05 s"):
            run(engine, lambda: engine.generate([1], PARAMS))
        assert len(generated(servers[0])) == 1


def test_an_abort_by_the_server_is_retried_and_then_an_error(monkeypatch):
    monkeypatch.setattr("furlong.inference.sglang.engine.BACKOFF_S", 1e-4)
    answers = iter([reply([4], reason="abort"), reply([4, 5])])
    with scripted(lambda body: (200, next(answers))) as (_, engine):
        assert run(engine, lambda: engine.generate([1], PARAMS)).tokens == [4, 5]
    bad = reply([], finish_reason={"type": "abort", "message": "out of memory"})
    with scripted(lambda body: (200, bad)) as (_, engine), pytest.raises(EngineError, match="out of memory"):
        run(engine, lambda: engine.generate([1], PARAMS))


@pytest.mark.parametrize("is_loaded", [False, True])
def test_tokens_of_a_request_paused_during_an_update_get_the_version_it_began_with(is_loaded):
    with scripted(lambda body: respond()) as (_, engine):

        async def respond():
            engine.servers[0].begin_loading(4)  # the server changes the label before it answers the update
            if is_loaded:
                engine.servers[0].finish_loading(4)
            return 200, reply([4, 5], version="4")

        engine.servers[0].finish_loading(3)
        assert run(engine, lambda: engine.generate([1], PARAMS)).versions == [3, 3]


def test_a_prompts_samples_share_a_server_and_prompts_are_spread():
    ok = lambda body: (200, reply([4]))  # noqa: E731
    with scripted(ok, ok) as (servers, engine):

        async def body():
            await asyncio.gather(
                *(engine.generate([p], PARAMS, session=f"{p}-{i}") for p in range(6) for i in range(4))
            )

        run(engine, body)
    homes = [{b["input_ids"][0] for b in generated(server)} for server in servers]
    assert homes[0].isdisjoint(homes[1])
    assert [len(generated(server)) for server in servers] == [12, 12]


def test_the_turns_of_a_session_stay_on_its_server():
    ok = lambda body: (200, reply([4]))  # noqa: E731
    with scripted(ok, ok) as (servers, engine):

        async def body():
            for turn in range(4):
                order = [(turn + s) % 4 for s in range(4)]
                await asyncio.gather(*(engine.generate([s, turn], PARAMS, session=f"s{s}") for s in order))

        run(engine, body)
    turns = [[body["input_ids"][0] for body in generated(server)] for server in servers]
    assert [sorted(each.count(s) for s in set(each)) for each in turns] == [[4, 4], [4, 4]]


def test_a_dead_server_is_lost_once_and_its_requests_go_to_the_other():
    ok = lambda body: (200, reply([4]))  # noqa: E731
    with scripted(ok, ok) as (servers, engine):
        servers[0].stop()
        done = run(engine, lambda: asyncio.gather(*(engine.generate([i], PARAMS) for i in range(20))))
        assert all(c.tokens == [4] for c in done)
        assert len(generated(servers[1])) == 20
        assert engine.servers[0].lost.code == ENGINE_UNANSWERED
        assert (engine.servers[0].placed, engine.servers[1].placed) == (0, 0)


def test_when_all_servers_are_dead_the_error_names_them():
    ok = lambda body: (200, reply([4]))  # noqa: E731
    with scripted(ok, ok) as (servers, engine):
        for server in servers:
            server.stop()
        with pytest.raises(EngineError, match="--load") as caught:
            run(engine, lambda: engine.generate([1], PARAMS))
    assert all(server.url in str(caught.value) for server in servers)


def test_a_server_runs_at_most_its_limit_of_requests():
    most = now = 0

    async def slow():
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.002)
        now -= 1
        return 200, reply([4])

    with scripted(lambda body: slow(), concurrency=3) as (_, engine):
        run(engine, lambda: asyncio.gather(*(engine.generate([i], PARAMS) for i in range(12))))
    assert most == 3


def test_success_false_in_a_200_reply_is_an_error():
    async def answer(path, body):
        return 200, {"success": False, "message": "shapes differ"}

    server = ScriptedServer(answer)
    client = SglangServer(server.url, SGLANG)
    try:
        with pytest.raises(EngineError, match="shapes differ"):
            run(client, lambda: client.update_from_disk("/x", 1))
    finally:
        server.stop()


def test_aborted_requests_of_a_silent_server_return_no_tokens_and_one_warning(monkeypatch, caplog):
    monkeypatch.setattr("furlong.inference.sglang.engine.ABORT_S", 0.02)

    async def hang():
        await asyncio.sleep(3)
        return 200, reply([4])

    with scripted(lambda body: hang()) as (servers, engine):

        async def body():
            requests = asyncio.gather(*(engine.generate([i], PARAMS, session="a") for i in range(3)))
            while len(generated(servers[0])) < 3:
                await asyncio.sleep(0.001)
            await engine.abort(["a"])
            return await requests

        assert [(done.tokens, done.finish_reason) for done in run(engine, body)] == [([], "abort")] * 3
        aborts = [b["rid"] for path, b in servers[0].asked if path == "/abort_request"]
        assert set(aborts) == {asked["rid"] for asked in generated(servers[0])}
    warnings = [record.message for record in caplog.records if "aborted requests" in record.message]
    assert len(warnings) == 1
    assert warnings[0].startswith("3 ")
    assert "0.02 s" in warnings[0]


def test_an_engine_closes_after_a_waiting_coroutine_was_closed():
    async def answer(body):
        await asyncio.sleep(0.5)
        return 200, reply([1, 2])

    with scripted(answer) as (_, engine):

        async def body():
            call = engine.generate([5], PARAMS)
            call.send(None)  # it waits for its answer; nothing runs it again
            await asyncio.sleep(0.05)
            call.close()
            started = time.monotonic()
            await asyncio.wait_for(engine.close(), 5)
            assert engine.pool.num_sent == 0
            return time.monotonic() - started

        assert asyncio.run(body()) < 0.4


def test_an_engine_closes_while_a_request_waits_for_another_server():
    async def body():
        engine = HttpEngine([SglangServer("http://127.0.0.1:9", SGLANG)], is_supervised=True)
        request = asyncio.ensure_future(engine.generate([5], PARAMS))
        while not engine.servers[0].lost:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(engine.close(), 5)
        await request

    with pytest.raises(EngineError, match="is closed"):
        asyncio.run(body())


def test_a_client_opens_no_connection_from_its_close_on():
    with scripted(lambda body: (200, reply([4]))) as (servers, engine):
        [client] = engine.servers

        async def body():
            await client.ask("/health")
            closing = asyncio.create_task(client.close())
            await asyncio.sleep(0)  # it waits for its connections to close
            assert not closing.done()
            for _ in range(2):
                with pytest.raises(UnreachableError, match=r"GET .*/health: the client of this server is closed"):
                    await client.ask("/health")
                await closing

        asyncio.run(body())
    assert len(servers[0].asked) == 1


def test_addresses_become_urls_and_invalid_ones_are_rejected():
    assert url_of("10.0.0.1:30000") == "http://10.0.0.1:30000"
    assert url_of("https://host:1/") == "https://host:1"
    assert url_of("[::1]:30000") == "http://[::1]:30000"
    for wrong in ("http://", "ftp://host:1", "host:1/path", "http://host:abc", "::1:30000", "fd00::7"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            url_of(wrong)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9"):
        probe("http://127.0.0.1:9", api_key=None)


def test_the_first_of_many_requests_is_sent_before_the_last_is_made(monkeypatch):
    begun, sent, ahead = [], [], []

    async def ask(server, path, body, *, on_sent, **_):
        begun.append(body["rid"])
        ahead.append(len(begun) - len(sent))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sent.append(body["rid"])
        on_sent()
        while len(sent) < 200:  # answers come when all are there
            await asyncio.sleep(0)
        return reply([1])

    monkeypatch.setattr(SglangServer, "ask", ask)
    engine = HttpEngine([SglangServer("http://127.0.0.1:1", SGLANG)])

    async def body():
        return await asyncio.gather(*(engine.generate([5], PARAMS) for _ in range(200)))

    assert len(run(engine, body)) == 200
    assert max(ahead) == MAX_SENDING
    assert begun == sent


def prefill_request(prompt: list[int]) -> dict:
    return {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, "stream": False}


async def group(engine, prompt: list[int], count: int = 3) -> list[list[int]]:
    """Tokens of the answers to several requests with the same prompt."""
    done = await asyncio.gather(*(engine.generate(prompt, PARAMS, session=f"s{i}") for i in range(count)))
    return [completion.tokens for completion in done]


def test_a_long_prompt_of_a_group_is_computed_before_its_requests_are_sent():
    together, most = 0, []

    async def answer(body):
        nonlocal together
        together += 1
        most.append(together)
        await asyncio.sleep(0.01)
        deadline = time.monotonic() + 20
        while (
            body != prefill_request(prompt) and len(most) < 4 and time.monotonic() < deadline
        ):  # answers come when all are there
            await asyncio.sleep(0.001)
        together -= 1
        return 200, reply([4], cached_tokens=10 if body == prefill_request(prompt) else 1500)

    prompt = list(range(1500))
    with scripted(answer) as (servers, engine):
        ask = functools.partial(engine.generate, prompt, PARAMS)
        done = run(engine, lambda: asyncio.gather(*(ask(session=f"s{i}") for i in range(3))))
    assert [(each.tokens, each.cached_tokens) for each in done] == [([4], 10), ([4], 1500), ([4], 1500)]
    first, *others = generated(servers[0])
    assert first == prefill_request(prompt)
    assert [body["sampling_params"]["max_new_tokens"] for body in others] == [3] * 3
    assert most == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("info", "keeps_together", "length"),
    [
        ({"version": "0.5.16"}, True, 500),  # short
        ({"version": "0.5.16"}, False, 1500),
        ({"version": "furlong 1"}, True, 1500),  # prefills a prompt once in any case
        ({"version": "0.5.16", "disable_radix_cache": True}, True, 1500),
        ({"version": "0.5.16", "dp_size": 2, "enable_dp_attention": True}, True, 1500),
    ],
)
def test_a_prompt_is_not_computed_ahead_if_that_does_not_help(info, keeps_together, length):
    with scripted(lambda body: (200, reply([4])), keeps_together=keeps_together) as (servers, engine):
        engine.servers[0].info = ServerInfo.read(info)
        assert run(engine, lambda: group(engine, list(range(length)))) == [[4]] * 3
    assert len(generated(servers[0])) == 3


def test_a_group_is_answered_although_its_prefill_request_fails(monkeypatch):
    monkeypatch.setattr("furlong.inference.sglang.engine.BACKOFF_S", 1e-4)
    for first in ((503, {}), (200, "no generation")):
        answers = iter([first, *[(200, reply([4]))] * 3])
        with scripted(lambda body, answers=answers: next(answers)) as (servers, engine):
            assert run(engine, lambda engine=engine: group(engine, list(range(1500)))) == [[4]] * 3
        assert len(generated(servers[0])) == 4


@pytest.mark.parametrize("mode", ["finish", "hold", "abort"])
def test_followers_wait_for_resume_after_a_prefill_during_a_pause(mode):
    prompt = list(range(1500))

    async def answer(body):
        if body == prefill_request(prompt):
            await asyncio.sleep(0.05)
        return 200, reply([4])

    with scripted(answer) as (servers, engine):

        async def body():
            tasks = asyncio.create_task(group(engine, prompt))
            while not servers[0].asked:
                await asyncio.sleep(1e-3)
            await engine.pause(mode)
            await asyncio.sleep(0.06)
            sent = generated(servers[0])
            await engine.resume()
            return sent, await tasks

        sent, answers = run(engine, body)
    assert sent == [prefill_request(prompt)]
    assert answers == [[] if mode == "abort" else [4]] * 3


def test_prefix_caches_are_those_of_a_weight_version_once_an_update_held_requests():
    prompt = list(range(1500))
    current = {"version": "default"}
    with scripted(lambda body: (200, reply([4], **current))) as (servers, engine):

        async def body():
            await group(engine, prompt)
            for version in (1, 2):
                await engine.pause("hold")
                engine.servers[0].version, current["version"] = version, str(version)
                await engine.resume()
                await group(engine, prompt)

        run(engine, body)
        keys = [asked.get("extra_key") for asked in generated(servers[0])]
    assert keys == [None] * 4 + ["weights-1"] * 4 + ["weights-2"] * 4


@pytest.mark.nightly
def test_a_full_engine_is_healthy_while_it_generates():
    config, model = tiny_model("qwen2")
    engine = ServedEngine(config, model.state_dict())
    long = SamplingParams(max_new_tokens=160, ignore_eos=True)

    async def body():
        tasks = [asyncio.create_task(engine.generate([5 + i % 90], long)) for i in range(128)]
        while not engine.embedded.stats().waiting:  # one more would have to wait, too
            await asyncio.sleep(0.001)
        healthy = await engine.servers[0].generation_error(30)
        num_waiting = engine.embedded.stats().waiting
        await asyncio.gather(*tasks)
        return healthy, num_waiting

    healthy, num_waiting = run(engine, body)
    assert healthy == ""
    assert num_waiting > 0


def test_the_gpus_of_a_server_are_those_of_all_of_its_copies():
    sizes = {"tp_size": 4, "pp_size": 2, "dp_size": 2}
    attention = {**sizes, "enable_dp_attention": True}  # copies of the attention share the GPUs of one copy
    assert [ServerInfo.read(each).num_gpus for each in ({}, sizes, attention)] == [1, 16, 8]


def test_the_load_of_engines_is_measured_while_requests_run():
    async def slowly(body):
        await asyncio.sleep(0.05)
        return 200, reply([4])

    with scripted(slowly, slowly) as (_, engine):

        async def body():
            await asyncio.gather(*(engine.generate([1], PARAMS, session="s") for _ in range(6)))
            return engine.take_load(), engine.take_load()

        load, again = run(engine, body)
    most, average = (load[f"engine/requests/{name}"].value for name in ("max", "mean"))
    assert most == pytest.approx(2 * average)  # one session: all of it on one of two engines
    assert 2 < most <= 6
    assert again == {}


def test_engines_that_are_busy_alternately_have_the_same_load():
    *servers, router = (SglangServer(f"http://127.0.0.1:{port}", ServerInfo.read({})) for port in (1, 2, 3))
    pool = ServerPool(servers, router, needs_router=False, is_supervised=False)
    for requests in ([6, 0], [0, 6], [0, 0]):  # the last look is one at which none had any
        pool.note_load(servers, requests)
    load = {name: metric.value for name, metric in pool.take_load().items()}
    assert load == {"engine/requests/max": 3, "engine/requests/mean": 3}
    assert pool.take_load() == {}


def test_memory_is_released_once_the_server_is_idle(monkeypatch):
    monkeypatch.setattr("furlong.inference.sglang.server.IDLE_POLL_S", 1e-3)
    refusals = [400, 400]

    async def respond(path, body):
        if path == "/flush_cache":
            return (refusals.pop(), {"message": "requests run"}) if refusals else (200, "flushed")
        return 200, None  # SGLang's answer to what it did

    server = ScriptedServer(respond)
    try:
        engine = HttpEngine([SglangServer(server.url, SGLANG)])

        async def body():
            await engine.release_memory(["kv_cache", "weights"])
            await engine.release_memory(["cuda_graph"])
            await engine.resume_memory(["weights"])

        run(engine, body)
    finally:
        server.stop()
    assert server.asked == [
        *[("/flush_cache", {})] * 3,
        ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
        ("/release_memory_occupation", {"tags": ["cuda_graph"]}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
    ]


def test_memory_release_waits_for_the_token_of_a_health_check():
    answered = []

    async def respond(path, body):
        if path == "/health_generate":
            await asyncio.sleep(0.05)
        answered.append(path)
        return 200, None

    server = ScriptedServer(respond)
    try:
        engine = HttpEngine([SglangServer(server.url, SGLANG)])

        async def body():
            check = asyncio.create_task(engine.servers[0].generation_error(30))
            while not server.asked:
                await asyncio.sleep(1e-3)
            await engine.release_memory(["kv_cache"])
            return await check, await engine.servers[0].generation_error(30)

        assert run(engine, body) == ("", "")
    finally:
        server.stop()
    assert answered == ["/health_generate", "/flush_cache", "/release_memory_occupation"]


@pytest.mark.parametrize(("status", "patience_s"), [(400, 0.0), (404, 60.0)])
def test_releasing_memory_of_a_busy_server_is_an_error_naming_it(monkeypatch, status, patience_s):
    monkeypatch.setattr("furlong.inference.sglang.server.IDLE_S", patience_s or 0.05)

    async def respond(path, body):
        return status, {"message": "requests run"}

    server = ScriptedServer(respond)
    try:
        engine = HttpEngine([SglangServer(server.url, SGLANG)])
        with pytest.raises(EngineError, match=rf"cannot release its memory: .* answered {status}: requests run"):
            run(engine, lambda: engine.release_memory(["kv_cache"]))
    finally:
        server.stop()
    assert {path for path, _ in server.asked} == {"/flush_cache"}


def test_a_request_does_not_wait_for_a_server_after_the_run_failed():
    """A request looks for a server after the supervisor has failed all requests."""

    async def body():
        pool = ServerPool([], None, needs_router=False, is_supervised=True)
        pool.failure = EngineError("engine 0 was ended by signal 9")
        pool.notify_change()
        await asyncio.wait_for(pool.usable(), 5)

    with pytest.raises(EngineError, match="ended by signal 9"):
        asyncio.run(body())


def test_weight_queries_time_out():
    async def answer(path, body):
        await asyncio.sleep(1)
        return 200, {}

    server = ScriptedServer(answer)
    first = SglangServer(server.url, SGLANG, report_s=0.05)

    async def body():
        async with connected([first.address], report_s=0.05) as [again]:
            for client in (first, again):
                rows = functools.partial(client.first_rows, "a", 4)
                for ask in (client.served_version, client.model_type, client.checksums, rows):
                    with pytest.raises(EngineTimeoutError, match=r"did not answer within 0\.05 s") as caught:
                        await ask()
                    assert caught.value.url == server.url
        await first.close()

    try:
        asyncio.run(body())
    finally:
        server.stop()


def test_a_weight_update_waits_for_the_token_of_a_health_check():
    is_asked, may_answer = threading.Event(), threading.Event()

    async def answer(path, body):
        if path == "/health_generate":
            is_asked.set()
            await asyncio.to_thread(may_answer.wait, 10)
        return 200, {}

    server = ScriptedServer(answer)
    engine = HttpEngine([SglangServer(server.url, SGLANG)])

    async def body():
        probe = asyncio.create_task(engine.servers[0].generation_error(10))
        await asyncio.to_thread(is_asked.wait, 10)
        found = asyncio.create_task(engine.pool.reachable())
        await asyncio.sleep(0.1)
        assert not found.done()
        may_answer.set()
        assert await found == engine.servers
        assert await probe == ""

    try:
        run(engine, body)
    finally:
        may_answer.set()
        server.stop()


def test_a_weight_update_waits_until_a_lost_server_is_stopped():
    async def body():
        lost, other = (SglangServer(f"http://127.0.0.1:{port}", SGLANG) for port in (1, 2))
        other.seen_alive_s = math.inf
        pool = ServerPool([lost, other], None, needs_router=False, is_supervised=True)
        pool.mark_lost(lost, Loss("it hangs", ENGINE_HANGS))
        looking = asyncio.create_task(pool.reachable())
        await asyncio.sleep(0.01)
        assert not looking.done()  # the router may still send it requests, which it answers with old weights
        await pool.remove(lost)  # as the supervisor does when its process is gone
        assert await looking == [other]

    asyncio.run(body())


def test_weight_commands_have_no_timeout_of_their_own(monkeypatch):
    limits: dict[str, float | None] = {}

    async def ask(self, path, body=None, *, timeout_s=CONTROL_S, **_):
        limits[path] = timeout_s
        return {}

    monkeypatch.setattr(SglangServer, "ask", ask)

    async def body():
        server = SglangServer("http://127.0.0.1:1", ServerInfo.read({}))
        await server.update_from_disk("folder", 1)
        await server.receive("group", [], 1, is_last=True)
        await server.load_shared("name", [], 1, is_last=True)
        await server.join_group(name="group", address="a", port=1, rank=1, world_size=2, backend="gloo")
        await server.pause("retract")

    asyncio.run(body())
    assert limits.pop("/pause_generation") == PAUSE_S
    assert set(limits.values()) == {None}
    assert len(limits) == 4


@pytest.mark.parametrize("mode", ["hold", "abort"])
def test_a_server_that_hangs_in_a_pause_is_lost_and_the_others_continue(mode, monkeypatch):
    monkeypatch.setattr("furlong.inference.sglang.server.PAUSE_S", 0.5)

    async def answer(path, body):
        if path != "/generate":
            await asyncio.sleep(5)
        return 200, {}

    hanging = ScriptedServer(answer)
    try:
        with scripted(lambda body: (200, reply([4]))) as (servers, engine):
            engine.pool.add(SglangServer(hanging.url, SGLANG, probe_s=0.05))

            async def body():
                await engine.pause(mode)
                assert "did not answer within 0.5 s" in engine.servers[1].lost.reason
                await engine.resume()
                return await engine.generate([1], PARAMS)

            assert run(engine, body).tokens == [4]
            assert [path for path, _ in servers[0].asked] == ["/pause_generation", "/continue_generation", "/generate"]
    finally:
        hanging.stop()


@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_server_that_ignores_a_command_is_lost_if_it_is_supervised(is_supervised, monkeypatch):
    monkeypatch.setattr("furlong.inference.sglang.server.IDLE_S", 0.05)

    async def answer(path, body):
        if path == "/flush_cache":
            await asyncio.sleep(5)
        return 200, {}

    hanging = ScriptedServer(answer)
    try:
        engine = HttpEngine([SglangServer(hanging.url, SGLANG)], is_supervised=is_supervised)

        async def body():
            [server] = engine.servers
            if not is_supervised:
                with pytest.raises(EngineTimeoutError, match=r"/flush_cache was not answered within 0\.05 s") as caught:
                    await engine.release_memory(["kv_cache"])
                assert (server.lost, caught.value.url) == (None, hanging.url)
                return
            releasing = asyncio.create_task(engine.release_memory(["kv_cache"]))
            while not server.lost:
                await asyncio.sleep(1e-3)
            assert server.lost.code == ENGINE_HANGS
            await asyncio.sleep(0.05)
            assert not releasing.done()  # its process is there still
            await engine.pool.remove(server)
            await releasing

        run(engine, body)
    finally:
        hanging.stop()
