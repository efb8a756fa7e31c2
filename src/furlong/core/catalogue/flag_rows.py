"""Flags, and functions that flags name."""

from __future__ import annotations

from furlong.core.catalogue.row import MQ, SQ, ST, Row

ROWS = (
    Row(
        "CFG01",
        "batch sizes do not fit",
        "P",
        "error",
        symptom="Sizes cannot be divided, or a rollout yields more or fewer samples than the steps train on.",
        cause="rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout does not hold.",
        checked="That equation, and that micro-batches and data-parallel ranks divide the global batch.",
        remedy="Use one of the nearest settings that fit; the message prints three, as flags to paste.",
        guides=(MQ, SQ, ST),
    ),
    Row(
        "CFG02",
        "a flag that does not exist or would be ignored",
        "P",
        "error",
        symptom="A setting has no effect.",
        cause="The flag is misspelled, belongs to slime and is not taken here, or needs another flag to act.",
        checked="Every flag and every key of a file is known, and acts with the backend and the other flags given.",
        remedy="Use the name that the message suggests, add the flag that it needs, or remove it.",
    ),
    Row(
        "CFG03",
        "asynchronous training with --colocate",
        "P",
        "error",
        symptom="An asynchronous run with --colocate fails or waits for ever.",
        cause="Colocated training and generation take turns on the same GPUs, so neither can run ahead of the other.",
        checked="--colocate together with --async-buffer-size or train_async.py.",
        remedy="Remove --colocate and give the engines GPUs of their own with --rollout-num-gpus.",
        guides=(ST,),
    ),
    Row(
        "CFG04",
        "--max-tokens-per-gpu without --use-dynamic-batch-size",
        "P",
        "error",
        symptom="The limit on tokens has no effect and memory runs out.",
        cause="--max-tokens-per-gpu limits micro-batches only where they are made by tokens.",
        checked="One of the two flags without the other.",
        remedy="Give --use-dynamic-batch-size and --max-tokens-per-gpu together; rollout_max_response_len / "
        "context_parallel_size is a safe start.",
        guides=(MQ,),
    ),
    Row(
        "CFG05",
        "flags are missing or contradict each other",
        "P",
        "error",
        symptom="The command is refused before it starts.",
        cause="A value is missing, out of its range, or excludes another one.",
        checked="Every flag's type and range, and every rule between flags.",
        remedy="The message names the flags, their values, and what to change.",
    ),
    Row(
        "HOOK01",
        "a function that a flag names cannot be used",
        "PRX",
        "error",
        symptom="ImportError or AttributeError for a --*-path flag; or samples that a generate function did not make.",
        cause="The module is not importable from here, its import fails, or it has no such function; or it raises.",
        checked="Every --*-path flag is imported, and its signature compared with what it will be called with; each "
        "step, how many samples a generate function left unmade.",
        remedy="Write package.module.function or file.py:function; the message shows what was raised and where.",
    ),
    Row(
        "HOOK02",
        "a function keeps everything else waiting",
        "R",
        "warning",
        symptom="Rollouts take many times longer with a generate function of one's own, and the engine is idle.",
        cause="It does something for a while without `await`: a request by a library that is not asynchronous, "
        "`time.sleep`, a subprocess, or work of its own. All samples share one thread.",
        checked="Each rollout: the seconds in which --custom-generate-function-path ran without awaiting anything, "
        "against the rollout's.",
        remedy="Use an asynchronous library (httpx.AsyncClient in place of requests), or "
        "`await asyncio.to_thread(function, ...)`.",
    ),
)
