"""Applications outside of a run take sessions, set rewards, and leave."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from furlong.config.sections import RolloutFlags
from furlong.core.sample import Sample, Status
from furlong.rollout.agents import generate_online
from furlong.rollout.episodes import REISSUED
from furlong.sessions.session_offers import SessionOffers
from furlong.sessions.session_server import SessionServer
from scripted_episodes import play

USER = {"role": "user", "content": "1+2="}
Application = Callable[[httpx.AsyncClient, str], Awaitable[None]]


def serve(
    application: Application,
    *,
    idle_s: float = 30.0,
    key: str | None = None,
    rm_type: str | None = None,
    **settings: Any,
) -> Sample:
    """Play one sample, while `application` talks to the server at the address that it gets."""
    server = SessionServer(offers=SessionOffers(key))

    async def client() -> None:
        async with asyncio.timeout(20), httpx.AsyncClient(timeout=20) as http:
            await application(http, f"http://127.0.0.1:{server.address[1]}")

    args = {"custom_rm_path": None, "rm_type": rm_type, "session_idle_timeout": idle_s}
    (sample,) = play(generate_online, lambda text: "3", args=args, client=client, session_server=server, **settings)
    assert server.num_open == 0
    return sample


async def take(http: httpx.AsyncClient, address: str) -> dict[str, Any]:
    return (await http.post(f"{address}/sessions", json={"wait": 10})).raise_for_status().json()


def of(taken: dict[str, Any], key: str = "key") -> dict[str, str]:
    return {"Authorization": f"Bearer {taken[key]}"}


async def end(http: httpx.AsyncClient, taken: dict[str, Any], body: Any, key: str = "controller_key") -> httpx.Response:
    return await http.post(f"{taken['url']}/end", json=body, headers=of(taken, key))


async def ask(http: httpx.AsyncClient, taken: dict[str, Any]) -> dict[str, Any]:
    reply = await http.post(f"{taken['url']}/v1/chat/completions", json={"messages": [USER]}, headers=of(taken))
    return reply.raise_for_status().json()["choices"][0]["message"]


def test_an_application_plays_an_episode_and_sets_its_reward():
    async def application(http: httpx.AsyncClient, address: str) -> None:
        taken = await take(http, address)
        assert (taken["prompt"], taken["label"], taken["group"], taken["sample"]) == ("1+2=", 3.0, 0, 0)
        assert taken["evaluation"] is False
        assert (await ask(http, taken))["content"] == "3"
        for body, named in (
            ({}, "reward is missing"),
            ({"reward": "high"}, "reward is 'high'"),
            ({"reward": {"solver": True}}, "reward"),
            ({"reward": 1, "score": 2}, "score"),
            ({"reward": 1, "metadata": [1]}, "metadata is"),
            ({"error": 3}, "error is 3"),
        ):
            refused = await end(http, taken, body)
            assert (refused.status_code, named in refused.text) == (400, True), refused.text
        assert (await end(http, taken, {"reward": 0.75, "metadata": {"rating": "good"}})).status_code == 200
        late = await http.post(f"{taken['url']}/v1/chat/completions", json={"messages": [USER]})
        assert (late.status_code, "its episode is over" in late.text) == (410, True)
        empty = await http.post(f"{address}/sessions", json={"wait": 0})
        assert (empty.status_code, empty.json()["error"]["code"]) == (503, "no_session")

    sample = serve(application, label=3.0)
    assert (sample.status, sample.reward, sample.metadata["rating"]) == (Status.COMPLETED, 0.75, "good")
    assert sample.effective_response_length > 0


def test_a_session_that_its_application_left_expires_and_is_offered_once_more():
    held: list[Any] = []

    async def application(http: httpx.AsyncClient, address: str) -> None:
        left = await take(http, address)
        await ask(http, left)
        taken = await take(http, address)  # after the other one has expired
        assert taken["url"] != left["url"]
        late = await http.post(f"{left['url']}/v1/chat/completions", json={"messages": [USER]})
        assert (late.status_code, "--session-idle-timeout" in late.text) == (410, True)
        await ask(http, taken)
        await end(http, taken, {"reward": 1})
        gc.collect()
        assert held[0]() is None, "the conversation is in memory"

    class Recorded(SessionServer):
        def open(self, session: Any, *others: Any, **named: Any) -> Any:
            held.append(weakref.ref(session))
            return super().open(session, *others, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "SessionServer", Recorded)
        sample = serve(application, idle_s=0.6)
    assert (sample.status, sample.reward) == (Status.COMPLETED, 1.0)
    assert "--session-idle-timeout" in sample.metadata[REISSUED]


def test_an_episode_whose_application_leaves_twice_or_reports_an_error_is_not_trained_on():
    async def leaves(http: httpx.AsyncClient, address: str) -> None:
        for _ in range(2):
            await ask(http, await take(http, address))

    sample = serve(leaves, idle_s=0.3)
    assert (sample.status, sample.reward) == (Status.FAILED, None)
    assert sample.outcome is not None
    assert sample.outcome.kind == "infra"

    async def reports(http: httpx.AsyncClient, address: str) -> None:
        taken = await take(http, address)
        await ask(http, taken)
        await end(http, taken, {"error": "the user closed the window"})

    sample = serve(reports)
    assert (sample.status, sample.reward) == (Status.FAILED, None)
    assert sample.outcome is not None
    assert "closed the window" in sample.outcome.reason


def test_the_time_before_an_application_comes_is_not_part_of_the_episode():
    async def application(http: httpx.AsyncClient, address: str) -> None:
        await asyncio.sleep(0.4)
        taken = await take(http, address)
        await ask(http, taken)
        await end(http, taken, {"reward": 1})

    sample = serve(application, flags=RolloutFlags(episode_timeout=0.3, tool_timeout=0.3))
    assert (sample.status, sample.reward) == (Status.COMPLETED, 1.0)


def test_a_key_protects_the_sessions():
    async def application(http: httpx.AsyncClient, address: str) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert (await http.post(f"{address}/sessions", headers=headers)).status_code == 401
        http.headers["Authorization"] = "Bearer sesame"
        for body in ({"wait": -1}, {"wait": True}, {"count": 2}):
            assert (await http.post(f"{address}/sessions", json=body)).status_code == 400
        taken = await take(http, address)
        await ask(http, taken)
        await end(http, taken, {"reward": 1})

    assert serve(application, key="sesame").reward == 1.0


@pytest.mark.parametrize("rm_type", [None, "math"])
def test_the_agents_key_sets_no_reward_metadata_or_error_and_does_not_end_the_episode(rm_type: str | None):
    async def application(http: httpx.AsyncClient, address: str) -> None:
        taken = await take(http, address)
        await ask(http, taken)
        for body in ({"reward": 99}, {"metadata": {"label": 3}}, {"error": "a bad episode"}, {}):
            for headers in (of(taken), {"X-Api-Key": taken["key"] + ":judge"}):
                refused = await http.post(f"{taken['url']}/end", json=body, headers=headers)
                assert (refused.status_code, "controller_key" in refused.text) == (403, True)
        for headers in ({}, {"X-Api-Key": "wrong"}):
            assert (await http.post(f"{taken['url']}/end", json={"reward": 99}, headers=headers)).status_code == 401
        await end(http, taken, {"reward": 0.25})

    assert serve(application, rm_type=rm_type).reward == 0.25
