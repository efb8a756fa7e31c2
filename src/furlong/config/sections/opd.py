"""Flags of the section `opd`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furlong.config.flag_spec import flag


@dataclass(frozen=True)
class OpdFlags:
    """On-policy distillation: learning from a teacher's log-probs of the policy's own samples."""

    use_opd: bool = flag(
        False, "Distill a teacher: minimize the reverse KL to it on the policy's own samples, with any algorithm."
    )
    opd_type: Literal["sglang", "megatron", "trainer"] | None = flag(
        None,
        "Where the teacher runs: `trainer` loads --opd-teacher-load beside the policy, with any training backend "
        "(`megatron` is slime's name for it); `sglang` asks engines or servers during the rollout. Default: `trainer` "
        "with --opd-teacher-load, else `sglang`.",
        needs="use_opd",
    )
    opd_loss: Literal["sampled", "topk", "full"] = flag(
        "sampled",
        "Estimator of the reverse KL of a token: `sampled` subtracts it from the advantage, by the token that was "
        "sampled; `topk` differentiates the KL over the policy's most likely tokens; `full` over the whole vocabulary, "
        "with the teacher in the trainer.",
        needs="use_opd",
    )
    opd_kl_coef: float = flag(1.0, "Weight of the reverse KL to the teacher.", within="[0, inf)", needs="use_opd")
    opd_task_reward_coef: float = flag(
        1.0,
        "Factor of the advantages that come from rewards. 0 is distillation alone.",
        within="[0, inf)",
        needs="use_opd",
    )
    opd_log_prob_top_k: int = flag(
        0,
        "Number of most likely tokens per position for --opd-loss topk, which a number above 0 selects. Default with "
        "--opd-loss topk: 32.",
        within="[0, inf)",
        needs="use_opd",
    )
    opd_top_k_strategy: Literal["only-student"] = flag(
        "only-student", "Whose most likely tokens --opd-loss topk compares: the policy's.", needs="opd_log_prob_top_k>0"
    )
    opd_reward_weight_mode: Literal["student_p"] = flag(
        "student_p", "Weights of these tokens: the policy's probabilities, as in the KL.", needs="opd_log_prob_top_k>0"
    )
    opd_topk_per_position: bool = flag(
        False,
        "Accepted for Miles compatibility; no effect.",
        needs="opd_log_prob_top_k>0",
        instead="the teacher is asked for the ids of a sample in any case",
    )
    opd_teacher_load: str | None = flag(
        None,
        "The teacher of --opd-type trainer: a Hugging Face folder, or a checkpoint directory, of a model with the "
        "policy's vocabulary, and with --train-backend megatron its architecture.",
        needs="use_opd",
        hub="model",
    )
    opd_teacher_ckpt_step: int | None = flag(
        None,
        "Checkpoint step of --opd-teacher-load. Default: the latest.",
        within="[0, inf)",
        needs="opd_teacher_load",
    )
    opd_teacher_urls: tuple[str, ...] | None = flag(
        None,
        "Teachers of --opd-type sglang by name: NAME=URL of a server's /generate, or NAME=FOLDER of a model to run in "
        "this process. Frozen models of --sglang-config are teachers, too. The one called `default`, or the only one, "
        "scores samples that name none.",
        metavar="NAME=URL",
        needs="use_opd",
        excludes="opd_teacher_load",
    )
    opd_teacher_key: str = flag(
        "opd_teacher",
        "Metadata key with the name of a sample's teacher.",
        needs="use_opd",
        excludes="opd_teacher_load",
    )
    opd_teacher_tokenizer: tuple[str, ...] | None = flag(
        None,
        "Folder with the tokenizer of a teacher that has another one than the policy: NAME=FOLDER, or FOLDER for the "
        "only teacher. It sees the prompt in its own chat template. They are aligned by the bytes of the response; "
        "tokens without a counterpart are left out.",
        metavar="NAME=FOLDER",
        needs="use_opd",
        excludes="opd_teacher_load",
    )
    opd_teacher_prompt_key: str | None = flag(
        None,
        "Metadata key with a prompt, text or messages, that the teacher sees instead of the sample's: "
        "self-distillation of what a longer prompt, or the answer, teaches.",
        metavar="KEY",
        needs="use_opd",
        excludes="opd_teacher_load",
    )

    @property
    def has_teacher_model(self) -> bool:
        """Whether the trainer loads the teacher."""
        return self.use_opd and self.opd_type in ("trainer", "megatron")

    @property
    def is_alone(self) -> bool:
        """Whether rewards do not count."""
        return self.use_opd and self.opd_task_reward_coef == 0
