"""Small versions of slime's launch scripts: tiny models of the same families, the same flags, two rollouts on a CPU.

Parallel sizes are 1, lengths and batches are small, and flags that need GPUs (engines, flash attention, offloading,
deterministic kernels of CUDA) are left out; everything else is as in the script of that name. Most rewards are
random, as a random model never solves a task.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PretrainedConfig

from furlong.config.checks.validate import notices
from furlong.config.command_line import examine, load
from furlong.models.hf_model import build_model, load_model, save_model
from furlong.models.tokenizer import build_tokenizer
from models_zoo import add_vision, family_config
from runs import ALPHABET, rows, train

pytest.importorskip("megatron", reason="megatron-core is not installed")
# megatron-core calls what PyTorch has deprecated
pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}={% endif %}{% endfor %}"
)
STD_FILTER = "furlong.rollout.filters.check_reward_nonzero_std"

DENSE = """--swiglu --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
  --num-query-groups 2 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm"""
QWEN2 = f"{DENSE} --add-qkv-bias --norm-epsilon 1e-6"
QWEN3 = f"{DENSE} --norm-epsilon 1e-6 --kv-channels 8 --qk-layernorm --untie-embeddings-and-output-weights"
EXPERTS = """--moe-ffn-hidden-size 24 --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion
  --moe-aux-loss-coeff 0"""
QWEN3_MOE = f"""{QWEN3} {EXPERTS} --position-embedding-type rope --rotary-percent 1.0 --num-experts 4
  --moe-router-score-function softmax --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-layer-freq [1,1]
  --moe-token-drop-policy probs"""
SIGMOID = f"""{EXPERTS} --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-enable-expert-bias
  --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type alltoall
  --moe-layer-freq [0]*1+[1]*1"""
GLM4_MOE = f"""{DENSE} {SIGMOID} --qk-layernorm --kv-channels 8 --rotary-percent 0.5 --num-experts 4
  --moe-router-topk 2 --moe-shared-expert-intermediate-size 24 --untie-embeddings-and-output-weights"""
LATENT = f"""--disable-bias-linear --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
  --kv-channels 4 --normalization RMSNorm --position-embedding-type rope --norm-epsilon 1e-6 --swiglu
  --untie-embeddings-and-output-weights --multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8
  --qk-pos-emb-head-dim 4 --v-head-dim 6 --qk-layernorm --mscale 1.0 --mscale-all-dim 1.0 --attention-softmax-in-fp32
  --no-rope-fusion {SIGMOID} --num-experts 8 --moe-router-topk 3 --moe-router-group-topk 2 --moe-router-num-groups 4"""
GLM4 = """--spec slime_plugins.models.glm4 get_glm_spec --post-self-attn-layernorm --post-mlp-layernorm
  --rotary-interleaved --rotary-percent 0.5 --no-rope-fusion --swiglu --num-layers 2 --normalization RMSNorm"""
GATED = """--spec slime_plugins.models.SPEC --disable-bias-linear --qk-layernorm --group-query-attention --swiglu
  --num-attention-heads 4 --num-query-groups 2 --kv-channels 8 --num-layers 2 --hidden-size 32 --ffn-hidden-size 48
  --use-gated-attention --normalization RMSNorm --apply-layernorm-1p --position-embedding-type rope --norm-epsilon 1e-6
  --rotary-percent 0.25 --untie-embeddings-and-output-weights --rotary-base 10000 --attention-output-gate"""
GATED_EXPERTS = """--moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16 --moe-router-score-function softmax
  --moe-token-dispatcher-type alltoall --moe-router-topk 2 --moe-layer-freq [1,1] --num-experts 4 --moe-grouped-gemm
  --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0
  --moe-shared-expert-gate"""
QWEN35 = GATED.replace("SPEC", "qwen3_5 get_qwen3_5_spec")
MODELS = {
    "qwen3_next": f"{GATED.replace('SPEC', 'qwen3_next get_qwen3_next_spec')} {GATED_EXPERTS}",
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe_text": f"{QWEN35} {GATED_EXPERTS}".replace("--ffn-hidden-size 48", ""),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "moonlight": LATENT,
    "deepseek_v3": f"{LATENT} --q-lora-rank 12",
}

ROLLOUT = """--prompt-data DATA --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
  --rm-type random --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8
  --rollout-temperature 1 --global-batch-size 16 --balance-data"""
SAVED = "--hf-checkpoint MODEL --ref-load MODEL --load SAVE --save SAVE --save-interval 2"
EVALUATED = """--eval-interval 2 --eval-prompt-data aime DATA --n-samples-per-eval-prompt 2
  --eval-max-response-len 8 --eval-top-p 1"""
PERF = """--tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
  --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform
  --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 1024"""
GRPO = """--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
  --eps-clip 0.2 --eps-clip-high 0.28"""
PPO = """--advantage-estimator ppo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type k1 --kl-coef 0.00
  --entropy-coef 0.00 --eps-clip 4e-4 --num-critic-only-steps 1 --normalize-advantages --megatron-config-path ROLES
  --ci-test --rollout-temperature 0.8"""
GSPO = "--advantage-estimator gspo --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00 --entropy-coef 0.00"
OPTIMIZER = """--optimizer adam --lr 1e-3 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
  --adam-beta2 0.98"""
MISC = "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32"
BASE = f"{SAVED} {ROLLOUT} {EVALUATED} {PERF} {GRPO} {OPTIMIZER} {MISC}"
FILTERED = f"--over-sampling-batch-size 8 --dynamic-sampling-filter-path {STD_FILTER} --num-steps-per-rollout 4"
FEWER_SAMPLES = "--global-batch-size 4"
DEEPEP = "--moe-enable-deepep --moe-token-dispatcher-type flex"
TAUGHT = f"""{SAVED} --prompt-data DATA --input-key messages --rollout-shuffle --num-epoch 1 --rollout-batch-size 8
  --global-batch-size 8 --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns
  --debug-train-only --optimizer adam --lr 1e-3 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1
  {PERF} {MISC}"""

# name: (family, flags)
SCRIPTS: dict[str, tuple[str, str]] = {
    "run-qwen3-4B": ("qwen3", f"{BASE} --rm-type deepscaler"),
    "run-qwen3-32B": ("qwen3", BASE),
    "run-qwen3-4B-amd": (
        "qwen3",
        f"{BASE} --no-offload-train --no-offload-rollout --no-gradient-accumulation-fusion",
    ),
    "run-qwen2.5-0.5B-gb10-smoke": ("qwen2", f"{SAVED} {ROLLOUT} {GRPO} {OPTIMIZER} {MISC} --num-steps-per-rollout 1"),
    "run-qwen2.5-0.5B-reproducibility": (
        "qwen2",
        f"{BASE} --calculate-per-token-loss --deterministic-mode --eval-top-k 1 --kl-coef 0.00 --rm-type math",
    ),
    "run-qwen3-30B-A3B": ("qwen3_moe", BASE),
    "run-qwen3-235B-A22B": ("qwen3_moe", f"{BASE.replace(GRPO, GSPO)} --eps-clip 4e-4".replace(EVALUATED, "")),
    "run-glm4-9B": ("glm4", BASE),
    "run-glm4.7-355B-A32B": (
        "glm4_moe",
        f"{BASE.replace(GRPO, GSPO)} --eps-clip 1e-4 --eps-clip-high 2e-4 --use-tis {FILTERED} {FEWER_SAMPLES} "
        f"{DEEPEP} --rollout-stop-token-ids 1 3",
    ),
    "run-moonlight-16B-A3B": ("moonlight", f"{BASE} {FILTERED} {FEWER_SAMPLES} {DEEPEP}"),
    "run-deepseek-r1": ("deepseek_v3", f"{BASE} {FILTERED} {FEWER_SAMPLES} {DEEPEP}"),
    "multi_task": ("qwen3", BASE.replace(EVALUATED, "--eval-interval 2 --eval-config SETS")),
    "run-qwen3-4b-mis": (
        "qwen3",
        f"{BASE} --use-tis --custom-config-path MIS --custom-tis-function-path "
        "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    ),
    "run-qwen3-4B-base-sft": ("qwen3", TAUGHT),
    "run-qwen3-next-80B-A3B": ("qwen3_next", f"{BASE.replace(GRPO, GSPO)} --eps-clip 4e-4 {DEEPEP}"),
    "run-qwen3.5-27B": ("qwen3_5_text", BASE),
    "run-qwen3.5-35B-A3B-sft": ("qwen3_5_moe_text", f"{TAUGHT} --loss-mask-type qwen3_5 {DEEPEP}"),
    "run-qwen3-235B-A22B-sft": ("qwen3_moe", TAUGHT),
    "test_qwen3_4B_ppo": ("qwen3", f"{BASE.replace(GRPO, PPO)} --rollout-data-transport nixl"),
}
ON_COMMIT = ("run-qwen3-4b-mis", "run-moonlight-16B-A3B")
ASYNCHRONOUS = ("run-qwen3-4B-base-sft", "run-qwen3-235B-A22B-sft")
ROLES = """
megatron:
  - {name: default, role: critic, overrides: {lr: 1e-2}}
  - {name: default, role: actor, overrides: {lr: 1e-3}}
"""
MIS = """
use_tis: true
use_rs: true
tis_level: "token"
rs_level: "token"
tis_mode: "truncate"
tis_lower_bound: 0.5
tis_upper_bound: 2.0
rs_lower_bound: null
rs_upper_bound: null
rs_veto_threshold: 1.0e-4
tis_batch_normalize: true
"""


def small_config(family: str) -> PretrainedConfig:
    """Return a config of two layers; Moonlight is a DeepSeek-V3 without compressed queries."""
    config = family_config("deepseek_v3" if family == "moonlight" else family)
    if family == "moonlight":
        config.q_lora_rank = None
    return config


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return a function that writes the model of a family, with a chat template, once."""
    written: dict[tuple[str, int], Path] = {}

    def write(family: str, seed: int = 0) -> Path:
        if (family, seed) not in written:
            folder = tmp_path_factory.mktemp(family)
            tokenizer = build_tokenizer(ALPHABET[:30] + "<>?")
            tokenizer.chat_template = TEMPLATE
            config = small_config(family)
            config.vocab_size = -(-len(tokenizer) // 8) * 8
            model = build_model(config, seed=seed)
            ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            model.generation_config = GenerationConfig(**ends)
            save_model(model, folder)
            tokenizer.save_pretrained(folder)
            if family == "qwen3_5_moe_text":
                add_vision(folder)
            written[family, seed] = folder
        return written[family, seed]

    return write


def write_files(folder: Path) -> dict[str, str]:
    """Write the files that a script names, and return their paths by placeholder."""
    asked = [{"role": "user", "content": f"abc{number % 7}"} for number in range(16)]
    lines: list[dict[str, Any]] = [
        {"prompt": [ask], "label": "1", "messages": [ask, {"role": "assistant", "content": "cab"}]} for ask in asked
    ]
    data, sets, mis, roles = (folder / name for name in ("rows.jsonl", "sets.yaml", "mis.yaml", "roles.yaml"))
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared = "eval:\n  defaults: {max_response_len: 8, top_p: 0.7}\n  datasets:\n"
    sets.write_text(shared + "".join(f"    - {{name: {n}, path: {data}, rm_type: math}}\n" for n in ("aime", "gpqa")))
    mis.write_text(MIS)
    roles.write_text(ROLES)
    paths = {"DATA": data, "SETS": sets, "MIS": mis, "ROLES": roles, "SAVE": folder / "saved"}
    return {name: str(path) for name, path in paths.items()}


def command(name: str, model: Path, folder: Path) -> list[str]:
    """Return the arguments of a script's training command."""
    family, flags = SCRIPTS[name]
    files = write_files(folder) | {"MODEL": str(model)}
    words = [files.get(word, word) for word in f"{MODELS[family]} {flags}".split()]
    own = f"--train-backend megatron --num-threads 1 --no-use-tensorboard --output-dir {folder / 'run'}"
    return [*words, *own.split()]


def test_the_flags_of_all_launch_scripts_fit_their_models(tmp_path):
    for name, (family, _) in SCRIPTS.items():
        (tmp_path / family).mkdir(exist_ok=True)
        (tmp_path / family / "config.json").write_text(json.dumps(small_config(family).to_dict()))
        _, problems = examine(command(name, tmp_path / family, tmp_path))
        assert problems == [], name


@pytest.mark.parametrize(
    "name", [name if name in ON_COMMIT else pytest.param(name, marks=pytest.mark.nightly) for name in SCRIPTS]
)
def test_a_small_version_of_a_launch_script_trains(name, model_of, tmp_path):
    words = command(name, model_of(SCRIPTS[name][0]), tmp_path)
    assert train(words, **({"async_buffer_size": 1} if name in ASYNCHRONOUS else {})) == 2
    table = [row for row in rows(tmp_path / "run") if row["step"]]  # evaluations are step 0
    assert [row["step"] for row in table] == [1, 2]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    has_signal = words[len(words) - words[::-1].index("--rm-type")] == "random" if "--rm-type" in words else True
    for row in table[1:] if "ppo" in words else table:  # its first step trains only the critic
        assert math.isfinite(row["train/loss"])
        assert row["train/grad_norm"] > 0 or not has_signal
        if "sft_loss" not in words:  # the engine has the trainer's weights
            assert row["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_ref_load_without_a_kl_gives_the_initial_weights(model_of, tmp_path):
    model, other = model_of("qwen3"), model_of("qwen3", seed=1)
    words = command("run-qwen3-4B-base-sft", model, tmp_path)
    words += ["--lr", "0", "--min-lr", "0", "--save-hf", str(tmp_path / "hf_{rollout_id}")]
    words[words.index("--ref-load") + 1] = str(other)
    assert [notice for notice in notices(load(words).config) if notice.startswith("--ref-load")]
    assert train(words) == 2
    (saved,) = tmp_path.glob("hf_*")
    trained, start = (dict(load_model(path).named_parameters()) for path in (saved, other))
    assert all(trained[name].equal(start[name]) for name in start)
