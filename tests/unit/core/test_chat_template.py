from __future__ import annotations

import json

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from furlong.core.chat_template import apply_template, template_messages


class Template:
    """A tokenizer that renders with a template."""

    def __init__(self, source: str) -> None:
        self.chat_template = source

    def apply_chat_template(self, messages, **options):
        del options
        return jinja2.Template(self.chat_template).render(messages=messages)


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
SERIALIZES = CALLS.replace("CALL", "{{ c.function.arguments | tojson }}")
ITERATES = CALLS.replace("CALL", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}")
APPENDS = CALLS.replace("CALL", "{{ '<' + c.function.arguments + '>' }}")
TESTS = CALLS.replace("CALL", "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}?{% endif %}")


def turn(arguments) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_arguments_reach_each_kind_of_template_in_its_form():
    for source, rendered in [(SERIALIZES, '{"a": 1}'), (ITERATES, "a=1;"), (APPENDS, '<{"a":1}>'), (TESTS, '{"a":1}')]:
        assert apply_template(Template(source), [turn('{"a":1}')]) == rendered


def test_arguments_that_are_no_json_object_stay_text():
    for arguments, rendered in [("not json", '"not json"'), ("", "{}"), ("[1]", '"[1]"')]:
        assert apply_template(Template(SERIALIZES), [turn(arguments)]) == rendered


def test_an_error_of_the_template_itself_propagates():
    with pytest.raises(TypeError):
        apply_template(Template("{{ 1 + 'a' }}"), [{"role": "user", "content": "x"}])


JSON = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=5), st.booleans()), max_size=3)


@given(arguments=JSON, content=st.one_of(st.none(), st.text(max_size=5)))
def test_messages_are_copied_and_decoded_once(arguments, content):
    messages = [{**turn(json.dumps(arguments)), "content": content}]
    before = json.dumps(messages)
    [message] = once = template_messages(messages)
    assert message["content"] == (content or "")
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    assert template_messages(once) == once
    assert json.dumps(messages) == before
