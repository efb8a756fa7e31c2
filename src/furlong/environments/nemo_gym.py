"""`--environment nemo-gym:URL`: tools and verifier of a resources server of NeMo Gym, over HTTP.

The row of the data set of NeMo Gym is the metadata of the prompt: `responses_create_params` has input and tools, and
the whole row is sent to `/seed_session` and `/verify`. Calls go to `/NAME` of the server, in one session of cookies.
"""

from __future__ import annotations

import json
from typing import Any, cast

import httpx

from furlong.environments.protocol import Observation, Step, Task
from furlong.errors import InfraError, RolloutError

TIMEOUT_S = 120.0


class NemoGym:
    """One session of a resources server. target: its URL."""

    def __init__(self, target: str, timeout_s: float = TIMEOUT_S) -> None:
        self._client = httpx.AsyncClient(base_url=target, timeout=timeout_s)
        self._target = target
        self._row: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []

    async def reset(self, task: Task, seed: int) -> Observation:
        """Open a session for the row. Raises RolloutError if the row has no `responses_create_params`."""
        del seed
        self._row = dict(task.metadata)
        params: Any = self._row.get("responses_create_params")
        if not isinstance(params, dict):
            raise RolloutError(
                f"nemo-gym:{self._target}: metadata.responses_create_params is {type(params).__name__}; make "
                'the rows of the data {"input": "", "metadata": ROW} with the rows of NeMo Gym'
            )
        fields = cast("dict[str, Any]", params)
        await self._post("/seed_session", self._row)
        asked: Any = fields.get("input") or []
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        if fields.get("instructions"):
            messages.insert(0, {"role": "system", "content": fields["instructions"]})
        tools = [
            {
                "type": "function",
                "function": {key: value for key, value in tool.items() if key not in ("type", "strict")},
            }
            for tool in cast("list[dict[str, Any]]", fields.get("tools") or [])
        ]
        return Observation(messages, tools or None)

    async def step(self, message: Any) -> Step:
        """Run the calls of a reply; verify the episode after a reply without calls."""
        content = str(message.get("content") or "")
        if content:
            part = {"type": "output_text", "text": content, "annotations": []}
            item = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
            self._output.append({"id": f"msg_{len(self._output)}", **item})
        results: list[dict[str, Any]] = []
        for call in cast("list[dict[str, Any]]", message.get("tool_calls") or []):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            fields = {"name": name, "arguments": arguments, "call_id": call["id"]}
            self._output.append({"type": "function_call", **fields})
            answer = await self._call(name, arguments)
            self._output.append({"type": "function_call_output", "call_id": call["id"], "output": answer})
            results.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
        if results:
            return Step(results)
        verified = await self._post("/verify", {**self._row, "response": self._response()})
        numbers = {key: value for key, value in verified.items() if isinstance(value, bool | int | float)}
        return Step(reward=float(verified["reward"]), done=True, info=numbers)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _response(self) -> dict[str, Any]:
        params: dict[str, Any] = self._row["responses_create_params"]
        return {
            "id": "resp_0", "object": "response", "created_at": 0.0, "model": "policy", "output": self._output,
            "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)), "tool_choice": "auto",
            "tools": params.get("tools") or [],
        }  # fmt: skip

    async def _call(self, name: str, arguments: str) -> str:
        """Return what a tool answers; its refusal of the arguments is text for the policy."""
        try:
            fields: Any = json.loads(arguments)
        except ValueError:
            return f"the arguments are not JSON: {arguments[:200]}"
        known = {tool["name"] for tool in self._row["responses_create_params"].get("tools") or []}
        if name not in known:
            return f"there is no tool {name}"
        answer = await self._post(f"/{name}", fields, refusals=True)
        return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)

    async def _post(self, path: str, body: Any, *, refusals: bool = False) -> Any:
        try:
            reply = await self._client.post(path, json=body)
        except httpx.HTTPError as error:
            raise InfraError(f"the NeMo Gym server {self._target} failed: {type(error).__name__}: {error}") from error
        if refusals and 400 <= reply.status_code < 500:
            return reply.text[:1000]
        if reply.status_code != 200:
            raise InfraError(f"POST {self._target}{path} answered {reply.status_code}: {reply.text[:300]}")
        return reply.json()
