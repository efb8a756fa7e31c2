"""Chat templates in the style of model families, a BPE tokenizer that changes ids in a round trip, and scripts."""

# ruff: noqa: E501  templates have long lines

from __future__ import annotations

import asyncio
import functools
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from furlong.core.token_stream import TokenStream
from furlong.interfaces import Completion, SamplingParams

SPECIALS = (
    *(
        "<|pad|>",
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
    ),
    *("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "[INST]", "[/INST]", "</s>"),
    *("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

QWEN = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}# Tools
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>
{{ m.reasoning_content or '' }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
{%- if call.function %}{% set call = call.function %}{% endif %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
GLM = """{%- if tools %}<|system|>
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'system' %}<|system|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
<think></think>
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value }}</arg_value>{% endfor %}
</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- endif %}"""
LLAMA = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif -%}
<|start_header_id|>system<|end_header_id|>

{{ system }}
{%- if tools %}{% for tool in tools %}

{{ tool | tojson }}{% endfor %}
Respond with {"name": function name, "parameters": {}}{% endif %}<|eot_id|>
{%- for m in messages %}
{%- if m.tool_calls %}<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
MISTRAL = """{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{{ call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]</s>
{%- elif m.role == 'assistant' %} {{ m.content }}</s>
{%- elif m.role == 'tool' %}[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.role == 'system' and loop.first %}[INST]{{ m.content }}[/INST]
{%- else %}{{ raise_exception('unsupported role ' + m.role) }}{% endif %}{% endfor %}"""
GPT_OSS = """{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}
{%- elif m.role == 'tool' %}<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {"qwen": QWEN, "glm": GLM, "llama": LLAMA, "mistral": MISTRAL, "gpt_oss": GPT_OSS, "plain": PLAIN}
ENDS = {"qwen": "<|im_end|>", "glm": "<|user|>", "llama": "<|eot_id|>", "mistral": "</s>", "gpt_oss": "<|return|>"}
ENDS["plain"] = "<|im_end|>"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]

_CORPUS = (
    "the cat sat on the mat and the dog ate the ham; one two three four five six seven eight nine ten\n"
    "You are a helpful assistant. user system tool role content function name arguments parameters type object\n"
    "what is the sum of 12 and 30? the answer is 42. call the tool with a and b. hello there, thanks. "
)


@functools.cache
def bpe_tokenizer(template: str = "plain", vocab_size: int = 400) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: few random id sequences survive decoding and encoding again."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([_CORPUS] * 4, trainer)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=ENDS[template],
        pad_token="<|pad|>",
        additional_special_tokens=list(SPECIALS),
        chat_template=TEMPLATES[template],
        clean_up_tokenization_spaces=False,
    )


class Script:
    """Completes prompts with scripted texts (or ids) in turn, and records what it was asked."""

    def __init__(self, tokenizer: Any, *answers: str | list[int], end: str | None = None) -> None:
        self.tokenizer, self.answers, self.asked = tokenizer, list(answers), list[list[int]]()
        self.parts: list[int | None] = []
        self.end = tokenizer.eos_token if end is None else end
        self.version, self.token_s = 0, 0.0
        self.before_last: asyncio.Event | None = None  # the last token waits for it

    async def __call__(
        self, ids: list[int], params: SamplingParams, part: int | None = None, stream: TokenStream | None = None
    ) -> Completion:
        answer = self.answers[len(self.asked)]
        self.asked.append(list(ids))
        self.parts.append(part)
        reason = "stop"
        if isinstance(answer, str):
            reason = "length" if answer.endswith("...") else "stop"
            answer = self.tokenizer.encode(answer + ("" if reason == "length" else self.end), add_special_tokens=False)
        n = len(answer)
        text = self.tokenizer.decode(answer)
        log_probs = [-0.5 - 0.001 * i for i in range(n)]
        for i in range(n if stream is not None else 0):
            assert stream is not None
            if self.before_last is not None and i == n - 1:
                await self.before_last.wait()
            if stream.is_stopped:
                return Completion(answer[:i], log_probs[:i], [self.version] * i, "abort")
            stream.put(i, answer[i : i + 1], log_probs[i : i + 1])
            await asyncio.sleep(self.token_s)
        return Completion(list(answer), log_probs, [self.version] * n, reason, text)  # pyright: ignore[reportArgumentType]
