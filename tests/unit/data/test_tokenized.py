"""Prompts that were tokenized before: the same groups as from the original, and refused where they would not be."""

from __future__ import annotations

import pytest

from data_zoo import chat_tokenizer, write_jsonl
from furlong.data.dataset import open_prompts, open_reader, open_rows
from furlong.data.prompt import PromptFormat
from furlong.data.prompt_path import PromptDataPath
from furlong.data.tokenized import write_tokenized
from furlong.errors import ConfigError, DataError

FORM = PromptFormat(label_key="label", apply_chat_template=True)
ROWS = [
    {"input": "one", "label": 12345678901234567890, "metadata": {"a": [1, {"b": None}]}},
    {"input": [{"role": "user", "content": "two"}], "label": {"x": 0.1}, "tools": [{"name": "t"}]},
    {"input": "x" * 60, "label": ""},
    {"input": "three", "label": "3"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def tokenized(tmp_path, tokenizer, rows=ROWS, form=FORM, name="tokens.parquet", **options):
    location = PromptDataPath.parse(str(write_jsonl(tmp_path / "rows.jsonl", rows)))
    reader = open_reader(location, form)
    path = tmp_path / name
    return path, write_tokenized(location, reader, path, tokenizer=tokenizer, prompt_format=form, **options)


@pytest.mark.parametrize("streaming", [False, True])
def test_tokenized_prompts_are_those_of_the_original(streaming, tmp_path, tokenizer):
    path, written = tokenized(tmp_path, tokenizer, skip_bad_rows=True)
    assert (written.num_prompts, written.num_bad) == (3, 1)
    original = open_prompts(str(tmp_path / "rows.jsonl"), tokenizer=tokenizer, prompt_format=FORM, skip_bad_rows=True)
    stored = open_prompts(str(path), tokenizer=tokenizer, prompt_format=FORM, streaming=streaming)
    for prompts in (original, stored):
        prompts.begin(None)

    def shown(prompts):
        return [(p.text, p.tokens, p.label, p.metadata, p.tools) for p in prompts.take(9)]

    want = shown(original)
    assert shown(stored) == want
    assert sum(len(tokens) for _, tokens, *_ in want) == written.num_tokens
    stored.close()


def test_limit_and_slice_apply_as_for_the_original(tmp_path, tokenizer):
    path, _ = tokenized(tmp_path, tokenizer, rows=[{"input": "x" * n, "label": "1"} for n in (1, 50, 2, 3)])
    short = PromptFormat(label_key="label", apply_chat_template=True, max_prompt_len=60)
    assert [p.row for p in open_prompts(f"{path}@[0:3]", tokenizer=tokenizer, prompt_format=short)] == [0, 2]


def test_other_settings_are_rejected_by_name(tmp_path, tokenizer):
    for form, words in [
        (PromptFormat(label_key="label"), "chat_template was"),
        (PromptFormat(apply_chat_template=True), "label_key was 'label', is None"),
        (
            PromptFormat(label_key="label", apply_chat_template=True, apply_chat_template_kwargs={"no_think": True}),
            r"apply_chat_template_kwargs was \{\}, is \{'no_think': True\}",
        ),
    ]:
        path, _ = tokenized(tmp_path, tokenizer, rows=[{"input": "a", "label": "1"}])
        with pytest.raises(ConfigError, match=words):
            open_prompts(str(path), tokenizer=tokenizer, prompt_format=form)


def test_another_tokenizer_is_rejected(tmp_path, tokenizer):
    path, _ = tokenized(tmp_path, tokenizer, rows=[{"input": "a", "label": "1"}])
    other = chat_tokenizer()
    other.add_tokens(["<new>"])
    with pytest.raises(ConfigError, match="vocabulary was"):
        open_rows(PromptDataPath.parse(str(path)), tokenizer=other, prompt_format=FORM)


def test_bad_row_is_an_error_that_leaves_no_file(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"rows.jsonl line 3: the label 'label' is empty"):
        tokenized(tmp_path, tokenizer)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]


def test_messages_that_only_a_run_can_render_are_rejected(tmp_path, tokenizer):
    form = PromptFormat(label_key="label", keep_messages=True)
    with pytest.raises(DataError, match="row 1 has messages"):
        tokenized(tmp_path, tokenizer, form=form, skip_bad_rows=True)
