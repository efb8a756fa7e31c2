"""Credentials in the URLs of a text are replaced."""

from __future__ import annotations

import pytest

from furlong.core.text import random_key, redact_credentials


@pytest.mark.parametrize(
    "text",
    [
        "http://u:SECRET@h/p", "http://SECRET@h", "redis://:SECRET@h/0", "http://u:a@SECRET@h", "http://u:SE/CRET@h",
        "http://u:SECRET@[::1]:80/", "//u:SECRET@h/", r"http:\/\/u:SECRET@h", "u:SECRET@h:80", "u:SECRET@[::1]:80",
        "http://h/?token=SECRET", "http://h/?n=1&X-Amz-Signature=SECRET", "http://h/#access_token=SECRET",
        "http://h/?token=a;SECRET", "http://h/?pw=SECRET", "http://h/?code=SECRET", r"http:\/\/h\/?api_key=SECRET",
    ],
)  # fmt: skip
def test_a_credential_is_replaced(text):
    assert "CRET" not in redact_credentials(text)


def test_random_keys_are_replaced_with_and_without_a_url():
    for kind in ("sk", "ck", "ek"):
        key = random_key(kind)
        for text in (key, f"GET /sessions/{'a' * 32}.{key}/v1/models", f"KeyError: '{key}'"):
            assert redact_credentials(text) == text.replace(key, f"{kind}-***")


@pytest.mark.parametrize(
    "text",
    [
        "http://h:80/a@b", "http://h:30000", "http://[::1]:80/x", "git@github.com:x/y.git", "me@example.com",
        "at file.py:12 in f", "http://h/?n=2&top_k=5", "//comment a@b", '{"url": "http://h:1/x@y"}',
    ],
)  # fmt: skip
def test_other_texts_stay(text):
    assert redact_credentials(text) == text
