from __future__ import annotations

import os

import pytest

from furlong.cluster.session import LOCAL_SETTINGS, SETTINGS
from runs import FORKED, write_model

# Ray reads these once, when it is imported, which some test does first.
for _name, _value in {**SETTINGS, **LOCAL_SETTINGS, "RAY_AUTH_TOKEN": "secret" * 8}.items():
    os.environ.setdefault(_name, _value)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def forked():
    """Start processes that have everything imported."""
    return FORKED
