"""The calculator agent as a program that does not import furlong: `--agent-command "python program.py"`."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from typing import Any

MAX_CALLS = 2


def ask(messages: list[Any]) -> dict[str, Any]:
    """Return the reply of an OpenAI endpoint."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url, body = f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps({"messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


messages: list[Any] = [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]
for _ in range(1 + MAX_CALLS):
    message = ask(messages)
    call = re.fullmatch(r"\[(\d+)\+(\d+)\]", message["content"])
    if call is None:
        break
    messages += [message, {"role": "user", "content": str(int(call[1]) + int(call[2]))}]
