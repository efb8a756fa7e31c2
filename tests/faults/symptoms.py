"""What users of other frameworks reported, and what says it here; docs/troubleshooting.md has the table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """One report: the symptom, the rows that cover it, and a note, for example why it cannot happen.

    tests: names of tests that verify the note.
    """

    seen: str
    rows: tuple[str, ...] = ()
    note: str = ""
    tests: tuple[str, ...] = ()


def _said(seen: str, *rows: str, note: str = "", tests: tuple[str, ...] = ()) -> Symptom:
    return Symptom(seen, rows, note, tests)


def _cannot(seen: str, note: str, *tests: str) -> Symptom:
    return Symptom(seen, (), note, tests)


SYMPTOMS = (
    # ---- installing
    _said("`undefined symbol` when a kernel package is imported", "ENV01", note="`furlong env` imports each one"),
    _said("pip cannot resolve an extra", "ENV01", tests=("test_tested_ranges_are_those_of_the_project",)),
    _said("engine and trainer want different versions of transformers", "ENV01"),
    # ---- starting
    _said("the run hangs while its placement group is pending", "GPU01", "GPU02"),
    _said("the run hangs at the first collective", "HANG01", "SYNC01",
          note="the stacks of all ranks are in the report; a rank that died is named",
          tests=("test_a_dead_rank_ends_the_call_while_others_would_wait_for_ever",)),
    _said("a batch cannot be split into equal chunks", "CFG01"),
    _said("the run hangs where the batch does not divide by the ranks", "CFG01",
          note="samples are packed onto ranks, and all ranks have equally many micro-batches",
          tests=("test_every_sample_is_in_exactly_one_micro_batch_under_the_cap_and_ranks_are_in_step",)),
    _said("a deadlock of `fork` under Ray",
          note="no process is forked: helpers are started anew, ranks by Ray",
          tests=("test_nothing_forks",)),
    _said("a lambda as reward fails when training starts", "HOOK01", note="functions are named by module or file"),
    _said("the folder of another run is overwritten, or the same command fails the second time", "CFG05",
          tests=("test_named_folder_with_recorded_steps_is_only_resumed",
                 "test_folder_of_a_live_run_is_refused")),
    _said("a flag for memory has no effect", "CFG02", tests=("test_every_flag_is_read_by_something",)),
    _said("a CPU run is ten times slower than it should be", "ENV02"),
    # ---- memory
    _said("out of memory when the engine starts", "MEM01", "GPU04", note="`furlong plan` adds what shares a GPU"),
    _said("out of memory after a hundred steps, at the longest sample", "MEM01", "MEM02",
          note="the plan is made for the longest sample that the flags allow"),
    _said("out of memory after a checkpoint", "MEM02", "MEM03",
          note="weights are written tensor by tensor; the message names the phase",
          tests=("test_a_checkpoint_of_several_ranks_is_several_files_none_of_them_a_pickle",)),
    _said("out of memory only where evaluation and saving differ", "MEM01", "MEM02",
          note="the plan has every phase; evaluation is generation, and a save writes the weights to files"),
    _said("the host's memory grows until Ray kills a worker", "MEM04", "KILL01"),
    # ---- numbers
    _said("the gap between training and rollout log-probs grows", "NUM02"),
    _said("the gap is on one engine only", "CKPT03",
          note="at each weight update the weights of every engine are compared with the trainer's",
          tests=("test_weights_that_differ_from_those_sent_are_refused_and_not_served",)),
    _said("the gradient norm climbs", "NUM03", "NUM02"),
    _said("the loss is 0.0 from the first step on", "REW02",
          note="with one optimizer step per rollout the ratio is 1 and advantages add up to 0, so a loss near 0 is "
          "right as long as `train/grad_norm` is not; where advantages are all 0, REW02 says so",
          tests=("test_at_ratio_one_every_algorithm_has_reinforces_gradient",)),
    _cannot("the loss depends on how a batch is accumulated",
            "losses are sums with the denominators of the whole step",
            "test_any_split_into_micro_batches_and_ranks_gives_the_same_step"),
    _cannot("a micro-batch is larger than its limit",
            "only a sample that is longer by itself is, and it is alone",
            "test_every_sample_is_in_exactly_one_micro_batch_under_the_cap_and_ranks_are_in_step"),
    # ---- templates and tokens
    _said("an assertion about prefixes in runs of several turns", "TPL02"),
    _said("the thinking of earlier turns is dropped", "TPL02", note="the message names the turn"),
    _said("tool calls are cleared, and the tokens are others than those generated", "NUM02", "TPL02",
          note="tokens are those of the engine; text that a function encodes anew has a share of NUM02's gap"),
    _said("every response is cut off", "STOP02", "STOP01"),
    # ---- rewards
    _said("every reward is 0", "REW02"),
    _cannot("a reward of 0.0 is taken for a missing one",
            "an outcome is scored, failed or timed out, whatever its value",
            "test_numbers_and_dicts_are_rewards"),
    _said("a failed rollout counts as a reward of 0", "REW03",
          note="what failed is left out, never averaged",
          tests=("test_reward_that_raises_is_counted_and_its_samples_are_masked",)),
    _cannot("one failed rollout ends the step",
            "it is counted, and masked within its group",
            "test_failing_and_hanging_generation_is_counted_and_masked"),
    _cannot("a reward model runs on the CPU without a word",
            "no verifier here has a model; one of your own is in your function, or behind `--rm-url`",
            "test_remote_rewards_and_their_failures_are_outcomes"),
    # ---- engines and weights
    _said("an endpoint is dead, and every process looks healthy", "ENG03", "HANG01",
          note="health is a request that generates",
          tests=("test_a_run_replaces_killed_and_stopped_engines_and_a_killed_router",)),
    _said("weights are damaged on their way", "CKPT03", "SYNC02"),
    _cannot("a version on disk is deleted before an engine has read it",
            "the version before is removed when the next one is whole and loaded",
            "test_a_version_is_a_whole_folder_and_the_one_before_is_removed"),
    _said("samples are older than the bound after a recovery", "ASYNC01",
          tests=("test_rollouts_are_trained_in_order_and_never_staler_than_the_bound",)),
    _said("one slow machine drags every step", "RANK01", "ENG04", "DATA03",
          note="ranks of one tensor, context or expert group are in step within a layer: their group is slow"),
    # ---- checkpoints and repetition
    _said("a resumed run starts at step 0", "CKPT06", "CKPT01"),
    _said("half a checkpoint is chosen", "CKPT01",
          tests=("test_crash_between_any_two_writes_leaves_the_old_checkpoint_or_the_new_one",)),
    _cannot("data is repeated or skipped after a resume",
            "the ledger accounts for each group of prompts, and is audited",
            "test_any_run_with_any_crashes_has_a_clean_ledger",
            "test_run_killed_eight_times_ends_like_one_that_was_not"),
    _said("the optimizer is not restored", "CKPT06", tests=("test_a_restored_backend_continues_bit_for_bit",)),
    _said("an exported model is too small, or has other names", "CKPT04",
          tests=("test_export_loads_in_transformers_with_the_trained_weights_and_the_tokenizer",)),
    _cannot("samples of a group have the same seed",
            "seeds differ by prompt, sample and position in the data",
            "test_samples_of_a_group_are_numbered_seeded_and_share_nothing"),
    _said("the same seed gives another run", "DET01"),
    _cannot("the last metrics are lost in a crash",
            "each step is a line that is written at once",
            "test_run_killed_eight_times_ends_like_one_that_was_not"),
)  # fmt: skip
