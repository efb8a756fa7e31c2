"""Faults of agents and environments in runs: each is reported with its values and a fix, and gone once fixed."""

from __future__ import annotations

from pathlib import Path

import faulty_agents
from diagnosed_runs import run
from faults_marker import fault
from furlong.config.command_line import config_from_values
from furlong.diagnosis.monitors import MONITORS
from furlong.diagnosis.monitors.monitor import MonitorSuite, RunFacts
from runs import rows

HERE = Path(faulty_agents.__file__)
NUMBERED = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.revindex }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def agent(function) -> dict[str, object]:
    return {"custom_generate_function_path": f"{HERE}:{function.__name__}", "num_rollout": 1}


@fault("AGT01")
def test_ids_of_text_that_was_encoded_again(tmp_path):
    code, found = run(tmp_path / "run", **agent(faulty_agents.sends_text_encoded_again))
    assert (code, "AGT01" in found, "AGT02" in found) == (0, True, False)
    assert found["AGT01"]["evidence"] == {"step": 1, "requests": rows(tmp_path / "run")[0]["session/retokenised"]}
    assert "token_ids" in found["AGT01"]["remedy"]
    code, found = run(tmp_path / "mended", **agent(faulty_agents.sends_the_sampled_ids))
    assert (code, {id for id in found if id.startswith("AGT")}) == (0, set())


@fault("AGT02")
def test_a_first_message_that_changes_with_every_turn(tmp_path):
    code, found = run(tmp_path / "run", **agent(faulty_agents.numbers_its_turns_in_the_first_message))
    assert (code, {id for id in found if id.startswith("AGT")}) == (0, {"AGT02"})
    assert found["AGT02"]["evidence"]["share"] == rows(tmp_path / "run")[0]["session/forked_frac"] >= 0.25
    assert "--session-leaves last" in found["AGT02"]["remedy"]
    code, found = run(tmp_path / "mended", **agent(faulty_agents.converses))
    assert (code, {id for id in found if id.startswith("AGT")}) == (0, set())


@fault("AGT03")
def test_a_template_that_counts_messages_from_the_end(tmp_path):
    template = tmp_path / "numbered.jinja"
    template.write_text(NUMBERED)
    code, found = run(tmp_path / "run", chat_template_path=template, **agent(faulty_agents.converses))
    assert (code, {id for id in found if id.startswith("AGT")}) == (0, {"AGT03"})
    assert found["AGT03"]["evidence"]["turns"] == rows(tmp_path / "run")[0]["session/branch_reason/stripped"]
    assert "--chat-template-path" in found["AGT03"]["remedy"]


@fault("AGT05")
def test_an_environment_that_sleeps_in_an_async_method(tmp_path):
    def environment(kind):
        return {"environment": [f"{HERE}:{kind.__name__}"], "num_rollout": 1, "rm_type": None}

    code, found = run(tmp_path / "run", **environment(faulty_agents.Sleepy))
    assert (code, "AGT05" in found, "HOOK02" in found) == (0, True, False)
    assert found["AGT05"]["evidence"]["held_s"] > 1
    assert "--env-workers" in found["AGT05"]["remedy"]
    assert "AGT05" not in run(tmp_path / "mended", **environment(faulty_agents.Patient))[1]


@fault("AGT06")
def test_sandboxes_that_are_evicted(tmp_path):
    code, found = run(tmp_path / "run", **agent(faulty_agents.loses_its_sandbox_at_times))
    assert (code, "AGT06" in found, "AGT07" in found) == (0, True, False)
    evidence = found["AGT06"]["evidence"]
    assert evidence["reissued"] == rows(tmp_path / "run")[0]["rollout/episodes/reissued"] >= 2
    assert "the infrastructure of" in (tmp_path / "run" / "run.log").read_text()  # as the remedy has it


@fault("AGT07")
def test_agents_that_give_up_before_their_first_request(tmp_path):
    flags = {"agent_function_path": f"{HERE}:gives_up_at_times", "num_rollout": 1}
    code, found = run(tmp_path / "run", **flags)
    assert (code, "AGT07" in found, "HOOK01" in found) == (0, True, False)
    assert found["AGT07"]["evidence"] == {"step": 1, "silent": 8.0, "share": 0.25}
    assert "base_url" in found["AGT07"]["remedy"]


@fault("AGT06")
def test_environments_that_crash_their_process(tmp_path):
    environment = {"environment": [f"{HERE}:Crashing"], "num_rollout": 1, "rm_type": None, "rollout_batch_size": 2}
    code, found = run(tmp_path / "run", env_workers=["process", "2"], **environment)
    assert (code, "AGT06" in found) == (0, True)
    assert found["AGT06"]["evidence"]["ended"] == rows(tmp_path / "run")[0]["rollout/episodes/process_ended"] >= 1
    assert "the process of the environment ended" in (tmp_path / "run" / "run.log").read_text()  # as the remedy has it


def test_a_few_forks_and_rendering_by_choice_are_healthy():
    row = {"session/forked_frac": 0.2, "session/branch_reason/stripped": 9.0, "rollout/episodes/reissued": 1.0}
    chosen = RunFacts(config_from_values({"session_history": "template"}))
    assert MonitorSuite(MONITORS, chosen).step(1, row) == []
