"""Faults of templates, data and rewards that are found before a run starts."""

from __future__ import annotations

import json

import pytest

from faults.world import Row, names, only
from faults_marker import fault


@fault("TPL01")
def test_prompts_that_are_templated_already(world):
    world.write(*({"input": f"<|im_start|>user\n{i}+1=<|im_end|>\n", "label": str(i)} for i in range(8)))
    found = only(world.look(apply_chat_template=True), "TPL01")
    assert "'<|im_start|>'" in found.finding
    assert "--apply-chat-template" in found.remedy
    assert world.look() == []


def test_rows_that_are_no_utf_8_or_no_objects(world):
    world.data.write_bytes('{"input": "Größe", "label": "1"}\n'.encode("latin-1") * 4)
    found = only(world.look(), "DATA01")
    assert "byte 14" in found.finding
    assert "iconv" in found.remedy
    world.write("[1, 2]")
    assert "object" in only(world.look(), "DATA01").remedy
    for start, fix in (
        (b"PAR1\x15\xe4<", "name it .parquet"),
        (b"\xff\xfe{\x00", "utf-16"),
        (b"PK\x03\x04", "spreadsheet"),
    ):
        world.data.write_bytes(start + b"\xff\n")
        assert fix in only(world.look(), "DATA01").remedy
    world.write(*({"input": [{"from": "human", "value": "1+1="}], "label": "2"} for _ in range(4)))
    assert "rename `from` to role" in only(world.look(), "DATA01").remedy
    world.write(*({"input": [59, 61], "label": "2"} for _ in range(4)))
    assert "list of numbers" in only(world.look(), "DATA01").finding


@fault("TPL01")
def test_messages_without_a_template(world):
    world.write(*({"input": [{"role": "user", "content": f"{i}"}], "label": "1"} for i in range(8)))
    found = only(world.look(), "TPL01")
    assert (found.evidence["num_bad"], found.evidence["num_rows"]) == (8, 8)
    assert "--apply-chat-template" in found.remedy
    assert world.look(apply_chat_template=True) == []
    broken = world.folder / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m.content }")
    found = only(world.look(apply_chat_template=True, chat_template_path=broken), "TPL01")
    assert names(found.finding, broken, "line 2")


@fault("DATA01")
def test_rows_that_sft_cannot_train_on(world):
    sft = {"loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None, "label_key": None}
    assert names(only(world.look(**sft), "DATA01").remedy, "--label-key")
    question, answer = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    world.write(*({"input": [question, answer]} for _ in range(3)), {"input": [question]})
    found = only(world.look(**sft), "DATA01")
    assert names(found.finding, "1 of the 4 rows", "row 3", "no assistant turn")
    assert "--skip-bad-rows" in found.remedy
    only(world.look(**sft, skip_bad_rows=True), "DATA01", "info")
    world.write(*({"input": [question, answer, question]} for _ in range(4)))
    assert world.look(**sft) == []
    (world.model / "chat_template.jinja").unlink()
    found = only(world.look(**sft), "TPL01")
    assert "--chat-template-path" in found.remedy
    assert "--apply-chat-template" not in found.remedy


FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if not loop.last and m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@fault("TPL02")
def test_a_template_that_forgets_thoughts_of_the_datas_conversations(world):
    template = world.model / "chat_template.jinja"
    kept = template.read_text()
    template.write_text(FORGETFUL)
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "<think>easy</think>2"},
        {"role": "user", "content": "and 2+2?"},
    ]
    world.write(*({"input": messages, "label": "4"} for _ in range(4)))
    several_turns = {"apply_chat_template": True, "loss_type": "sft_loss", "n_samples_per_prompt": 1, "rm_type": None}
    found = only(world.look(**several_turns), "TPL02", "warning")
    assert "row 0" in found.finding
    assert "message 1 (assistant)" in found.finding
    template.write_text(kept)
    assert world.look(**several_turns) == []


@fault("STOP01")
def test_an_end_of_turn_that_does_not_end_generation(world):
    path = world.model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"eos_token": "<|im_start|>"}))
    found = only(world.look(apply_chat_template=True), "STOP01")
    assert "<|im_end|> (1)" in found.finding
    assert "--rollout-stop-token-ids 1" in found.remedy
    assert world.look(apply_chat_template=True, rollout_stop_token_ids=1) == []


@fault("DATA01")
def test_a_row_without_the_label_names_its_line_and_keys(world):
    rows: list[Row | str] = [{"input": str(i), "label": str(i)} for i in range(20)]
    world.write(*rows[:6], {"input": "6", "answer": "6"}, *rows[7:])
    found = only(world.look(), "DATA01")
    assert (found.evidence["num_bad"], found.evidence["num_rows"]) == (1, 20)
    assert names(found.finding, "line 7", "'label'", "['answer', 'input']")
    assert "--skip-bad-rows" in found.remedy
    assert "--label-key" not in found.remedy  # most rows have the label there
    only(world.look(skip_bad_rows=True), "DATA01", "info")
    world.write(*rows)
    assert world.look() == []
    assert "'label' (--label-key label)" in only(world.look(label_key="labels"), "DATA01").remedy


def test_bad_rows_far_behind_the_first_are_found_with_their_line(world):
    rows: list[Row | str] = [{"input": str(i), "label": str(i)} for i in range(2000)]
    world.write(*rows[:1000], *("{broken" for _ in range(1000)))
    first = only(world.look(), "DATA01").evidence["first"][0]["where"]
    line = int(first.rpartition(" ")[2])
    assert line > 1000
    assert world.data.read_text().splitlines()[line - 1] == "{broken"


@fault("DATA02")
def test_empty_labels_are_counted_with_their_lines(world):
    world.write({"input": "1", "label": ""}, {"input": " ", "label": "2"}, {"input": "3", "label": "3"})
    found = only(world.look(rollout_batch_size=1), "DATA02")
    assert found.evidence["num_bad"] == 2
    assert names(found.finding, "line 1", "'label'")
    assert only(world.look(skip_bad_rows=True), "DATA02", "warning")
    world.write({"input": "3", "label": "3"})
    assert world.look(rollout_batch_size=1) == []


@fault("DATA04")
def test_prompts_beyond_the_limit_are_measured(world):
    world.write(*({"input": "x" * (10 + i), "label": "1"} for i in range(20)))
    found = only(world.look(rollout_max_prompt_len=15), "DATA04", "warning")
    assert found.evidence == {"num_long": 14, "num_prompts": 20, "limit": 15, "longest": 29}
    assert "--rollout-max-prompt-len 29" in found.remedy
    assert world.look(rollout_max_prompt_len=29) == []
    found = only(world.look(rollout_max_context_len=16, rollout_max_response_len=1), "DATA04", "warning")
    assert found.evidence == {"num_long": 14, "num_prompts": 20, "limit": 15, "longest": 29}
    assert "--rollout-max-context-len 16 drops 14 of the 20 prompts" in found.finding
    assert "raise --rollout-max-context-len" in found.remedy
    world.write(*({"input": "x" * length, "label": "1"} for length in (200, 200, 200, 20)))
    found = only(world.look(), "DATA04")
    assert found.evidence == {"num_long": 3, "num_prompts": 4, "context_len": 128, "longest": 200}
    world.write(*({"input": "x" * 200, "label": "1"} for _ in range(4)))
    assert "--rollout-max-prompt-len" not in only(world.look(), "DATA04").remedy


def test_responses_that_the_context_cuts_off_are_told_before_the_run(world):
    world.write(*({"input": "x" * (10 + i), "label": "1"} for i in range(4)))
    found = only(world.look(rollout_max_response_len=1000), "DATA04", "warning")
    assert names(found.finding, "--rollout-max-response-len 1000", "context of 128 tokens", "after about 116 tokens")
    assert "--rollout-max-response-len 115 or less" in found.remedy
    only(world.look(rollout_max_response_len=116), "DATA04", "info")
    assert world.look(rollout_max_response_len=115) == []
    assert world.look(rollout_max_response_len=90, rollout_max_context_len=100) == []  # a chosen limit


@fault("REW01")
def test_a_reward_that_raises(world):
    (world.folder / "raises.py").write_text("def reward(args, sample, **kw):\n    return float(sample.label['x'])\n")
    found = only(world.look(rm_type=None, custom_rm_path=f"{world.folder}/raises.py:reward"), "REW01")
    assert {*found.evidence["outcomes"]} == {"failed"}
    assert "TypeError" in found.finding
    assert "raises.py:2 in reward" in found.finding
    (world.folder / "works.py").write_text("def reward(args, sample, **kw):\n    return float(sample.label == '3')\n")
    assert world.look(rm_type=None, custom_rm_path=f"{world.folder}/works.py:reward") == []


@fault("REW01")
def test_a_reward_that_compares_text_with_a_number(world):
    world.write(*({"input": f"{i}+1=", "label": i + 1} for i in range(4)))
    (world.folder / "same.py").write_text("def reward(response, label):\n    return float(response[:1] == label)\n")
    found = only(world.look(rm_type=None, custom_rm_path=f"{world.folder}/same.py:reward"), "REW01", "warning")
    assert names(found.finding, "the label is 1 of type int", "with the label '1' it gives 1.0")
    (world.folder / "text.py").write_text(
        "def reward(response, label):\n    return float(response[:1] == str(label))\n"
    )
    assert world.look(rm_type=None, custom_rm_path=f"{world.folder}/text.py:reward") == []
    found = only(
        world.look(rm_type=None, custom_rm_path=f"{world.folder}/text.py:reward", label_key=None), "REW01", "warning"
    )
    assert names(found.finding, "the parameter `label`, which is None for every row")


@fault("REW01")
def test_a_reward_that_compares_the_end_of_turn(world):
    (world.folder / "exact.py").write_text("def reward(response, label):\n    return float(response == label)\n")
    exact = {"rm_type": None, "custom_rm_path": f"{world.folder}/exact.py:reward"}
    found = only(world.look(**exact), "REW01", "warning")
    assert names(found.finding, "1 to a label", "but 0", "'<|im_end|>'")
    assert names(found.remedy, "--rollout-skip-special-tokens", "removesuffix('<|im_end|>')")
    assert world.look(**exact, rollout_skip_special_tokens=True) == []
    (world.folder / "starts.py").write_text("def reward(response, label):\n    return response.startswith(label)\n")
    assert world.look(rm_type=None, custom_rm_path=f"{world.folder}/starts.py:reward") == []


@fault("TPL01")
def test_a_template_that_does_not_start_the_answer(world):
    turn = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    start = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template = world.model / "chat_template.jinja"
    template.write_text(turn)
    found = only(world.look(apply_chat_template=True), "TPL01", "warning")
    assert names(found.finding, "<|im_start|>assistant")
    assert "add_generation_prompt" in found.remedy
    template.write_text(turn + start)
    assert world.look(apply_chat_template=True) == []
    template.write_text(  # of Mistral's form, without a header
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}"
        "<|im_end|>{% endif %}{% endfor %}"
    )
    assert world.look(apply_chat_template=True) == []


def test_labels_of_several_right_answers_are_healthy(world):
    world.write(*({"input": str(i), "label": [str(i), "another"]} for i in range(8)))
    assert world.look(rm_type="math") == []


@fault("REW01")
@pytest.mark.nightly
def test_a_reward_that_is_slower_than_the_check_waits(world, monkeypatch):
    monkeypatch.setattr("furlong.diagnosis.preflight.data_checks.TIMEOUT_S", 0.2)
    (world.folder / "slow.py").write_text("import time\n\n\ndef reward(args, sample):\n    time.sleep(600)\n")
    slow = {"rm_type": None, "custom_rm_path": f"{world.folder}/slow.py:reward"}
    found = only(world.look(**slow), "REW01", "warning")
    assert "0.2 s" in found.finding
    assert names(found.remedy, "0.2 s", "--reward-timeout 30")
    longer = only(world.look(**slow, reward_timeout=0.1), "REW01", "warning").remedy
    assert "--reward-timeout" in longer
    assert "30" not in longer


@fault("REW01")
def test_labels_that_the_verifier_cannot_read(world):
    world.write(*({"input": str(i), "label": "n/a because \\frac{", "other": str(i)} for i in range(8)))
    found = only(world.look(rm_type="math"), "REW01", "warning")
    assert (found.evidence["rm_type"], len(found.evidence["labels"])) == ("math", 8)
    assert world.look(rm_type="math", label_key="other") == []
    world.write(*({"input": str(i), "label": {"answer": str(i)}} for i in range(8)))
    assert names(
        only(world.look(rm_type="math"), "REW01", "error").finding, "the label is {'answer': '0'} of type dict"
    )


def test_an_unsupported_format_is_reported_once(world):
    (world.folder / "p.csv").write_text("a,b")
    assert ".csv" in only(world.look(prompt_data=world.folder / "p.csv"), "CFG05").finding


@fault("REW01")
def test_a_reward_that_lacks_a_variable_of_the_environment_is_not_blamed_on_labels(world):
    (world.folder / "own.py").write_text("import os\n\n\ndef f(args, sample):\n    return os.environ['NO_SUCH']\n")
    found = only(world.look(rm_type=None, custom_rm_path=f"{world.folder}/own.py:f"), "REW01")
    assert "NO_SUCH" in found.finding
    assert "label" not in found.cause + found.remedy


@fault("TPL01")
def test_prompts_whose_text_the_template_leaves_out(world):
    def asked(role: str, count: int = 8) -> list[dict[str, object]]:
        rows = []
        for i in range(count):
            messages = [{"role": role, "content": f"be brief {i}"}, {"role": "user", "content": f"{i}+1="}]
            rows.append({"input": messages, "label": str(i)})
        return rows

    template = (
        "{% for m in messages if m.role in ROLES %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = world.model / "chat_template.jinja"
    path.write_text(template.replace("ROLES", "('user', 'system', 'assistant')"))
    world.write(*asked("system"))
    assert world.look(apply_chat_template=True) == []
    world.write(*asked("developer"))
    found = only(world.look(apply_chat_template=True), "TPL01", "warning")
    assert names(found.finding, "8 messages", "'developer'")
    path.write_text("{{ '<|im_start|>user\\n1+1=<|im_end|>' }}")
    world.write(*({"input": f"{i}+1=", "label": str(i)} for i in range(8)))
    found = only([each for each in world.look(apply_chat_template=True) if each.severity == "error"], "TPL01")
    assert "7 prompts are rendered like another one" in found.finding


@fault("TPL01")
def test_messages_that_were_stored_as_text_of_python(world):
    world.write(*({"input": str([{"role": "user", "content": f"{i}+1="}]), "label": str(i)} for i in range(8)))
    assert "ast.literal_eval" in only(world.look(), "TPL01", "warning").remedy


@fault("STOP01")
def test_a_stop_text_that_the_shell_did_not_unescape(world):
    assert "$'\\n'" in only(world.look(rollout_stop=["\\n"]), "STOP01", "warning").remedy
    assert world.look(rollout_stop=["\n"]) == []


def test_stop_ids_that_the_model_does_not_have(world):
    path, size = world.model / "config.json", 512
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": size}))
    found = only(world.look(rollout_stop_token_ids=[3, size]), "STOP01")
    assert names(found.finding, f"--rollout-stop-token-ids {size}", size - 1)
    assert found.evidence == {"ids": [size], "vocab_size": size}
    assert world.look(rollout_stop_token_ids=[3]) == []


def test_object_reward_without_reward_key(world):
    (world.folder / "own.py").write_text("def f(args, sample, **kw): return {'score': 1.0, 'acc': 0}")
    own = {"rm_type": None, "custom_rm_path": f"{world.folder}/own.py:f"}
    found = only(world.look(**own), "REW01")
    assert names(found.finding, "['acc', 'score']", "--reward-key")
    found = only(world.look(**own, reward_key="accuracy"), "REW01")
    assert "--reward-key accuracy" in found.finding
    assert world.look(**own, reward_key="score") == []
    assert "--reward-key acc" in only(world.look(rm_type="dapo"), "REW01").remedy
    assert world.look(rm_type="dapo", reward_key="score") == []


LLAMA = "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"


@fault("TPL01")
def test_prompts_that_were_rendered_for_another_model(world):
    world.write(*({"input": LLAMA.format(f"{i}+1="), "label": "1"} for i in range(8)))
    for flags in ({}, {"apply_chat_template": True}):
        found = only(world.look(**flags), "TPL01", "warning")
        assert found.evidence == {"mark": "<|start_header_id|>", "num_prompts": 8}
    one = {"input": LLAMA.format("what is this?"), "label": "1"}
    world.write(one, *({"input": f"{i}+1=", "label": "1"} for i in range(8)))
    assert world.look(apply_chat_template=True) == []  # a question about templates
    (world.model / "chat_template.jinja").write_text(
        "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    )
    world.write(*({"input": f"[INST] {i}+1= [/INST]", "label": "1"} for i in range(8)))
    assert [each for each in world.look() if each.id == "TPL01"] == []  # this model's own


@fault("TPL01")
def test_messages_stored_as_json_text(world):
    rows = [{"input": [{"role": "user", "content": f"{i}+1="}], "label": "1"} for i in range(8)]
    world.write(*(row | {"input": json.dumps(row["input"])} for row in rows))
    for flags in ({}, {"apply_chat_template": True}):
        found = only(world.look(**flags), "TPL01", "warning")
        assert found.evidence == {"num_prompts": 8}
        assert "`jq -c '.input |= fromjson'`" in found.remedy
    world.write(*rows)  # as jq leaves them
    assert world.look(apply_chat_template=True) == []


@fault("STOP01")
def test_an_end_of_turn_of_prompts_that_were_rendered_before(world):
    path = world.model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|im_start|>"}))
    assert world.look() == []  # plain text: a base model may end it otherwise
    world.write(
        *({"input": f"<|im_start|>user\n{i}<|im_end|>\n<|im_start|>assistant\n", "label": "1"} for i in range(8))
    )
    found = only(world.look(), "STOP01")
    assert "--rollout-stop-token-ids 1" in found.remedy
    assert world.look(rollout_stop_token_ids=1) == []


@fault("REW01")
def test_a_reward_that_cannot_be_called_is_reported_once(world):
    (world.folder / "mine.py").write_text("def reward(sample):\n    return 1.0\n")
    found = only(world.look(rm_type=None, custom_rm_path=f"{world.folder}/mine.py:reward"), "REW01")
    assert "def fn(args, sample)" in found.remedy
    (world.folder / "mended.py").write_text("def reward(args, sample):\n    return 1.0\n")
    assert world.look(rm_type=None, custom_rm_path=f"{world.folder}/mended.py:reward") == []


@fault("DATA01")
def test_a_file_that_is_one_document(world):
    rows = [{"input": str(i), "label": str(i)} for i in range(4)]
    world.data.write_text(json.dumps(rows, indent=1))
    found = only(world.look(), "DATA01")
    assert "'['" in found.finding
    assert "jq -c '.[]'" in found.remedy
