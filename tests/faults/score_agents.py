"""Faults of agents and environments, written before they were run, for the score of diagnoses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import faulty_agents
from diagnosed_runs import run
from diagnosis_score import Case, case, steps
from furlong.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.postmortem.run_examination import examine

AGENTS = faulty_agents.__file__
SERVED: dict[str, Any] = {"agent_function_path": "own.py:solve", "rollout_batch_size": 8}
MARKS_THE_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if loop.last %} (now){% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _played(name: str, rows: str, flag: str, function: Callable[..., Any], *, fails: bool = False, template: str = "",
            remedy: str = "", without: str = "", also: str = "", **flags: Any) -> Case:  # fmt: skip
    """Make a case of a run of the quickstart's problems with a faulty agent. fails: the run ends with an error."""

    def diagnose(folder: Path) -> list[Diagnosis]:
        own: dict[str, Any] = {flag: f"{AGENTS}:{function.__name__}", "num_rollout": 1, "rm_type": "random"} | flags
        if flag == "environment":
            own |= {flag: [own[flag]], "rm_type": None}
        if template:
            own["chat_template_path"] = folder / "own.jinja"
            own["chat_template_path"].write_text(template)
        code, found = run(folder / "run", **own)
        assert (code != 0) == fails, f"{name}: exit code {code}"
        if fails:
            return examine(folder / "run").diagnoses
        return [diagnosis(id, event["finding"], severity=event["severity"]) for id, event in found.items()]

    return case(name, rows, diagnose, remedy=remedy, without=without, also=also, is_slow=True)


METRICS = (
    steps("one request of ids that were encoded again", "AGT01",
          [{"session/retokenised": 1.0, "session/forked_frac": 0.3, "session/leaves": 1.1}], SERVED,
          remedy="/v1/chat/completions", without="--session-leaves"),
    steps("a summary every other turn", "AGT02",
          [{"session/forked_frac": 0.5, "session/leaves": 3.5, "session/branch_reason/compacted": 60.0}], SERVED,
          remedy="--session-match"),
    steps("a template that moves its tools", "AGT03", [{}, {"session/branch_reason/stripped": 2.0}],
          {"agent_command": "python agent.py"}, remedy="furlong template test"),
    steps("prompts that are dropped more and more", "AGT04",
          [{"rollout/prefix_cache_hit_frac": share} for share in (0.9, 0.49, 0.3, 0.1)], SERVED,
          remedy="--sglang-disable-radix-cache"),
    steps("requests that go round", "AGT04", [{"rollout/prefix_cache_hit_frac": 0.25}] * 4,
          SERVED | {"engine": "sglang", "rollout_num_gpus": 4, "sglang_router_strategy": "round_robin"},
          remedy="consistent_hashing"),
    steps("an environment that computes in every step", "AGT05",
          [{"perf/generate_held_time": 60.0, "perf/rollout_time": 61.0}], {"environment": ["own.py:Env", "2.0"]},
          remedy="asyncio.to_thread"),
    steps("sandboxes that never start", "AGT06",
          [{"rollout/episodes/reissued": 64.0, "rollout/episodes/infra": 60.0}], SERVED,
          remedy="--max-concurrent-episodes"),
    steps("agents that give up or raise", "AGT07",
          [{"rollout/episodes/silent": 4.0, "rollout/generate_failed": 10.0}], SERVED, remedy="base_url",
          also="HOOK01"),
    steps("processes out of memory", "AGT08",
          [{"rollout/episodes/reissued": 3.0, "rollout/episodes/process_ended": 3.0}], SERVED,
          remedy="--agent-memory-limit"),
    steps("lost sandboxes and a crash", "AGT06 AGT08",
          [{"rollout/episodes/reissued": 9.0, "rollout/episodes/process_ended": 3.0}], SERVED, also="AGT06 AGT08"),
)  # fmt: skip

CUSTOM, SERVES, ENVIRONMENT = "custom_generate_function_path", "agent_function_path", "environment"
PLAYED = (
    _played("text encoded again in pieces", "AGT01", CUSTOM, faulty_agents.cuts_tokens_of_its_history,
            remedy="token_ids"),
    _played("only the last messages", "AGT02", CUSTOM, faulty_agents.keeps_the_last_messages,
            remedy="--session-leaves last"),
    _played("answers that are rewritten", "AGT02", CUSTOM, faulty_agents.corrects_its_answers,
            remedy="Append each returned message"),
    _played("a template that marks the last message", "AGT03", CUSTOM, faulty_agents.converses,
            template=MARKS_THE_LAST, remedy="--chat-template-path"),
    _played("an environment that computes", "AGT05", ENVIRONMENT, faulty_agents.Computing, remedy="--env-workers"),
    _played("a database that refuses", "AGT06", CUSTOM, faulty_agents.loses_its_database_after_a_turn,
            remedy="the infrastructure of"),
    _played("a server that refuses", "AGT07", SERVES, faulty_agents.hides_that_its_server_refuses, remedy="base_url"),
    _played("agents that never ask", "AGT07", SERVES, faulty_agents.answers_by_itself, fails=True, remedy="base_url"),
    _played("environments that the kernel ends", "AGT08", ENVIRONMENT, faulty_agents.OutOfMemory,
            remedy="--env-workers", env_workers=["process", "2"], rollout_batch_size=4),
    _played("an agent function that reads a truncated map", "AGT08", SERVES, faulty_agents.reads_a_truncated_map,
            remedy="the process of the environment ended", env_workers=["process", "2"], rollout_batch_size=4),
)  # fmt: skip

CASES: tuple[Case, ...] = (*METRICS, *PLAYED)
