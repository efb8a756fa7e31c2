"""SYNC03, SYNC04: what an engine would not do with the weights that it is sent."""

from __future__ import annotations

import re
from collections.abc import Iterator

from furlong.core.catalogue import Diagnosis, diagnosis
from furlong.diagnosis.preflight.context import Context
from furlong.sglang_layout.layout_facts import HASHED, KEEPS_ROUTER, OWN_HEAD

ROUTERS = r"mlp\.gate\.weight"


def kept_routers(context: Context) -> Iterator[Diagnosis]:
    """SYNC03: a trained router of which SGLang keeps a copy of its own."""
    config, model = context.config, context.model
    if config.cluster.engine != "sglang" or model is None or config.debug.debug_rollout_only:
        return
    family = model.text_config.get("model_type")
    if family not in KEEPS_ROUTER:
        return
    only, frozen = config.train.only_train_params_name_list, config.train.freeze_params_name_list or ()
    trained = [
        name
        for name in model.weight_map
        if re.search(ROUTERS, name)
        and (only is None or any(re.search(pattern, name) for pattern in only))
        and not any(re.search(pattern, name) for pattern in frozen)
    ]
    if trained:
        yield diagnosis(
            "SYNC03",
            f"{len(trained)} routers of this {family} model are trained ({trained[0]} is the first), and {HASHED[0]} "
            "goes on routing by those that it had at its first forward pass",
            remedy=f"--freeze-params-name-list '{ROUTERS}', or an SGLang that forgets `_weight_fp32` when it loads "
            "weights",
            evidence={"model_type": family, "routers": len(trained)},
        )


def own_head(context: Context) -> Iterator[Diagnosis]:
    """SYNC04: an output layer that is tied to the embedding, in a family of which SGLang has another one."""
    config, model = context.config, context.model
    if config.cluster.engine != "sglang" or model is None:
        return
    family, is_tied = model.text_config.get("model_type"), model.text_config.get("tie_word_embeddings", False)
    if family in OWN_HEAD and is_tied:
        yield diagnosis(
            "SYNC04",
            f"the output layer of this {family} model is its embedding (tie_word_embeddings of "
            f"{model.folder}/config.json), and {HASHED[0]} has another one, to which no weights come",
            remedy="set tie_word_embeddings to false there, and add the embedding, model.embed_tokens.weight, once "
            "more as lm_head.weight; or --engine embedded",
            evidence={"model_type": family, "tie_word_embeddings": is_tied},
        )
