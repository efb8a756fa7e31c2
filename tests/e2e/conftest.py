from __future__ import annotations

import pytest

from runs import sampled


@pytest.fixture(scope="session")
def embedded(model, data, tmp_path_factory):
    """The samples of each rollout of a run in one process, which others are compared with."""
    return sampled(model, data, tmp_path_factory.mktemp("embedded"))[0]
