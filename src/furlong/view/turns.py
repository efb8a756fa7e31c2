"""Prompts and responses as turns of a conversation, for reading."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Turn = dict[str, Any]  # role, content, and `more`: the other entries of a message
ASSISTANT, NOT_TRAINED = "assistant", "not trained"
ROLES = {"model": ASSISTANT, "human": "user", "observation": "tool"}
# The start of a turn in ChatML, Llama, Gemma, gpt-oss, GLM and Phi, and DeepSeek.
START = re.compile(
    r"<\|im_start\|>(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\s*|<start_of_turn>(\w+)\n"
    r"|<\|start\|>(\w+)(?:<\|channel\|>\w+)?<\|message\|>|<\|(system|user|assistant|observation|tool)\|>\n?"
    r"|<｜(User|Assistant)｜>"
)
END = re.compile(
    r"(?:<\|(?:im_end|eot_id|end|return|endoftext|begin_of_text)\|>|<end_of_turn>|<bos>|<s>|\[gMASK\]<sop>"
    r"|<｜end▁of▁sentence｜>|<\|start\|>assistant$)\s*"
)  # what is left out between turns


def text_of(value: Any) -> str:
    """Return a label or content as text; of a list of parts, their texts and the kinds of the others."""
    if isinstance(value, list) and all(isinstance(part, Mapping) and "type" in part for part in value):
        return "".join(str(part.get("text") or f"[{part['type']}]") for part in value)
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as text, messages one after the other."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '')}: {text_of(message.get('content', ''))}" for message in prompt)


def turns_of_messages(messages: Sequence[Any]) -> list[Turn]:
    """Return messages as turns."""
    return [
        {
            "role": str(message.get("role", "")),
            "content": text_of(message.get("content")),
            "more": {k: v for k, v in message.items() if k not in ("role", "content") and v},
        }
        for message in messages
        if isinstance(message, Mapping)
    ]


def turns_of_text(text: str, role: str = "prompt") -> list[Turn]:
    r"""Split text that a chat template rendered into turns; text before the first one has `role`. Empty ones are out.

    >>> turns_of_text("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    [{'role': 'user', 'content': 'Hi'}]
    """
    starts = list(START.finditer(text))
    ends = [start.start() for start in starts] + [len(text)]
    parts = [(role, text[: ends[0]])]
    for i, start in enumerate(starts):
        name = next(filter(None, start.groups())).lower()
        parts.append((ROLES.get(name, name), text[start.end() : ends[i + 1]]))
    turns = [{"role": name, "content": END.sub("", part) if starts else part} for name, part in parts]
    return [turn for turn in turns if turn["content"].strip()]


def prompt_turns(prompt: Any) -> list[Turn]:
    """Return the turns of a prompt: messages, or text that may be rendered."""
    return turns_of_messages(prompt) if isinstance(prompt, list) else turns_of_text(str(prompt))


def last_user_text(prompt: Any) -> str:
    """Return the last message of the user in a prompt; the whole text if it has no turns."""
    turns = prompt_turns(prompt)
    asked = [turn["content"] for turn in turns if turn["role"] == "user"]
    return asked[-1] if asked else turns[-1]["content"] if turns else ""


def response_turns(response: str, pieces: Sequence[str] | None, mask: Sequence[int]) -> list[Turn]:
    """Return the turns of a response: what the policy wrote, and what its environment added (loss mask 0).

    The policy's text is never split at markers, which it could write itself. pieces: the text of each token, None if
    it is unknown; the response is one turn then.
    """
    if pieces is None or len(pieces) != len(mask) or len(set(mask)) < 2:
        return [{"role": ASSISTANT, "content": response}]
    turns: list[Turn] = []
    start = 0
    for end in range(1, len(mask) + 1):
        if end < len(mask) and mask[end] == mask[start]:
            continue
        text = "".join(pieces[start:end])
        if mask[start]:
            turns.append({"role": ASSISTANT, "content": END.sub("", text)})
        else:
            turns += [turn for turn in turns_of_text(text, NOT_TRAINED) if END.sub("", turn["content"]).strip()]
        start = end
    return turns
