"""A model's own chat template is rendered once with limits of time and memory before it is used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from furlong.errors import ConfigError
from furlong.models import template_trial
from furlong.models.template_trial import require_bounded_template
from furlong.models.tokenizer import CHAT_TEMPLATE, build_tokenizer

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BIG = "{{ 'x' * 2000000000 }}"
DOUBLING = (
    "{% set ns = namespace(s='xxxx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
)


def tokenizer_with(source):
    return SimpleNamespace(chat_template=source, special_tokens_map={"eos_token": "</s>"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (BIG, "it needs more than 536870912 bytes of memory"),
        (DOUBLING, "it needs more than 536870912 bytes of memory"),
        ("{{ 'x' * 20000000 }}", "its text has 20000000 characters"),
        ("{% if tools %}" + BIG + "{% endif %}", "bytes of memory"),
        ({"default": CHAT_TEMPLATE, "tool_use": BIG}, "bytes of memory"),
    ],
)
def test_a_template_beyond_the_limits_is_refused_by_name(source, words):
    with pytest.raises(ConfigError, match=rf"template of /models/m is not usable: .*{words}.*--chat-template-"):
        require_bounded_template(tokenizer_with(source), "/models/m")


@pytest.mark.slow
def test_a_template_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(template_trial, "TRIAL_S", 1)
    with pytest.raises(ConfigError, match=r"m is not usable: it (ran longer than 1 s|gave no text within 3 s)"):
        require_bounded_template(tokenizer_with(LOOP), "/models/m")


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        None,
        CHAT_TEMPLATE,
        CHAT_TEMPLATE + "{{ eos_token + '!' }}",
        "{{ raise_exception('no system message') }}",
        "{% for m in messages %}{{ m.content",  # reported with its line where it is used
    ],
)
def test_other_templates_pass(source):
    require_bounded_template(tokenizer_with(source), "/models/m")


@pytest.mark.slow
def test_a_tokenizer_of_transformers_is_tried():
    tokenizer = build_tokenizer()
    require_bounded_template(tokenizer, "it")
    tokenizer.chat_template = BIG
    with pytest.raises(ConfigError, match="the chat template of it "):
        require_bounded_template(tokenizer, "it")
