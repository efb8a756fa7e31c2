"""Functions under slime's names: scores, masks, requests and helpers."""

from __future__ import annotations

import asyncio

import pytest
import torch

import raw_server
from furlong.config.args_view import Args
from furlong.config.sections import Config
from furlong.errors import RolloutError
from furlong.models.tokenizer import build_tokenizer
from furlong.slime_api import helpers, http, masks, rewards


@pytest.mark.parametrize(
    ("response", "label", "strict", "score", "pred"),
    [
        ("so Answer: 42", "42", False, 1.0, "42"),
        ("so \\boxed{42}", "42", True, 1.0, "42"),
        ("so \\boxed{41}", "42", True, -1.0, "41"),
        ("so 42", "42", True, -1.0, None),
        ("\\boxed{42}" + " " * 100, "42", True, -1.0, None),
    ],
)
def test_dapo_scores(response, label, strict, score, pred):
    result = rewards.dapo_compute_score(response, label, strict_box_verify=strict)
    assert (result["score"], result["acc"], result["pred"]) == (score, score > 0, pred)


def test_scores_of_other_verifiers():
    assert rewards.grade_answer_verl("\\boxed{1/2}", "0.5")
    assert not rewards.grade_answer_verl("1/2", "0.5")
    assert rewards.extract_answer("a \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert rewards.last_boxed_only_string("a \\boxed{3}.") == "\\boxed{3}"
    assert rewards.last_boxed_only_string(r"a \fbox{ \frac{1}{2} }, \boxed{3") == r"\fbox{ \frac{1}{2} }"
    assert rewards.last_boxed_only_string(r"\boxed{2} and \boxed{} or \boxed{2}!") == r"\boxed{2}"
    assert rewards.last_boxed_only_string("none") is None
    assert rewards.f1_scores(None, "red") == (0.0, 0.0, 0.0)
    assert rewards.gpqa_reward(None, "A") == rewards.deepscaler_reward(None, "1") == 0.0
    assert rewards.f1_scores("a red cat", "the red dog") == (0.5, 0.5, 0.5)
    assert rewards.f1_scores("blue", "red") == (0.0, 0.0, 0.0)


def test_masks_are_those_of_sft():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}" + (
        "{% if add_generation_prompt %}a{% endif %}"
    )
    generator = masks.MultiTurnLossMaskGenerator(tokenizer, tokenizer_type="qwen3")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    tokens, mask = generator.get_loss_mask(messages)
    assert mask == [0, 0, 0, 0, 1, 1, 1]
    assert generator.get_response_lengths([mask, [0]]) == [3, 0]
    assert generator.get_text_from_loss_mask(tokens, mask) == ["yes"]


def test_functions_written_for_miles_pass_on_the_layout_of_sequences():
    args, log_probs = Args(Config()), torch.zeros(4)
    for gather in (helpers.all_gather_with_cp, helpers.slice_log_prob_with_cp):
        assert gather(log_probs, 6, 4, args.qkv_format, None) is log_probs
    assert args.qkv_format == "thd"


def test_a_coroutine_runs_from_a_thread_and_inside_a_loop():
    async def inner():
        return 3

    async def outer():
        return helpers.run(inner())

    assert helpers.run(inner()) == asyncio.run(outer()) == 3


@pytest.mark.parametrize(
    ("statuses", "result", "requests"),
    [([503, 200], {"ok": 1}, 2), ([400, 200], "HTTP 400", 1), ([503, 503], "HTTP 503", 2)],
)
def test_server_errors_are_repeated_and_refusals_are_not(monkeypatch, statuses, result, requests):
    left = list(statuses)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        status = left.pop(0)
        writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: 8\r\nconnection: close\r\n\r\n".encode() + b'{"ok":1}')
        await writer.drain()
        writer.close()

    async def go():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await http.post(f"http://127.0.0.1:{port}/x", {}, max_retries=2)

    monkeypatch.setattr(http, "WAIT_S", 0.001)
    if isinstance(result, dict):
        assert asyncio.run(go()) == result
    else:
        with pytest.raises(RolloutError, match=result):
            asyncio.run(go())
    assert len(statuses) - len(left) == requests


@pytest.mark.parametrize(
    "answer",
    [
        raw_server.http(b"<html>"),
        raw_server.http(b"[" * 100_000),
        raw_server.http(b"", status="302 Found", head="Location: /login\r\n"),
        raw_server.http(b"not gzip", head="Content-Encoding: gzip\r\n"),
    ],
)
def test_a_reply_that_is_not_json_is_an_error_at_once(answer):
    with raw_server.raw_server(answer) as server, pytest.raises(RolloutError, match=server.url):
        asyncio.run(http.post(f"{server.url}/x", {}, max_retries=1))
    assert len(server.requests) == 1
