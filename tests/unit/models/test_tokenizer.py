from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from data_zoo import chat_tokenizer
from furlong.errors import ConfigError
from furlong.models.tokenizer import SHIPPED, JsonTokenizer, build_tokenizer, load_tokenizer, read_template
from furlong.quickstart.quickstart import model_folder
from furlong.tools.conversations import CONVERSATIONS

TEXTS = ["2+3=5", "two words\n", "<|im_start|>user\nhi<|im_end|>", "äöü"]


@pytest.fixture(params=[build_tokenizer, chat_tokenizer])
def pair(request, tmp_path):
    request.param().save_pretrained(tmp_path)
    return JsonTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)


def test_it_encodes_as_transformers_does(pair):
    quick, slow = pair
    assert quick(TEXTS, add_special_tokens=False)["input_ids"] == slow(TEXTS, add_special_tokens=False)["input_ids"]
    assert [quick.encode(t) for t in TEXTS] == [slow.encode(t) for t in TEXTS]
    assert len(quick) == len(slow)


def test_it_knows_the_same_special_tokens(pair):
    quick, slow = pair
    assert quick.eos_token_id == slow.eos_token_id
    assert set(quick.all_special_tokens) >= set(slow.all_special_tokens)
    assert quick.convert_ids_to_tokens(quick.eos_token_id) == slow.eos_token
    special = {i: token.content for i, token in slow.added_tokens_decoder.items() if token.special}
    assert {i: token.content for i, token in quick.added_tokens_decoder.items() if token.special} == special


@pytest.mark.parametrize("name", [None, *SHIPPED])
def test_it_renders_conversations_as_transformers_does(pair, name):
    quick, slow = pair
    template = None if name is None else read_template(name)
    for conversation in CONVERSATIONS:
        for prompt in (True, False):
            options = {"tools": conversation.tools or None, "add_generation_prompt": prompt, "chat_template": template}
            expected = slow.apply_chat_template(conversation.messages, tokenize=False, **options)
            assert quick.apply_chat_template(conversation.messages, **options) == expected


def test_generation_blocks_are_rendered(pair):
    quick, _ = pair
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    assert quick.apply_chat_template([{"role": "user", "content": "a"}], chat_template=template) == "a;"


def test_a_damaged_tokenizer_is_an_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer"):
        JsonTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        JsonTokenizer(tmp_path)


@pytest.mark.parametrize("change", [{"layer_types": ["full_attention", "Gull_attention"]}, {"num_hidden_layers": 32}])
def test_a_config_that_keeps_the_tokenizer_from_loading_is_named(change, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"} | change))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_tokenizer(folder)


@pytest.mark.slow
def test_it_needs_neither_torch_nor_transformers():
    code = (
        "import sys, furlong.models.tokenizer, furlong.tools.template_test, furlong.tools.model_folder;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


REMOTE = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_x.TikTokenTokenizer", None]},
}


@pytest.mark.parametrize("load", [load_tokenizer, JsonTokenizer])
@pytest.mark.parametrize("settings", [REMOTE, {}])
def test_a_file_of_tokens_alone_is_refused_with_what_is_missing(load, settings, tmp_path):
    tokens = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (tmp_path / "tiktoken.model").write_text(tokens)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"tiktoken\.model but no tokenizer\.json.*never run; write tokenizer\.json"):
        load(tmp_path)


def test_a_tokenizer_with_code_of_its_own_is_read_from_its_json(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | REMOTE))
    (tmp_path / "tiktoken.model").write_text("")
    (tmp_path / "tokenization_x.py").write_text("raise SystemExit")
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    assert load_tokenizer(tmp_path).encode("a+b") == build_tokenizer().encode("a+b")


@pytest.mark.parametrize("load", [load_tokenizer, JsonTokenizer])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_class", 5),
        ("model_max_length", "x"),
        ("padding_side", "middle"),
        ("additional_special_tokens", [5]),
        ("added_tokens_decoder", {"x": {"content": "a"}}),
        ("added_tokens_decoder", {"0": {"content": 5}}),
        ("added_tokens_decoder", []),
    ],
)
def test_a_setting_of_another_type_is_named_by_the_run_and_by_the_doctor(load, name, value, tmp_path):
    folder = shutil.copytree(model_folder(), tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ConfigError, match=rf"{path}: {name} is .*, expected"):
        load(folder)
