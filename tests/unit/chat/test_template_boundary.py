"""Whether templates can be extended is proven on random conversations."""

from __future__ import annotations

import pytest

from chat_zoo import TEMPLATES, TOOLS, bpe_tokenizer
from furlong.chat.messages import MessageError, checked_messages
from furlong.chat.template_boundary import ChatFormat
from furlong.models.tokenizer import SHIPPED, build_tokenizer, read_template


@pytest.mark.parametrize("family", sorted(set(TEMPLATES) - {"mistral"}))
def test_templates_that_append_are_proven(family):
    assert ChatFormat(bpe_tokenizer(family)).proof().reasons == {}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_templates_are_proven(name):
    assert ChatFormat(bpe_tokenizer("qwen"), chat_template=read_template(name)).proof().reasons == {}


def test_the_template_of_the_quickstart_is_proven():
    assert ChatFormat(build_tokenizer()).proof().reasons == {}


def test_a_template_that_moves_its_tools_is_not_proven_with_tools():
    proof = ChatFormat(bpe_tokenizer("mistral")).proof()
    users = "user", "assistant", "system", "developer"  # the last two have the role user here
    assert set(proof.reasons) == {(True, role) for role in users}
    assert "AVAILABLE_TOOLS" in proof.reasons[True, "user"]
    assert proof.problem([{"role": "tool"}], has_tools=True) is None
    assert proof.problem([{"role": "user"}], has_tools=False) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
        "{% for m in messages %}[{{ m.role }}{% if loop.last %}!{% endif %}]{{ m.content }}{% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content if loop.revindex < 3 else '...' }}{% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if loop.last %} (now){% endif %}<end>{% endfor %}",
        "{% for m in messages %}[{{ m.role }}]{{ m.content if m.role != 'assistant' }}{% endfor %}",
    ],
)
def test_a_template_that_rewrites_earlier_text_is_not_proven(source):
    assert (False, "user") in ChatFormat(bpe_tokenizer("plain"), chat_template=source).proof().reasons


@pytest.mark.parametrize("family", ["qwen", "glm", "llama", "gpt_oss"])
def test_what_ends_an_answer_is_rendered_once_for_its_tools_and_kwargs(family):
    new, answer = [{"role": "user", "content": "x"}], {"role": "assistant", "content": "y"}
    kept, rendered = ChatFormat(bpe_tokenizer(family)), list[object]()
    render = kept.render
    kept.render = lambda *args, **options: rendered.append(options) or render(*args, **options)
    cases = [{}, {"tools": TOOLS}, {"kwargs": {"enable_thinking": False}}]
    for case in (*cases, *cases):
        for last in ("", kept.tokenizer.eos_token):
            fresh = ChatFormat(kept.tokenizer)
            assert kept.appended(answer, last, new, **case) == fresh.appended(answer, last, new, **case)
    assert len(rendered) == 12 + len(cases)


def test_roles_that_the_template_does_not_write_become_others():
    answer: dict[str, object] = {"role": "assistant", "content": "yes"}
    told = [{"role": "developer", "content": "Be brief."}, {"role": "developer", "content": "No lists."}]
    asked = [*told, {"role": "user", "content": "x"}, answer, {"role": "system", "content": "Now long."}]
    for family, roles in (
        ("qwen", "system user assistant system"),
        ("glm", "system user assistant system"),
        ("mistral", "system user assistant user"),
        ("plain", "developer developer user assistant system"),
    ):
        chat = ChatFormat(bpe_tokenizer(family))
        text = chat.render(asked)
        chat.check_written(text, asked, asked)
        assert all(message["content"] in text for message in asked)
        assert [message["role"] for message in chat._with_known_roles(asked)] == roles.split()
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    called = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "function", "name": "add", "content": "42"}
    assert "<tool_response>\n42" in ChatFormat(bpe_tokenizer("qwen")).render([*called, result])


def test_a_message_that_would_not_be_in_the_prompt_is_an_error():
    users = "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}"
    trimmed = "{% for m in messages %}[{{ m.content | tojson | upper }}]{% endfor %}"
    messages = [{"role": "user", "content": "x"}, {"role": "tool", "content": "a result"}]
    chat = ChatFormat(bpe_tokenizer(), chat_template=users)
    with pytest.raises(MessageError, match=r"messages\[1\] of role tool is not in the prompt.*'a result'"):
        chat.check_written(chat.render(messages), messages, messages)
    chat.check_written(chat.render(messages[:1]), messages[:1], messages[:1])
    other = ChatFormat(bpe_tokenizer(), chat_template=trimmed.replace("upper", "replace('result', 'end')"))
    other.check_written(other.render(messages), messages, messages)


def test_text_parts_reach_templates_as_sglang_sends_them():
    loop = "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m['content'] %}<{{ part.text }}>"
    loop += "{% endfor %}{% endif %}"
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    messages = checked_messages([{"role": role, "content": parts} for role in ("user", "assistant")])
    for source, text in (("{{ m.content }}", "[a b][ab]"), (loop, "[<a><b>][ab]")):
        template = "{% for m in messages %}[" + source + "]{% endfor %}"
        assert ChatFormat(bpe_tokenizer("plain"), chat_template=template).render(messages) == text
