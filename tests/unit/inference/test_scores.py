"""Log-probs of given tokens, from the embedded engine and from servers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes_engine import run, tiny_engine, tiny_model
from furlong.errors import EngineError
from furlong.inference.embedded import decode_model
from furlong.inference.sglang.engine import HttpEngine
from served_engine import ServedEngine, connect, served_tiny

NUM_TOKENS, NUM_SCORED, TEMPERATURE = 150, 101, 0.7
TOKENS = np.random.default_rng(0).integers(0, 104, NUM_TOKENS).tolist()
IDS_RK = np.random.default_rng(1).integers(0, 104, (NUM_SCORED, 3)).astype(np.int32)


def expected(model):
    with torch.no_grad():
        logits_TV = model(torch.tensor([TOKENS])).logits[0].float()
    return (logits_TV[-NUM_SCORED - 1 : -1] / TEMPERATURE).log_softmax(-1).numpy()


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "qwen3_moe"])
def test_scores_are_the_models_own_log_probs(family, monkeypatch):
    monkeypatch.setattr(decode_model, "SCORED_TOKENS", 64)  # several passes
    config, model = tiny_model(family)
    _check(tiny_engine(config, model.state_dict()), model)


def test_a_server_returns_the_log_probs_of_ids_of_each_position(monkeypatch):
    """Those that are not among the most likely are asked for in windows of positions."""
    asked = []
    body = HttpEngine._scored

    async def counted(self, tokens, params, num_scored, num_top, ids=()):
        asked.append((len(tokens), num_scored, num_top, list(ids)))
        return await body(self, tokens, params, num_scored, num_top, ids)

    monkeypatch.setattr(HttpEngine, "_scored", counted)
    config, model = tiny_model("qwen2")
    _check(ServedEngine(config, model.state_dict()), model)
    first, *windows = asked
    assert first == (NUM_TOKENS, NUM_SCORED, 6, [])
    assert len(windows) > 10
    assert max(len(ids) for *_, ids in windows) <= 12
    assert sum(scored for _, scored, *_ in windows) <= NUM_SCORED


def _check(engine, model):
    log_probs_RV = expected(model)
    options = {"temperature": TEMPERATURE, "num_top": 2, "ids_RK": IDS_RK}
    scores = run(engine, lambda: engine.score(TOKENS, NUM_SCORED, **options))
    own = np.take_along_axis(log_probs_RV, np.array(TOKENS[-NUM_SCORED:])[:, None], 1)[:, 0]
    np.testing.assert_allclose(scores.log_probs_R, own, atol=1e-5)
    np.testing.assert_allclose(scores.asked_RK, np.take_along_axis(log_probs_RV, IDS_RK, 1), atol=1e-5)
    top = np.argsort(-log_probs_RV, 1)[:, :2]
    np.testing.assert_array_equal(scores.top_ids_RK, top)
    np.testing.assert_allclose(scores.top_log_probs_RK, np.take_along_axis(log_probs_RV, top, 1), atol=1e-5)


def test_scores_need_a_token_before_and_room_in_the_context():
    config, model = tiny_model("qwen2")
    for engine in (tiny_engine(config, model.state_dict()), ServedEngine(config, model.state_dict())):

        async def body(engine=engine):
            with pytest.raises(EngineError, match="2 of 2 tokens cannot be scored"):
                await engine.score([5, 6], 2)
            with pytest.raises(EngineError, match="192"):
                await engine.score([5] * 192, 4)

        run(engine, body)


def test_the_reply_of_a_server_has_sglangs_form():
    with served_tiny() as (url, embedded, _):
        server = connect(url)

        async def ask(**fields):
            params = {"max_new_tokens": 0, "temperature": 1.0}
            body = {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True, **fields}
            return (await server.ask("/generate", body))["meta_info"]

        async def body():
            meta = await ask(logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=[9, 4])
            scores = await embedded.score([5, 6, 7], 2)
            assert meta["input_token_logprobs"][0] == [None, 5, None]
            assert [row[0] for row in meta["input_token_logprobs"][1:]] == scores.log_probs_R.tolist()
            assert [row[1] for row in meta["input_token_logprobs"]] == [5, 6, 7]
            assert meta["input_top_logprobs"][0] is None
            assert [len(rows) for rows in meta["input_top_logprobs"][1:]] == [2, 2]
            assert [[row[1] for row in rows] for rows in meta["input_token_ids_logprobs"][1:]] == [[9, 4], [9, 4]]
            assert meta["completion_tokens"] == 0
            assert "input_top_logprobs" not in await ask(logprob_start_len=2)
            for fields, words in (
                ({"logprob_start_len": 3}, "logprob_start_len is 3, must be below the 3 tokens"),
                ({"top_logprobs_num": 2}, "top_logprobs_num is supported for log-probs of the prompt only"),
                ({"logprob_start_len": 0, "stream": True}, "cannot be streamed"),
                ({"logprob_start_len": 0, "token_ids_logprob": [104]}, "token_ids_logprob has 104"),
            ):
                with pytest.raises(EngineError, match=words):
                    await ask(**fields)

        run(server, body)
