"""`furlong serve` speaks the protocols of agents, each request being a conversation of its own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from chat_zoo import TOOLS, bpe_tokenizer
from fakes_engine import tiny_engine, tiny_model
from furlong.inference.server.http_server import running_server
from furlong.sessions.served_model import served_routes

USER = {"role": "user", "content": "hi"}


def test_a_served_model_has_the_endpoints_of_agents():
    tokenizer = bpe_tokenizer("qwen")
    config, model = tiny_model("qwen3", vocab_size=416, max_position_embeddings=2048)

    async def main() -> dict[str, Any]:
        engine = tiny_engine(config, model.state_dict(), tokenizer=tokenizer)
        replies: dict[str, Any] = {}
        try:
            async with (
                running_server(engine, agents=served_routes, model_name="tiny") as url,
                httpx.AsyncClient(base_url=url, timeout=60) as client,
            ):
                requests = {
                    "/v1/chat/completions": {"messages": [USER], "tools": TOOLS, "max_tokens": 5, "seed": 1},
                    "/v1/messages": {"messages": [USER], "max_tokens": 5},
                    "/v1/messages/count_tokens": {"messages": [USER]},
                    "/v1/responses": {"input": "hi", "max_output_tokens": 5},
                    "/inference/v1/generate": {"token_ids": [40, 41], "sampling_params": {"max_tokens": 5, "seed": 1}},
                }
                for path, body in requests.items():
                    reply = await client.post(path, json=body)
                    assert reply.status_code == 200, (path, reply.text)
                    replies[path] = reply.json()
                path = "/v1/chat/completions"
                again = await client.post(path, json=requests[path])
                assert (
                    again.json()["choices"][0]["message"]["content"]
                    == replies[path]["choices"][0]["message"]["content"]
                )
                plain = await client.post(path, json={"messages": [USER], "max_tokens": 5})
                assert plain.status_code == 200
                two = {**requests[path], "n": 2, "return_token_ids": True, "temperature": 1.0}
                choices = (await client.post(path, json=two)).json()["choices"]
                assert choices[0]["token_ids"] != choices[1]["token_ids"]
                streamed = await client.post(path, json={**two, "n": 1, "max_tokens": 40, "stream": True})
                events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
                pieces = [event["choices"][0].get("token_ids", []) for event in events]
                assert sum(map(bool, pieces)) > 2
                assert [id for piece in pieces for id in piece][:5] == choices[0]["token_ids"]
                wrong = await client.post(path, json={**requests[path], "tool_choice": "sometimes"})
                assert wrong.status_code == 400
                assert "tool_choice" in wrong.json()["error"]["message"]
        finally:
            await engine.close()
        return replies

    replies = asyncio.run(main())
    assert replies["/v1/messages"]["type"] == "message"
    assert replies["/v1/messages/count_tokens"]["input_tokens"] == replies["/v1/messages"]["usage"]["input_tokens"]
    assert len(replies["/inference/v1/generate"]["choices"][0]["token_ids"]) <= 5
