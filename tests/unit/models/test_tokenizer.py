from __future__ import annotations

import base64
import json
import shutil

import pytest

from data_zoo import chat_tokenizer
from furlong.errors import ConfigError
from furlong.models.tokenizer import SHIPPED, build_tokenizer, load_tokenizer, read_template
from furlong.tools.template_test import CONVERSATIONS


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_template_renders_every_conversation(name):
    tokenizer = chat_tokenizer()
    for conversation in CONVERSATIONS:
        options = {"tools": conversation.tools or None, "chat_template": read_template(name)}
        assert tokenizer.apply_chat_template(conversation.messages, tokenize=False, **options)


def test_a_damaged_tokenizer_is_an_error(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 123\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("change", [{"layer_types": ["full_attention", "Gull_attention"]}, {"num_hidden_layers": 32}])
def test_a_config_that_keeps_the_tokenizer_from_loading_is_named(change, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"} | change))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_tokenizer(folder)


REMOTE = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_x.TikTokenTokenizer", None]},
}


@pytest.mark.parametrize("settings", [REMOTE, {}])
def test_a_file_of_tokens_alone_is_refused_with_what_is_missing(settings, tmp_path):
    tokens = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (tmp_path / "tiktoken.model").write_text(tokens)
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"tiktoken\.model but no tokenizer\.json.*never run; write tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_with_code_of_its_own_is_read_from_its_json(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | REMOTE))
    (tmp_path / "tiktoken.model").write_text("")
    (tmp_path / "tokenization_x.py").write_text("raise SystemExit")
    (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
    assert load_tokenizer(tmp_path).encode("a+b") == build_tokenizer().encode("a+b")
