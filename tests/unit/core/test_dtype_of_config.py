"""The dtype in config.json is a name."""

from __future__ import annotations

import json

import pytest

from furlong.core.model_config import read_json
from furlong.errors import ConfigError


def test_a_dtype_that_is_no_name_is_refused(tmp_path):
    for key in ["torch_dtype", "dtype"]:
        path = tmp_path / "config.json"
        for value in ("bfloat16", None, {"": "bfloat16"}):
            path.write_text(json.dumps({key: value}))
            assert read_json(path) == {key: value}
        path.write_text(json.dumps({key: 7}))
        with pytest.raises(ConfigError, match=rf"config\.json: {key} is 7, expected the name of a dtype"):
            read_json(path)
