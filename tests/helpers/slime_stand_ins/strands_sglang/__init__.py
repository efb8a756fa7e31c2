"""Stand-in of strands_sglang: posts token ids to SGLang with its own HTTP client and keeps the trajectory."""

from __future__ import annotations

from dataclasses import dataclass, field

import httpx


@dataclass
class Trajectory:
    token_ids: list = field(default_factory=list)
    loss_mask: list = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    initial_prompt_length: int = 0

    def add(self, tokens, mask, logprobs):
        self.token_ids += tokens
        self.loss_mask += [mask] * len(tokens)
        self.logprobs += logprobs


def get_client_from_slime_args(args, timeout):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    return lambda: httpx.AsyncClient(base_url=url, timeout=timeout, trust_env=False)


class ToolLimiter:
    def __init__(self, max_tool_iters):
        self.tool_iter_count = self.tool_call_count = 0


class SGLangModel:
    def __init__(self, tokenizer, client, tool_parser, sampling_params):
        self.tokenizer, self.client, self.params = tokenizer, client, sampling_params
        self.rollout = Trajectory()

    def observe(self, text):
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        self.rollout.add(tokens, 0, [0.0] * len(tokens))

    async def ask(self, text):
        self.observe(text)
        self.rollout.initial_prompt_length = self.rollout.initial_prompt_length or len(self.rollout.token_ids)
        body = {"input_ids": self.rollout.token_ids, "sampling_params": self.params, "return_logprob": True}
        async with self.client() as client:
            reply = (await client.post("/generate", json=body)).raise_for_status().json()
        pairs = reply["meta_info"]["output_token_logprobs"]
        self.rollout.add([pair[1] for pair in pairs], 1, [pair[0] for pair in pairs])

    def reset(self):
        pass
