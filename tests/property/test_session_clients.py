"""Random clients of a session: whatever they send, each sampled token is trained once, in the context of its call."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
import random
from typing import Any

import httpx
import pytest

from chat_zoo import TOOLS, Script, bpe_tokenizer
from furlong.chat.messages import checked_messages
from furlong.core.sample import Sample
from furlong.sessions.open_session import OpenSession
from furlong.sessions.samples import samples_from_session
from served_sessions import run

WORDS = ("the cat", " sat on", "on the mat", "42", "élan", "  ", "\n", "日本", "{", "one two", "a\tb", "<b>", "🙂", "…")
CALLS = {
    "qwen": '<tool_call>\n{{"name": "add", "arguments": {{"a": {0}, "b": 2}}}}\n</tool_call>',
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{0}</arg_value>\n</tool_call>",
}
Messages = list[dict[str, Any]]
SEEDS = range(int(os.environ.get("FURLONG_CLIENT_SEEDS", "3")))


def text(draw: random.Random) -> str:
    return "x" + "".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 5))) + "z"


class Answers(Script):
    """Answers with random texts, random ids, one to three tool calls, or texts that are cut."""

    def __init__(self, family: str, draw: random.Random, vocab_size: int) -> None:
        super().__init__(bpe_tokenizer(family, vocab_size))
        self.family, self.draw = family, draw

    async def __call__(self, *arguments: Any) -> Any:
        kind = self.draw.choice(("text", "text", "ids", "calls", "cut"))
        answer: str | list[int] = text(self.draw)
        if kind == "ids":
            ids = self.draw.choices(range(30, len(self.tokenizer) - 6), k=self.draw.randrange(1, 6))
            answer = [*ids, self.tokenizer.convert_tokens_to_ids(self.end)]
        elif kind == "calls" and self.family in CALLS:
            calls = [CALLS[self.family].format(self.draw.randrange(9)) for _ in range(self.draw.randrange(1, 4))]
            answer = "\n".join([str(answer), *calls])
        elif kind == "cut":
            answer = f"{answer}..."
        self.answers.append(answer)
        return await super().__call__(*arguments)


class Client:
    """Keeps a conversation, and sends it in one of many ways."""

    def __init__(self, http: httpx.AsyncClient, opened: OpenSession, draw: random.Random, *, has_tools: bool) -> None:
        self.http, self.url, self.draw = http, f"{opened.url}/v1/chat/completions", draw
        self.tools: dict[str, Any] = {"tools": TOOLS} if has_tools else {}
        self.messages: Messages = [{"role": "user", "content": text(draw)}]

    async def turn(self) -> None:
        await getattr(self, self.draw.choice(("ask", "ask", "ask", "several", "twice", "retry", "leave", "stream")))()
        self.messages = getattr(
            self, self.draw.choice(("keep", "keep", "keep", "system", "edit", "edit_answer", "compact", "reformat"))
        )()

    async def _post(self, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        reply = await self.http.post(
            self.url, json={"messages": self.messages, **self.tools, **fields}, headers=headers
        )
        assert reply.status_code in (200, 400), reply.text
        if reply.status_code == 400:
            assert reply.json()["error"]["code"] == "context_length_exceeded" or "template" in reply.text, reply.text
        return reply

    def _continue(self, reply: httpx.Response) -> None:
        if reply.status_code != 200:
            self.messages = [{"role": "user", "content": text(self.draw)}]
            return
        message = self.draw.choice(reply.json()["choices"])["message"]
        self.messages.append(message)
        results: Messages = [
            {"role": "tool", "tool_call_id": call["id"], "content": text(self.draw)}
            for call in message.get("tool_calls", ())
        ]
        self.draw.shuffle(results)
        self.messages += results or [{"role": "user", "content": text(self.draw)}]

    async def ask(self) -> None:
        self._continue(await self._post())

    async def several(self) -> None:
        self._continue(await self._post(n=self.draw.randrange(2, 4)))

    async def twice(self) -> None:
        _, second = await asyncio.gather(self._post(), self._post())
        self._continue(second)

    async def retry(self) -> None:
        first = await self._post()
        second = await self._post(headers={"x-stainless-retry-count": "1"})
        if first.status_code == 200:
            assert first.json()["choices"] == second.json()["choices"], "a retry"
        self._continue(second)

    async def leave(self) -> None:
        """Leave during the stream, then ask for the whole answer."""
        body = {"messages": self.messages, **self.tools, "stream": True}
        async with self.http.stream("POST", self.url, json=body) as reply:
            lines = reply.aiter_lines()
            for _ in range(self.draw.randrange(1, 4)):
                await anext(lines, None)
        self._continue(await self._post())

    async def stream(self) -> None:
        reply = await self.http.post(self.url, json={"messages": self.messages, **self.tools, "stream": True})
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"] for line in lines for choice in json.loads(line).get("choices", ())]
        content = "".join(delta.get("content") or "" for delta in deltas)
        if reply.status_code == 200:
            self.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": text(self.draw)}]

    def keep(self) -> Messages:
        return self.messages

    def system(self) -> Messages:
        rest = [message for message in self.messages if message["role"] != "system"]
        return [{"role": "system", "content": text(self.draw)}, *rest]

    def edit(self) -> Messages:
        return self._edited("user")

    def edit_answer(self) -> Messages:
        return self._edited("assistant")

    def _edited(self, role: str) -> Messages:
        edited = copy.deepcopy(self.messages)
        if chosen := [message for message in edited if message["role"] == role and isinstance(message["content"], str)]:
            self.draw.choice(chosen)["content"] += " changed"
        return edited

    def compact(self) -> Messages:
        if any(message["role"] == "tool" for message in self.messages):
            return [{"role": "user", "content": text(self.draw)}]
        return self.messages[-1:] if self.draw.random() < 0.5 else [*self.messages[:1], *self.messages[-2:]]

    def reformat(self) -> Messages:
        changed = copy.deepcopy(self.messages)
        for message in changed:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            if message["role"] == "user" and isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        return changed


def trained_once(opened: OpenSession, script: Answers) -> None:
    """Check the samples of a session."""
    tree = opened.session.tree
    samples = samples_from_session(opened.session, Sample(index=0))  # compares contexts and ids with the engine's
    kept = {id(node): node for leaf in tree.leaves() for node in leaf.path}
    assert sum(sum(sample.loss_mask or ()) for sample in samples) == sum(len(node.sampled) for node in kept.values())
    for node in tree.nodes:
        assert id(node) in kept or not node.is_delivered, "an answer that its client has is not trained"
        prompt = node.ids()[: node.num_ids - len(node.sampled)]
        assert prompt in script.asked


async def play(draw: random.Random, script: Answers, http: httpx.AsyncClient, opened: OpenSession) -> None:
    """Run a client for eight turns, and check what would be trained."""
    opened.session.context_len = 2000
    client = Client(http, opened, draw, has_tools=draw.random() < 0.5)
    for _ in range(8):
        await client.turn()
    while any(not each.task.done() for each in opened.requests.values()):
        await asyncio.sleep(0.005)
    trained_once(opened, script)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "vocab_size"), [("qwen", 700), ("glm", 400), ("llama", 340), ("plain", 1000)])
def test_each_sampled_token_is_trained_once(family: str, vocab_size: int):
    for seed in SEEDS:
        draw = random.Random(f"{family} {seed}")
        run(script := Answers(family, draw, vocab_size), functools.partial(play, draw, script))


def test_a_conversation_that_is_kept_is_read_as_the_template_renders_it():
    draw = random.Random(5)
    script = Answers("plain", draw, 1000)

    async def body(http: httpx.AsyncClient, opened: OpenSession) -> None:
        client, chat = Client(http, opened, draw, has_tools=False), opened.session.chat_format
        for _ in range(4):
            rendered = chat.render(checked_messages(client.messages))
            await client.ask()
            read = chat.decode(script.asked[-1])
            assert [part.strip() for part in read.split("\n")] == [part.strip() for part in rendered.split("\n")]

    run(script, body)
