"""Chat templates: rewritten history, ends of turns, prompts templated twice, and the shipped templates."""

from __future__ import annotations

import json

import pytest

from data_zoo import chat_tokenizer, write_jsonl
from furlong.cli import main
from furlong.errors import ConfigError, DataError
from furlong.models.tokenizer import SHIPPED, build_tokenizer, read_template
from furlong.rollout.sft import conversation_tokens
from furlong.tools.template_test import (
    CONVERSATIONS,
    Template,
    prompt_findings,
    rewriting_findings,
    stop_findings,
    suggested_template,
)

# A format like Qwen3's: thinking is kept only behind the last user, and `enable_thinking` closes it in the prompt.
FORGETFUL = """
{%- set last = namespace(user=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set last.user = messages.index(m) -%}{%- endfor -%}
{%- for m in messages -%}
  {{- '<|im_start|>' + m.role + '\\n' -}}
  {%- if m.role == 'assistant' and loop.index0 > last.user -%}
    {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}
  {%- endif -%}
  {{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def test_shipped_templates_only_append(tokenizer):
    for name in SHIPPED:
        trials = Template(tokenizer, read_template(name)).trials(("on",) if "thinking" in name else ("on", "off"))
        assert [trial for trial in trials if trial.verdict != "ok"] == [], name


def test_the_turn_that_is_rewritten_is_named_with_both_renderings(tokenizer):
    trials = Template(tokenizer, FORGETFUL).trials()
    found = {(t.conversation, t.thinking): t for t in trials}
    assert found["one turn", "on"].verdict == "ok"
    rewriting = found["thinking, several turns", "on"].rewriting
    assert (rewriting.message, rewriting.role, rewriting.num_messages) == (2, "assistant", 3)
    assert "<think>" in rewriting.before
    assert "<think>" not in rewriting.after
    assert rewriting.before[: rewriting.before.index("<think>")] == rewriting.after[: rewriting.before.index("<think>")]


def test_finding_names_the_first_difference_and_the_shipped_template(tokenizer):
    trials = Template(tokenizer, FORGETFUL).trials()
    (finding,) = rewriting_findings(trials, name="the template", suggested="qwen3-append-only")
    assert finding.id == "TPL02"
    assert "message 2 (assistant)" in finding.finding
    assert finding.evidence["suggested"] == "qwen3-append-only"
    assert "--chat-template-path qwen3-append-only" in finding.remedy
    assert rewriting_findings(Template(build_tokenizer()).trials(), name="x", suggested=None) == []


def test_template_that_refuses_every_conversation_is_found(tokenizer):
    (finding,) = rewriting_findings(
        Template(tokenizer, "{{ raise_exception('no') }}").trials(), name="it", suggested=None
    )
    assert finding.id == "TPL02"
    assert "11 conversations" in finding.finding


def test_a_template_is_suggested_only_where_conversations_begin_alike():
    tokenizer = chat_tokenizer()
    assert suggested_template(tokenizer) is None  # another format
    for name in ("qwen3-append-only", "qwen3-thinking-append-only", "glm45-append-only"):
        # Begins as the shipped one and forgets all turns but the last: what the family's own template does, made worse.
        forgets = "{%- if messages | length > 3 -%}{%- set messages = messages[-2:] -%}{%- endif -%}"
        tokenizer.chat_template = forgets + read_template(name)
        assert suggested_template(tokenizer) == name
    tokenizer.chat_template = None
    assert suggested_template(tokenizer) is None


def test_thinking_inside_the_text_is_separated_from_the_answer(tokenizer):
    template = Template(tokenizer, read_template("qwen3-append-only"))
    user = {"role": "user", "content": "q"}
    inside = {"role": "assistant", "content": "<think>\nbecause\n</think>\n\n42"}
    apart = {"role": "assistant", "content": "42", "reasoning_content": "because"}
    assert template.render([user, inside]) == template.render([user, apart])
    assert template.render([user, inside]).endswith("<think>\nbecause\n</think>\n\n42<|im_end|>\n")


def test_parts_other_than_text_are_refused(tokenizer):
    import jinja2

    image = [{"role": "user", "content": [{"type": "image", "image": "x"}]}]
    for name in SHIPPED:
        with pytest.raises(jinja2.TemplateError, match="image"):
            Template(tokenizer, read_template(name)).render(image)


@pytest.fixture
def folder(tmp_path):
    """A model folder with what the command reads: config and tokenizer."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": None}))
    return tmp_path


def test_end_of_turn_that_is_not_a_stop_token_is_detected(folder):
    tokenizer = build_tokenizer()
    assert stop_findings(tokenizer, folder, Template(tokenizer)) == []
    tokenizer.eos_token = "<|endoftext|>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    (finding,) = stop_findings(tokenizer, folder, Template(tokenizer))
    assert finding.id == "STOP01"
    assert f"<|im_end|> ({end})" in finding.finding
    assert f"--rollout-stop-token-ids {end}" in finding.remedy
    assert stop_findings(tokenizer, folder, Template(tokenizer), stop_token_ids=[end]) == []
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    assert stop_findings(tokenizer, folder, Template(tokenizer)) == []


def test_a_turn_that_ends_with_the_next_one_needs_its_tokens_as_stops(folder):
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|observation|>"]})
    template = Template(tokenizer, read_template("glm45-append-only"))
    (finding,) = stop_findings(tokenizer, folder, template)
    ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    assert finding.evidence["ends_of_turn"] == ends
    assert stop_findings(tokenizer, folder, template, stop_token_ids=ends) == []


def test_turn_without_a_token_at_its_end_is_a_warning(folder):
    tokenizer = build_tokenizer()
    template = Template(tokenizer, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}")
    (finding,) = stop_findings(tokenizer, folder, template)
    assert (finding.id, finding.severity) == ("STOP01", "warning")
    assert "--rollout-stop 'user:'" in finding.remedy  # without the user's text
    assert stop_findings(tokenizer, folder, template, stop=["user:"]) == []


def test_a_template_that_drops_answers_gives_no_stop_text(folder):
    for template in (
        "{% for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}",
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}\n{% endif %}{% endfor %}",
    ):
        tokenizer = build_tokenizer()
        (finding,) = stop_findings(tokenizer, folder, Template(tokenizer, template))
        assert (finding.id, finding.severity) == ("STOP01", "info")
        assert "<|im_end|>" in finding.finding
        assert "--rollout-stop" not in finding.remedy
        tokenizer.eos_token = None
        (finding,) = stop_findings(tokenizer, folder, Template(tokenizer, template))
        assert (finding.severity, "--rollout-stop-token-ids N" in finding.remedy) == ("warning", True)
        assert "furlong-question" not in finding.remedy


def test_prompts_that_were_rendered_before_are_found(tokenizer):
    (finding,) = prompt_findings(["<|im_start|>user\nhi<|im_end|>\n"], tokenizer, name="data.jsonl")
    assert finding.id == "TPL01"
    assert "remove --apply-chat-template" in finding.remedy
    assert prompt_findings(["hi"], tokenizer, name="data.jsonl") == []


def test_command_finds_all_three_and_prints_json(folder, capsys):
    (folder / "forgetful.jinja").write_text(FORGETFUL.replace("<|im_end|>", "<|unk|>"))
    data = write_jsonl(folder / "prompts.jsonl", [{"q": "<|im_start|>user\nhi"}])
    words = ["template", "check", "--hf-checkpoint", str(folder), "--template", str(folder / "forgetful.jinja")]
    assert main([*words, "--prompt-data", str(data), "--input-key", "q", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [f["id"] for f in found["findings"]] == ["TPL02", "STOP01", "TPL01"]
    assert {t["conversation"] for t in found["trials"]} == {c.name for c in CONVERSATIONS}


def test_command_reports_templates_that_render_nothing(folder, capsys):
    texts = {
        "{% for": "line 1",
        "{{ raise_exception('no') }}": "cannot render a user message",
    }
    for text, problem in texts.items():
        (folder / "broken.jinja").write_text(text)
        words = ["template", "check", "--hf-checkpoint", str(folder), "--template", str(folder / "broken.jinja")]
        assert main(words) == 1
        assert problem in capsys.readouterr().err


def test_command_refuses_invalid_arguments(folder, capsys):
    for words in (["--chat-template-kwargs", "[1]"], ["--chat-template-kwargs", "{"], ["--template", "x"]):
        assert main(["template", "check", "--hf-checkpoint", str(folder), *words]) == 2
        assert words[1] in capsys.readouterr().err


def test_demonstrations_name_the_shipped_template():
    tokenizer = chat_tokenizer()
    messages = CONVERSATIONS[2].messages
    with pytest.raises(DataError, match="--chat-template-path qwen3-append-only only appends"):
        conversation_tokens(messages, tokenizer, chat_template=FORGETFUL, suggest_template=lambda: "qwen3-append-only")
    text = read_template("qwen3-append-only")
    tokens, mask = conversation_tokens(messages, tokenizer, chat_template=text)
    learned = tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])
    assert learned.startswith("<think>\n7 + 5 is 12, so 42.\n</think>\n\n42<|im_end|>")


def test_file_or_name_is_read_and_anything_else_is_an_error(tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert read_template(str(tmp_path / "own.jinja")) == "{{ messages }}"
    with pytest.raises(ConfigError, match="qwen3-append-only"):
        read_template("qwen3")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary"):
        read_template(str(tmp_path / "binary"))


def test_command_accepts_a_template_that_only_appends(folder, capsys):
    assert main(["template", "check", "--hf-checkpoint", str(folder), "--thinking", "on", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert ([trial["verdict"] for trial in result["trials"]], result["findings"]) == (["ok"] * len(CONVERSATIONS), [])
    assert main(["template", "list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(SHIPPED)
    assert main(["template", "show", "glm45-append-only"]) == 0
    assert "[gMASK]<sop>" in capsys.readouterr().out
