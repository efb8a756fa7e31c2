"""Weights on disk: checkpoints, Hugging Face models, quantization."""

from __future__ import annotations

from furlong.core.catalogue.row import MD, MQ, SD, SQ, ST, Row

ROWS = (
    Row(
        "CKPT01",
        "no complete checkpoint in a folder to load from",
        "P",
        "error",
        symptom="Text is garbled from the first rollout, or a log says that no checkpoint was loaded.",
        cause="A trainer checkpoint has latest_checkpointed_iteration.txt; a Hugging Face model does not.",
        checked="--load and --ref-load contain latest_checkpointed_iteration.txt, and the iteration in it is complete.",
        remedy="Use the folder that --save wrote, select a step with --ckpt-step, or start from a Hugging Face model "
        "with --hf-checkpoint.",
        guides=(MQ, MD, SQ, ST),
    ),
    Row(
        "CKPT02",
        "--ckpt-step names a missing step",
        "P",
        "error",
        symptom="The wrong iteration is loaded, or none.",
        cause="That step was not saved, or --keep-checkpoints removed it.",
        checked="The iter_* folders of --ckpt-step and --ref-ckpt-step exist and are complete.",
        remedy="Use the nearest existing step; the message lists them.",
        guides=(MQ, SQ),
    ),
    Row(
        "CKPT03",
        "engine and trainer have different weights",
        "R",
        "error",
        symptom="The first rollout is garbled although the parameters were loaded.",
        cause="A tensor name is mapped to another layer (wrong offsets of pipeline stages), a tensor was quantized "
        "during the transfer, the engine released a buffer and did not restore it, or the precision differs.",
        checked="After the first weight update, checksums of tensors in the trainer against those in the engine: "
        "all tensors with --check-weight-update-equal, otherwise a sample.",
        remedy="The message names the first tensor that differs, with both shapes, dtypes and norms; use "
        "--check-weight-update-equal and --debug-weight-sync 1 to see all of them.",
        guides=(MD, SD),
    ),
    Row(
        "CKPT04",
        "incomplete model folder",
        "P",
        "error",
        symptom="Loading fails with a missing shard, or parts of the model keep random values.",
        cause="A download was interrupted, or a conversion left files out.",
        checked="Every shard of model.safetensors.index.json exists and has the length that its header states, every "
        "tensor of the index is in its shard, every layer has tensors, and layers of one kind have the same number.",
        remedy="Download or convert the model again; `furlong check DIR` names the missing shard or layer.",
        guides=(SD,),
    ),
    Row(
        "CKPT05",
        "the checkpoint has another number of ranks",
        "P",
        "info",
        symptom="Parallel sizes differ from those of the save.",
        cause="The cluster or the parallel layout has changed; checkpoints are resharded when they are loaded.",
        checked="Parallel sizes in the checkpoint against those of this run.",
        remedy="No action is needed: the message shows the old and the new layout.",
        guides=(ST,),
    ),
    Row(
        "CKPT06",
        "state that a resumed run starts from",
        "P",
        "warning",
        symptom="It is unclear whether a run resumes where it ended: step, data, optimizer and random state.",
        cause="--load names a folder with a checkpoint.",
        checked="--load: the step, data position, optimizer and random state in the checkpoint.",
        remedy="To resume, set --load to the folder of --save. The message lists what will be restored; missing parts "
        "start from scratch.",
        guides=(MQ, SQ),
    ),
    Row(
        "CKPT07",
        "no model in --hf-checkpoint",
        "P",
        "error",
        symptom="`transformers` cannot find a model, on one node or on some of several.",
        cause="The folder is missing or incomplete, or it is a name on the hub; furlong does not download models.",
        checked="--hf-checkpoint is a folder with config.json, weights and a readable tokenizer.",
        remedy="Pass a local folder to --hf-checkpoint; `hf download NAME --local-dir DIR` downloads one.",
        guides=(MQ, SQ),
    ),
    Row(
        "CKPT08",
        "a run would overwrite checkpoints",
        "P",
        "error",
        symptom="After a second start there are fewer checkpoints, or those of two runs in one folder.",
        cause="--save names a folder with checkpoints, and --load does not continue from it.",
        checked="The checkpoints in --save against the first rollout of this run.",
        remedy="Continue them with --load, or give each run its own --save folder.",
        guides=(),
    ),
    Row(
        "QNT01",
        "weights other than linear layers would be quantized",
        "P",
        "error",
        symptom="A router or an embedding of an INT4 model is all zeros.",
        cause="quantization_config.ignore does not cover them, and the engine skips quantized names that it does not "
        "have.",
        checked="quantization_config.ignore against every two-dimensional weight that is not a linear layer, and those "
        "that are stored unquantized.",
        remedy="Add the patterns that the message prints to quantization_config.ignore in config.json.",
        guides=(SD,),
    ),
    Row(
        "QNT02",
        "incomplete quantized checkpoint",
        "P",
        "error",
        symptom="A converted checkpoint lacks shards or layers.",
        cause="The conversion left something out, or was interrupted.",
        checked="The checks of CKPT04, and that every packed weight has its scales and shape.",
        remedy="Convert again; `furlong check DIR` names what is missing.",
        guides=(SD,),
    ),
)
