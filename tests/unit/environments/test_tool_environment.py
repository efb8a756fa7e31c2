from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from furlong.environments import Task, ToolEnvironment
from furlong.errors import ConfigError, InfraError


def shout(text: str) -> str:
    """Return the text in capitals.

    Args:
        text: what to shout
    """
    return text.upper()


class Tools(ToolEnvironment):
    tool_timeout_s = 30.0
    max_output_chars = 12

    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers.

        Args:
            a: the first number
            b: the second number
        """
        self.thread = threading.current_thread()
        return a + b

    async def wait(self) -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return ""

    def lost(self) -> None:
        """Fail as a sandbox does."""
        raise InfraError("the sandbox is gone")

    tools = (add, wait, lost, shout)


def call(name: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


def answers(env: ToolEnvironment, *calls: dict[str, Any]) -> list[str]:
    step = asyncio.run(env.step({"role": "assistant", "content": None, "tool_calls": list(calls)}))
    assert not step.done
    assert [message["tool_call_id"] for message in step.messages] == [each["id"] for each in calls]  # pyright: ignore
    return [message["content"] for message in step.messages]  # pyright: ignore


def test_methods_and_functions_become_schemas():
    observation = Tools().reset(Task("1+1=", tools=[{"type": "function"}]), 0)
    assert observation.tools is not None
    names = [tool.get("function", {}).get("name") for tool in observation.tools]
    assert names == ["add", "wait", "lost", "shout", None]
    assert observation.tools[0]["function"]["parameters"]["required"] == ["a"]
    assert observation.messages == [{"role": "user", "content": "1+1="}]
    prompt = [{"role": "user", "content": "1+1="}]
    Task(prompt).messages.append({})
    assert len(prompt) == 1, "environments append to a copy"


def test_calls_are_answered_in_order_and_functions_run_in_a_thread():
    env = Tools()
    assert answers(env, call("add", '{"a": 2}'), call("shout", '{"text": "hi"}')) == ["3", "HI"]
    assert env.thread is not threading.main_thread()


def test_what_goes_wrong_is_text_for_the_policy_and_counted():
    env = Tools()
    env.tool_timeout_s = 0.5  # pyright: ignore
    env.max_output_chars = 1000  # pyright: ignore
    wrong = [call("sub"), call("add"), *(call("add", each) for each in ("not JSON", "[1]", '{"a": "x"}')), call("wait")]
    texts = answers(env, *wrong)
    assert all(text.startswith("Error: ") for text in texts)
    for text, part in zip(texts, ("add, wait", "'a'", "JSON", "list", "TypeError", "0.5 s"), strict=True):
        assert part in text
    step = asyncio.run(env.step({"role": "assistant", "content": "done"}))
    assert step.done
    assert step.info == {"tool_calls": 6, "tool_errors": 6}


def test_long_output_is_cut():
    assert answers(Tools(), call("shout", json.dumps({"text": "x" * 50}))) == ["X" * 12 + "... (50 characters, cut)"]


def test_lost_infrastructure_ends_the_episode():
    with pytest.raises(InfraError):
        answers(Tools(), call("lost"))


def test_a_tool_without_a_description_is_refused():
    class Bare(ToolEnvironment):
        def add(self, a: int) -> int:
            return a

        tools = (add,)

    with pytest.raises(ConfigError, match="add"):
        Bare().tool_schemas()
