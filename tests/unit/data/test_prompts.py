from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_zoo import chat_tokenizer, numbered_rows, write_jsonl
from furlong.data.dataset import open_prompts
from furlong.data.prompt import PromptFormat, double_template_problem, message_problem
from furlong.data.source import PromptTable
from furlong.errors import ConfigError, DataError

TOKENIZER = chat_tokenizer()
LABELED = PromptFormat(label_key="label")


def table(path: Path | str, prompt_format: PromptFormat = LABELED, **options: Any) -> PromptTable:
    prompts = open_prompts(str(path), tokenizer=TOKENIZER, prompt_format=prompt_format, **options)
    assert isinstance(prompts, PromptTable)
    return prompts


def draw(path: Path, prompt_format: PromptFormat, *, streaming: bool) -> None:
    prompts = open_prompts(str(path), tokenizer=TOKENIZER, prompt_format=prompt_format, streaming=streaming)
    prompts.begin(None)
    prompts.take(9)


def test_importing_the_data_layer_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, furlong.data.source, furlong.data.custom_source, furlong.data.audit, furlong.data.ledger; "
        "sys.exit(len({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_become_prompts_with_tokens_label_and_metadata(tmp_path: Path) -> None:
    prompts = table(write_jsonl(tmp_path / "a.jsonl", [*numbered_rows(3), "", "  "]))
    assert [p.label for p in prompts] == ["0", "1", "2"]
    assert TOKENIZER.decode(prompts[2].tokens) == prompts[2].text == "xx2"
    assert prompts[1].metadata == {"n": [1]}


def test_every_format_gives_the_same_prompts(tmp_path: Path) -> None:
    rows = [
        {
            "input": [
                {"role": "user", "content": f"hi {i}"},
                *([{"role": "x", "content": "y", "name": "z"}] * (i % 2)),
            ],
            "label": str(i),
            "metadata": {"a": i},
            "tools": [{"type": "function", "function": {"name": f"f{i}"}}],
        }
        for i in range(30)
    ]
    fmt = PromptFormat(label_key="label", apply_chat_template=True)
    jsonl = table(write_jsonl(tmp_path / "a.jsonl", rows), fmt)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    parquet = table(tmp_path / "a.parquet", fmt)
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).select(range(30)).save_to_disk(str(tmp_path / "folder"), num_shards=3)
    arrow = table(tmp_path / "folder", fmt)
    assert list(jsonl) == list(parquet) == list(arrow)
    assert "name" not in json.dumps(jsonl[0].text)


def test_a_key_of_an_object_is_a_column(tmp_path: Path) -> None:
    rows = [
        {"input": "1+1=", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra": [0] * 9},
        {"input": "2+2=", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra": [1] * 9},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "a.parquet"):
        fmt = PromptFormat(label_key="reward_model.ground_truth")
        assert [prompt.label for prompt in table(path, fmt)] == ["2", "4"]
        missing = re.escape("no key 'reward_model.truth'; the row has ['extra', 'input', 'reward_model']")
        with pytest.raises(DataError, match=missing if path.suffix == ".jsonl" else "no key 'reward_model.truth'"):
            table(path, PromptFormat(label_key="reward_model.truth"))
        with pytest.raises(DataError, match=re.escape("the row has ['extra', 'input', 'reward_model']")):
            table(path, PromptFormat(label_key="answer"))


def test_a_saved_selection_keeps_its_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(numbered_rows(10)).select([7, 2, 5]).save_to_disk(str(tmp_path / "folder"))
    assert [p.label for p in table(tmp_path / "folder")] == ["7", "2", "5"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("bounds", ["[3:12]", "[:4]", "[25:]", "[:]", "[28:99]"])
def test_slices_have_python_semantics(tmp_path: Path, bounds: str, suffix: str, streaming: bool) -> None:
    rows = numbered_rows(30)
    path = tmp_path / f"a.{suffix}"
    write_jsonl(path, rows) if suffix == "jsonl" else pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    prompts = open_prompts(f"{path}@{bounds}", tokenizer=TOKENIZER, prompt_format=LABELED, streaming=streaming)
    prompts.begin(None)
    start, stop = (int(x) if x else None for x in bounds[1:-1].split(":"))
    assert [p.row for p in prompts.take(100)] == list(range(30))[start:stop]
    prompts.close()


def test_negative_slices_need_a_table(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered_rows(10))
    assert [p.row for p in table(f"{path}@[-3:-1]")] == [7, 8]
    with pytest.raises(ConfigError, match="remove --streaming-data"):
        open_prompts(f"{path}@[-3:]", tokenizer=TOKENIZER, prompt_format=LABELED, streaming=True)


BAD_ROWS = [
    ('{"input": "a", "label": ', "not JSON"),
    ("{'input': 'a'}", r"write rows with json\.dumps"),
    ('{"input": "a", "label": "1"},', "remove the comma"),
    ("[1, 2]", "a list, not an object"),
    ({"inptu": "a", "label": "1"}, r"no key 'input'; the row has \['inptu', 'label'\]; the closest is 'inptu'"),
    ({"input": "a", "answer": "1"}, "no key 'label'.*--label-key"),
    ({"input": "  ", "label": "1"}, "the prompt 'input' is empty"),
    ({"input": [], "label": "1"}, "the prompt 'input' is empty"),
    ({"input": None, "label": "1"}, "the prompt 'input' is empty"),
    ({"input": 5, "label": "1"}, "not text or chat messages.*int 5"),
    ({"input": "a", "label": ""}, "the label 'label' is empty"),
    ({"input": "a", "label": None}, "the label 'label' is empty"),
    ({"input": "a", "label": "1", "metadata": 3}, "'metadata' .*is int, not an object"),
    ({"input": "a", "label": "1", "tools": "{"}, "'tools' .*not JSON"),
    ({"input": [{"role": "user", "content": "a"}], "label": "1"}, "add --apply-chat-template"),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, row: Any, message: str, streaming: bool) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*numbered_rows(2), "", row, *numbered_rows(1)])
    with pytest.raises(DataError, match=rf"a\.jsonl line 4: .*{message}.*--skip-bad-rows"):
        draw(path, LABELED, streaming=streaming)


def test_a_row_that_is_nested_too_deeply_is_a_bad_row(tmp_path: Path) -> None:
    for depth, is_text in ((900, False), (3000, False), (3000, True)):  # for Python, for orjson, in a string
        nested = '{"a":' * depth + "1" + "}" * depth
        row = f'{{"input": "x", "label": "1", "metadata": {json.dumps(nested) if is_text else nested}}}'
        with pytest.raises(DataError, match=r"a\.jsonl line 1: .*not JSON.*depth.*--skip-bad-rows"):
            table(write_jsonl(tmp_path / "a.jsonl", [row, *numbered_rows(1)]), LABELED)


def test_a_bad_parquet_row_is_named_with_its_index(tmp_path: Path) -> None:
    rows = numbered_rows(9)
    rows[6]["input"] = ""
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(DataError, match=r"a\.parquet row 6: the prompt 'input' is empty"):
        table(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 0: no key 'prompt'; the row has \['input', 'label', 'metadata'\]"):
        table(tmp_path / "a.parquet", PromptFormat(input_key="prompt"))


def test_a_stream_does_not_advance_past_a_bad_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*numbered_rows(2), "{", *numbered_rows(1)])
    prompts = open_prompts(str(path), tokenizer=TOKENIZER, prompt_format=LABELED, streaming=True)
    prompts.begin(None)
    for _ in range(2):
        with pytest.raises(DataError, match="line 3"):
            prompts.take(9)
    assert [p.row for p in prompts.take(2)] == [0, 1]


@pytest.mark.parametrize("streaming", [False, True])
def test_skipped_rows_are_counted_and_the_first_lines_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*numbered_rows(2), *(row for row, _ in BAD_ROWS), *numbered_rows(1)])
    prompts = open_prompts(
        str(path), tokenizer=TOKENIZER, prompt_format=LABELED, streaming=streaming, skip_bad_rows=True
    )
    for _ in range(2):
        prompts.begin(None)
        assert [p.label for p in prompts.take(99)] == ["0", "1", "0"]
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1
    assert f"skipped {len(BAD_ROWS)} of {len(BAD_ROWS) + 3} rows" in messages[0]
    assert "line 3" in messages[0]


@pytest.mark.parametrize("streaming", [False, True])
def test_long_prompts_are_dropped_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "x" * n} for n in range(1, 11)])
    fmt = PromptFormat(max_prompt_len=7)
    prompts = open_prompts(str(path), tokenizer=TOKENIZER, prompt_format=fmt, streaming=streaming)
    for _ in range(2):
        prompts.begin(None)
        assert [len(p.tokens) for p in prompts.take(99)] == list(range(1, 8))
    assert prompts.size == 7
    assert [r.getMessage().split(": ")[1] for r in caplog.records] == [
        "dropped 3 of 10 prompts longer than 7 tokens (--rollout-max-prompt-len)"
    ]
    assert prompts.num_long == (6 if streaming else 3)  # a stream reads the rows again


def test_data_without_usable_prompts_is_an_error(tmp_path: Path) -> None:
    for streaming in [False, True]:
        path = write_jsonl(tmp_path / "a.jsonl", [{"input": "x" * 9}])
        with pytest.raises(DataError, match=r"\(0 bad rows, 1 prompts over 5 tokens.*--rollout-max-prompt-len"):
            draw(path, PromptFormat(max_prompt_len=5), streaming=streaming)


def test_the_chat_template_is_applied_with_tools_and_kwargs(tmp_path: Path) -> None:
    rows = [{"input": "hi", "tools": [{"a": 1}]}, {"input": [{"role": "system", "content": "s"}]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    kwargs = {"no_think": True}
    prompts = table(path, PromptFormat(apply_chat_template=True, apply_chat_template_kwargs=kwargs))
    end = "<|im_start|>assistant\n<think></think>"
    assert prompts[0].text == f"<|im_start|>user\nhi<|im_end|>\n[1 tools]\n{end}"
    assert prompts[1].text == f"<|im_start|>system\ns<|im_end|>\n{end}"
    assert prompts[0].tokens[0] == TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    assert prompts[0].apply_chat_template_kwargs == kwargs


def test_demonstrations_stay_messages_with_and_without_the_template(tmp_path):
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"input": messages}) + "\n" + json.dumps({"input": "1+1"}) + "\n")
    for applies in (True, False):
        prompts = table(path, PromptFormat(apply_chat_template=applies, keep_messages=True, demonstrates=True))
        assert prompts[0].text == messages
        assert isinstance(prompts[1].text, str)


def test_a_conversation_that_the_template_rejects_is_a_bad_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": [{"role": "villain", "content": "x"}]}])
    with pytest.raises(DataError, match=r"line 1: .*TemplateError: no villains"):
        table(path, PromptFormat(apply_chat_template=True))


def test_a_misspelled_role_is_a_bad_row(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "2"}
    for role, meant in (("usr", "user"), ("User", "user"), ("asistant", "assistant"), ("gpt", "assistant")):
        for demonstrates, messages in ((False, []), (True, [answer])):
            path = write_jsonl(tmp_path / "a.jsonl", [{"input": [{"role": role, "content": "1+1"}, *messages]}])
            with pytest.raises(DataError, match=f"line 1: .*role '{role}' is unknown .*; write '{meant}'"):
                table(path, PromptFormat(apply_chat_template=True, demonstrates=demonstrates))
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": [{"role": "observation", "content": "1+1"}]}])
    assert "observation" in str(table(path, PromptFormat(apply_chat_template=True))[0].text)


def test_a_tokenizer_without_template_is_rejected_before_any_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["not JSON"])
    bare = chat_tokenizer()
    bare.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        open_prompts(str(path), tokenizer=bare, prompt_format=PromptFormat(apply_chat_template=True))


def test_an_invalid_template_is_reported_once_not_per_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "1+1="}])
    broken = chat_tokenizer()
    broken.chat_template = "{{ bos_token }}\n{% for m in messages %}{{ m.content }"
    with pytest.raises(DataError, match=r"chat template of .* line 2: .*--chat-template-path"):
        open_prompts(str(path), tokenizer=broken, prompt_format=PromptFormat(apply_chat_template=True))


def test_messages_are_kept_for_functions_that_render_them(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompts = table(write_jsonl(tmp_path / "a.jsonl", [{"input": messages}]), PromptFormat(keep_messages=True))
    assert prompts[0].text == messages
    assert prompts[0].tokens == []


def test_messages_are_kept_beside_the_text_for_rewards_in_trls_form(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": turns, "label": "1"}, {"input": "hi", "label": "1"}])
    prompts = table(path, PromptFormat(label_key="label", apply_chat_template=True, copies_conversations=True))
    assert [prompt.metadata for prompt in prompts] == [{"conversation": turns}, {}]
    assert prompts[0].text == prompts[1].text


def test_columns_with_json_strings_are_decoded(tmp_path: Path) -> None:
    row = {"input": "a", "metadata": '{"k": [1]}', "tools": '[{"name": "f"}]'}
    prompts = table(write_jsonl(tmp_path / "a.jsonl", [row]), PromptFormat())
    assert prompts[0].metadata == {"k": [1]}
    assert prompts[0].tools == [{"name": "f"}]


def test_integers_beyond_64_bits_stay_exact(tmp_path: Path) -> None:
    prompts = table(write_jsonl(tmp_path / "a.jsonl", [{"input": "a", "label": 2**90 + 1}]))
    assert prompts[0].label == 2**90 + 1


def test_message_lists_are_checked() -> None:
    for value, expected in [
        ([{"role": "user", "content": "x"}], None),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], None),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], None),
        ([], "non-empty list"),
        ("x", "non-empty list"),
        (["x"], "message 0 is str 'x'"),
        ([{"content": "x"}], "role must be"),
        ([{"role": "user"}], "has content nothing"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 3}], r"message 1 \(user\) has content int 3"),
        ([{"role": "user", "content": ["x"]}], "typed parts"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}], "models are text-only"),
    ]:
        problem = message_problem(value)
        if expected is None:
            assert problem is None
        else:
            assert problem is not None
            assert re.search(expected, problem), problem


def test_a_rendered_prompt_is_detected() -> None:
    for prompts, is_double in [
        (["what is 2+2?", "why <b>?"], False),
        (["ok", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"], True),
        ([[{"role": "user", "content": "hi"}]], False),
        ([[{"role": "user", "content": "<|im_start|>user\nhi"}]], True),
    ]:
        problem = double_template_problem(prompts, TOKENIZER)
        assert (problem is not None) == is_double
        if problem is not None:
            remedy = "remove --apply-chat-template" if len(prompts) == 1 else "store all prompts in one form"
            assert remedy in problem


def test_a_rendered_prompt_is_detected_by_plain_text_marks() -> None:
    plain = chat_tokenizer()
    plain.chat_template = "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}### answer:"
    assert double_template_problem(["### user: hi\n### answer: "], plain) is not None
    assert double_template_problem(["### user: hi"], plain) is None


def test_negative_worker_counts_are_rejected(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered_rows(1))
    with pytest.raises(ConfigError, match="--num-data-workers is -1"):
        table(path, num_workers=-1)


def test_summary_lines_are_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*numbered_rows(2), "{"])
    with caplog.at_level(logging.WARNING):
        table(path, skip_bad_rows=True)
    assert len(caplog.records) == 1
