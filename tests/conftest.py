from __future__ import annotations

import pytest

from runs import FORKED, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def forked():
    """Start processes that have everything imported."""
    return FORKED
