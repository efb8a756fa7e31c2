from __future__ import annotations

import json

import pytest

from runs import sampled, write_model

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def embedded(model, data, tmp_path_factory):
    """The samples of each rollout of a run in one process, which others are compared with."""
    return sampled(model, data, tmp_path_factory.mktemp("embedded"))[0]


@pytest.fixture(scope="session")
def long_model(tmp_path_factory):
    """A model with room for the prompts of the examples, and a chat template."""
    folder = write_model(tmp_path_factory.mktemp("long") / "model", max_position_embeddings=4096)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": CHAT}))
    return folder
