"""Messages about weights that an engine has otherwise than they were sent."""

from __future__ import annotations

import pytest

from furlong.errors import SyncError
from furlong.weight_sync.verification import compare_checksums

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("sent", "loaded", "cause"),
    [
        ({TABLE: "a"}, {TABLE: "a", HEAD: "b"}, "other values than its embedding"),
        ({TABLE: "a"}, {TABLE: "a", HEAD: "a"}, "the same values as its embedding"),
        ({TABLE: "a", HEAD: "b"}, {TABLE: "a"}, "The trainer has a separate output layer"),
    ],
)
def test_a_separate_output_layer_is_compared_with_the_embedding(
    sent: dict[str, str], loaded: dict[str, str], cause: str
) -> None:
    with pytest.raises(SyncError, match="CKPT03") as refused:
        compare_checksums(sent, loaded, version=1)
    assert cause in str(refused.value)
    assert "tie_word_embeddings" in str(refused.value)
    assert "pipeline stages" not in str(refused.value)


def test_other_tensors_keep_the_general_cause() -> None:
    with pytest.raises(SyncError, match="pipeline stages"):
        compare_checksums({TABLE: "a", "x": "b"}, {TABLE: "c", "x": "d"}, version=1)
    compare_checksums({TABLE: "a"}, {TABLE: "a"}, version=1)
