"""Dumps, replays, profiles and determinism."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class DebugFlags:
    """Parts of the loop on their own, dumps and replays."""

    debug_rollout_only: bool = flag(False, "Generate and score only; no trainer is built.")
    debug_train_only: bool = flag(False, "Train only, on --load-debug-rollout-data; no engine is built.")
    save_debug_rollout_data: str | None = flag(
        None, "File for each rollout's samples (safetensors); `{rollout_id}` is replaced."
    )
    load_debug_rollout_data: str | None = flag(
        None, "File of samples to train on in place of generating; `{rollout_id}` is replaced. Sets --debug-train-only."
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None, "Fraction of those samples that is used.", within="(0, 1]", needs="load_debug_rollout_data"
    )
    save_debug_train_data: str | None = flag(
        None,
        "File for each rollout's training batch; `{rollout_id}` is replaced, and `{rank}` by the training process, "
        "each of which writes what it trains on.",
    )
    dump_details: str | None = flag(None, "Folder that both dumps go to.")
    debug_rollout_print_every: int | None = flag(
        None, "Rollouts between two samples that are logged in full.", within="[1, inf)"
    )
    trace: bool = flag(
        False, "Write what every process does when, to trace.json in the run's folder; open it in ui.perfetto.dev."
    )
    use_pytorch_profiler: bool = flag(
        False, "Profile training with PyTorch's profiler, into profile/ in the run's folder."
    )
    profile_target: tuple[str, ...] = flag(
        ("train_overall",),
        "What to profile: train_overall (the whole round), train_actor (the optimizer steps), train_log_probs.",
        needs="use_pytorch_profiler",
    )
    profile_step_start: int = flag(
        1,
        "First rollout that is profiled; the first one of all has warm-up in it.",
        within="[0, inf)",
        needs="use_pytorch_profiler",
    )
    profile_step_end: int = flag(
        2, "Rollout before which profiling ends.", within="[1, inf)", needs="use_pytorch_profiler"
    )
    record_memory_history: bool = flag(
        False, "Record who allocates what on the GPU, into profile/; view it at pytorch.org/memory_viz."
    )
    memory_snapshot_num_steps: int = flag(
        1, "Rollouts after which the memory snapshot is written.", within="[1, inf)", needs="record_memory_history"
    )
    debug_weight_sync: int = flag(0, "1 logs every tensor of a publication with its checksum.", within="[0, 1]")
    debug_determinism: bool = flag(
        False,
        "Write hashes of data order, tokens, log-probs, advantages, loss, gradients and parameters of each step to "
        "determinism.jsonl; `furlong diff` compares two runs.",
    )
    replay: str | None = flag(
        None,
        "Folder of a run whose order of completion is followed, so that an asynchronous run is repeated bit for bit.",
    )
    check_weight_update_equal: bool = flag(
        False, "Publish twice at the start; a tensor that the engine held otherwise in between is an error."
    )
