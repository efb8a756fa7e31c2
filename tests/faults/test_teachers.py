"""Teachers that a run asks: what is wrong with one is found before the start."""

from __future__ import annotations

import json
import shutil

import pytest

from faults.world import names, only
from faults_marker import fault
from furlong.inference.sglang.external import SHOWN_TEXT
from furlong.models.tokenizer import load_tokenizer
from served_engine import ScriptedServer


@pytest.fixture
def distill(world):
    """Look at a run whose teacher is a copy of the model, which a test may change."""
    folder = shutil.copytree(world.model, world.folder / "teacher")

    def look(**changes):
        found = world.look(use_opd=True, **{"opd_teacher_urls": folder} | changes)
        return [each for each in found if each.severity != "info"]

    return folder, look


@fault("OPD01")
def test_a_teacher_of_another_vocabulary(distill):
    folder, look = distill
    assert look() == []
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    found = only(look(), "OPD01")
    assert names(found.finding, folder, "2 of the", "'a'")
    assert names(found.remedy, "--opd-teacher-tokenizer")
    assert look(opd_teacher_tokenizer=folder) == []


def test_a_teacher_of_another_template(distill):
    folder, look = distill
    assert look(apply_chat_template=True) == []
    path = folder / "chat_template.jinja"
    path.write_text("Q: {{ messages[0].content }} A:")
    found = only(look(apply_chat_template=True), "OPD01", "warning")
    assert names(found.finding, "Q: What is 3 + 4? A:")
    assert look(apply_chat_template=True, chat_template_path=path) == []
    assert look(apply_chat_template=True, opd_teacher_tokenizer=folder) == []


def test_a_teacher_in_the_trainer_with_another_template_or_a_short_context(distill):
    folder, look = distill
    given = {"opd_teacher_urls": None, "opd_teacher_load": folder, "apply_chat_template": True}
    assert look(**given) == []
    (folder / "chat_template.jinja").write_text("Q: {{ messages[0].content }} A:")
    assert names(only(look(**given), "OPD01", "warning").finding, "in the trainer", "Q: What is 3 + 4? A:")
    given.pop("apply_chat_template")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 8}))
    assert names(only(look(**given, rollout_max_response_len=8), "OPD01", "warning").finding, "context of 8 tokens")


def test_the_server_of_slimes_functions_is_compared_and_evaluations_by_them_are_reported(distill, world):
    functions = "slime.rollout.on_policy_distillation."
    flags = {"custom_rm_path": f"{functions}reward_func", "opd_teacher_urls": None, "rm_type": None}
    flags |= {"custom_reward_post_process_path": f"{functions}post_process_rewards"}
    folder, look = distill
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))

    async def answer(path, body):
        return 200, {"version": "0.5.16", "tokenizer_path": str(folder)}

    server = ScriptedServer(answer)
    flags["rm_url"] = f"{server.url}/generate"
    try:
        assert names(only(look(**flags), "OPD01").finding, "the teacher default", "logits of 8 tokens")
        (folder / "config.json").write_text(json.dumps(config))
        found = only(look(**flags, eval_prompt_data=["held", world.data]), "REW01", "warning")
    finally:
        server.stop()
    assert names(found.remedy, "rm_type in --eval-config")


FUNCTION = "slime.rollout.on_policy_distillation.reward_func"
PROCESS = "slime.rollout.on_policy_distillation.post_process_rewards"


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        ({"custom_reward_post_process_path": None}, f"add --custom-reward-post-process-path {PROCESS}"),
        ({"custom_rm_path": None, "rm_type": "math"}, f"add --custom-rm-path {FUNCTION}"),
        ({"use_opd": False}, "add --use-opd"),
        ({"rm_url": None}, "add --rm-url http"),
        ({"custom_reward_post_process_path": None, "opd_teacher_load": "model"}, "remove it"),
    ],
)
def test_slimes_functions_that_lack_a_part_are_one_problem_with_its_remedy(world, flags, remedy):
    async def answer(path, body):
        return 200, {"meta_info": {}, "text": ""}

    server = ScriptedServer(answer)
    given = {"rm_type": None, "custom_rm_path": FUNCTION, "custom_reward_post_process_path": PROCESS, "use_opd": True}
    given |= {"rm_url": f"{server.url}/generate"} | flags
    try:
        found = world.look(**given | ({"opd_teacher_load": world.model} if "opd_teacher_load" in flags else {}))
    finally:
        server.stop()
    assert names(only(found, "CFG05").remedy, remedy)


@pytest.mark.parametrize("flags", [{}, {"custom_rm_path": FUNCTION, "custom_reward_post_process_path": PROCESS}])
def test_a_teacher_that_is_down_or_is_no_engine_is_found_before_the_start(world, flags):
    async def answer(path, body):
        return 200 if "authorization" in server.headers[-1] else 401, {"version": "0.5.16"}

    given = flags | {"use_opd": True, "rm_type": None, "rm_url": "http://127.0.0.1:9/generate"}
    assert names(only(world.look(**given), "ENG05").finding, "teacher default", "http://127.0.0.1:9")
    server = ScriptedServer(answer)
    try:
        given["rm_url"] = f"{server.url}/generate"
        assert names(only(world.look(**given), "ENG05").remedy, "--sglang-api-key")
        assert world.look(**given, sglang_api_key="sesame") == []
        assert server.headers[-1]["authorization"] == "Bearer sesame"
    finally:
        server.stop()


def test_a_prompt_for_the_teacher_that_no_row_has(distill, world):
    _, look = distill
    world.write({"input": "1+1=", "label": "2", "metadata": {"hint": "1+1=2"}})
    found = only(look(rollout_batch_size=1, opd_teacher_prompt_key="hnit"), "DATA01")
    assert names(found.finding, "--opd-teacher-prompt-key hnit")
    assert names(found.remedy, "hint")
    assert look(rollout_batch_size=1, opd_teacher_prompt_key="hint") == []
    world.write({"input": "1+1=", "label": "2", "metadata": {"hint": 2}})
    found = only(look(rollout_batch_size=1, opd_teacher_prompt_key="hint"), "DATA01")
    assert names(found.finding, "row 0: metadata.hint", "2 of type int")


def test_a_row_of_a_teacher_that_does_not_exist(distill, world):
    folder, look = distill
    world.write({"input": "1+1=", "label": "2", "metadata": {"opd_teacher": "math"}})
    found = only(look(rollout_batch_size=1), "DATA01")
    assert names(found.finding, "row 0", "'math'")
    assert names(found.remedy, "default", "--opd-teacher-urls")
    assert look(rollout_batch_size=1, opd_teacher_urls=f"math={folder}") == []


@fault("OPD04")
def test_a_server_that_answers_at_another_temperature(world):
    ids = None

    async def answer(path, body):
        if path == "/server_info":
            return 200, {"version": "0.5.16", "context_length": 64}
        return (200, {}) if path == "/model_info" else (200, {"tokens": ids})

    ids = load_tokenizer(world.model).encode(SHOWN_TEXT, add_special_tokens=False)
    server = ScriptedServer(answer)
    flags = {"use_opd": True, "opd_teacher_urls": f"{server.url}/generate"}
    try:
        found = only(world.look(rollout_temperature=0.7, **flags), "OPD04", "warning")
        assert names(found.finding, "0.7")
        assert world.look(rollout_temperature=1, **flags) == []
        long = only(world.look(rollout_max_context_len=64, **flags), "OPD01", "warning")
        assert names(long.finding, "context of 64 tokens")
        ids = [1, 2, 3]
        assert names(only(world.look(**flags), "OPD01").finding, server.url, "[1, 2, 3]")
    finally:
        server.stop()
