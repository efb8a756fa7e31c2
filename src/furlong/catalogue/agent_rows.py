"""Diagnoses of agents and environments."""

from __future__ import annotations

from furlong.catalogue.row import Row

ROWS = (
    Row(
        "AGT01",
        "an agent tokenizes its history again",
        "R",
        "warning",
        symptom="Episodes become many samples, and log-probs depend on how text was split into tokens.",
        cause="The agent decodes answers to text and sends the ids of the encoded text. Encoding the text of sampled "
        "tokens often gives other tokens.",
        checked="Each request of token ids to a session: whether its text continues the latest answer, but its ids do "
        "not.",
        remedy="Append the returned `token_ids` to the ids of the prompt, or send messages to /v1/chat/completions, "
        "which keeps the ids.",
    ),
    Row(
        "AGT02",
        "conversations fork",
        "R",
        "warning",
        symptom="Each episode becomes several samples, and most of the work is prefill.",
        cause="The agent changes or drops earlier messages, so each such request begins a branch.",
        checked="The fraction of turns after the first that repeat an earlier conversation with changed messages.",
        remedy="Append each returned message unchanged. If the agent rewrites history on purpose, train on one branch "
        "with --session-leaves last; if it changes fields that do not matter, ignore them with --session-match "
        "FILE:fn.",
    ),
    Row(
        "AGT03",
        "the chat template cannot be extended",
        "R",
        "warning",
        symptom="Turns of one conversation become separate samples, although the agent changes no message.",
        cause="The template renders earlier messages differently once others follow, for example without reasoning or "
        "with tools in the last message, so the sampled ids are not a prefix of the next prompt.",
        checked="The turns whose messages continue a conversation, and whose rendered text does not.",
        remedy="Use a template that only appends with --chat-template-path; `furlong template test` shows where one "
        "rewrites.",
    ),
    Row(
        "AGT05",
        "an environment blocks the event loop",
        "R",
        "warning",
        symptom="Episodes take many times longer, and the engine is idle.",
        cause="An async method of the environment blocks without `await`. All episodes share one thread.",
        checked="Each rollout: the seconds in which --environment ran without awaiting, as a fraction of the rollout.",
        remedy="Write the method without `async`, so that it runs in one of the threads of --env-workers, or "
        "use asynchronous clients and `await asyncio.to_thread(function, ...)`.",
    ),
    Row(
        "AGT06",
        "sandboxes or processes of episodes are lost",
        "R",
        "warning",
        symptom="Episodes start over, or are missing from the batch.",
        cause="A sandbox, or a server that the agent needs, failed (`InfraError`); or code of the environment or agent "
        "function crashed its process of --env-workers, with all episodes in it.",
        checked="The fraction of episodes of a step that InfraError or the end of their process ended or started over.",
        remedy="Find the reason in the log (`grep -e 'the infrastructure of' -e 'the process of the environment ended' "
        "run.log`). Check the limits and the free memory of the machine that runs the sandboxes, or run fewer with "
        "--max-concurrent-episodes. Signals 6, 7, 8 and 11 are crashes of native code: debug the method that the log "
        "names. Signal 9 is usually the kernel that is out of memory: use fewer processes with --env-workers, or set "
        "--agent-memory-limit, which raises MemoryError.",
    ),
    Row(
        "AGT07",
        "agents end without asking the policy",
        "R",
        "warning",
        symptom="Samples are missing from the batch; the agent seems to succeed.",
        cause="Candidates: its requests are refused and it ignores that; it asks another endpoint than its session's; "
        "it gives up before its first request, or closes it before the answer.",
        checked="Episodes that ended without an answer of the policy.",
        remedy="Read the last refused request in the log (`grep 'last request was refused' run.log`). Without one, let "
        "the agent use `base_url` (a function) or OPENAI_BASE_URL and OPENAI_API_KEY (a command). Print "
        "what it does in one episode with --rollout-batch-size 1.",
    ),
)
