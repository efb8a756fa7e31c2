"""Compare predicted with measured memory: training phases, multiple ranks, offload, a sleeping trainer, and engines.

    python benchmarks/gpu/memory.py                           # all parts; two-GPU parts only if there are two GPUs
    python benchmarks/gpu/memory.py --parts trainer offload --shapes 0.6b
    python benchmarks/gpu/memory.py --parts engine --shapes 0.6b 1.7b -- --attention-backend fa3
    python benchmarks/gpu/memory.py --parts megatron --shapes 0.6b 1.7b          # Megatron-core with one rank
    python benchmarks/gpu/memory.py --parts ranks --one-gpu --shapes 0.6b 1.7b   # two ranks, each with half of one GPU

Predictions come from `tools.memory_formulas` (`furlong plan`) and use only the model's dimensions. Each line
shows predicted bytes, measured bytes and their ratio; the target is 0.85 to 1.15.

    trainer   PyTorch's peak allocated memory per phase of the second step: shapes, micro-batches, recomputation
    offload   the same with moments, or moments and master weights, offloaded to the host
    megatron  the same for the Megatron-core backend with one rank
    ranks     the same on rank 0 of two (FSDP2 and Megatron-core), each on its own GPU or, with --one-gpu, half of one
    sleep     what a sleeping trainer moves to the host, and what remains on the device
    engine    SGLang at `--fractions` of the device: weights, KV cache, CUDA graphs and total use; then after releasing
              memory, with and without releasing graphs (SGLANG_MEMORY_SAVER_CUDA_GRAPH), and whether the output after
              resuming is unchanged
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from rollout import client_of, options_from, write_model
from train_mfu import SHAPES, RandomBackend, Task, free, megatron_backend

from furlong.algo.policy_loss import PolicyLoss
from furlong.config.sections import AlgoFlags, MegatronFlags, OptimFlags, TrainFlags
from furlong.core.batch import pack_micro_batch
from furlong.inference.sglang.engine import sampling_json
from furlong.inference.supervisor.launch import SglangLaunch
from furlong.inference.supervisor.process import HostGpus, LocalHost
from furlong.inference.supervisor.replica import start_server
from furlong.interfaces import SamplingParams
from furlong.tools.memory_formulas import (
    GIB,
    ModelSize,
    ServingSetup,
    TrainingSetup,
    on_host,
    serving_phase,
    training_phases,
    usable,
)
from furlong.tools.memory_plan import ASLEEP_FRAC, asleep_bytes
from furlong.training.backend_interface import PipelinedBackend
from furlong.training.megatron.parallel_layout import Layout
from furlong.training.ranks import Ranks, join
from furlong.training.settings import Offload

TAGS = ("weights", "kv_cache", "cuda_graph")


@dataclass(frozen=True)
class Case:
    """One trainer configuration, with the inputs of its prediction."""

    shape: str
    tokens: int
    note: str = "-"
    whole_layers: bool = False
    offload: Offload = "nothing"
    ranks: int = 1
    backend: str = "fsdp"
    tensor: int = 1

    @property
    def layout(self) -> Layout:
        """Return Megatron's parallel layout."""
        return Layout(tensor=self.tensor, sequence_parallel=self.tensor > 1)

    @property
    def train_flags(self) -> TrainFlags:
        """Return the flags of recomputation and tensor parallelism."""
        return TrainFlags(
            recompute_activations=self.whole_layers,
            tensor_model_parallel_size=self.tensor,
            sequence_parallel=self.tensor > 1,
        )

    @property
    def optim_flags(self) -> OptimFlags:
        """Return the flags of the optimizer and its offload."""
        return OptimFlags(
            lr=1e-6,
            offload_optimizer_states=self.offload == "moments",
            optimizer_cpu_offload=self.offload == "all",
        )

    @property
    def training(self) -> TrainingSetup:
        """Return the setup that the prediction takes."""
        return TrainingSetup(
            self.tokens,
            layout=self.layout if self.backend == "megatron" else None,
            shards=self.ranks,
            whole_layers=self.whole_layers,
            is_offloaded=self.offload != "nothing",
            offloads_masters=self.offload == "all",
        )


TRAINER = (
    Case("0.6b", 8192),
    Case("0.6b", 32768),
    Case("0.6b", 131072),
    Case("0.6b", 32768, "recompute", whole_layers=True),
    Case("1.7b", 16384),
    Case("1.7b", 65536),
    Case("1.7b", 65536, "recompute", whole_layers=True),
    Case("4b", 8192),
    Case("4b", 32768),
    Case("4b", 32768, "recompute", whole_layers=True),
)
OFFLOAD = tuple(
    Case(shape, 32768, f"offloaded {what}", offload=what)
    for shape in ("0.6b", "1.7b", "4b")
    for what in ("moments", "all")
)
MEGATRON = (
    Case("0.6b", 8192, "megatron", backend="megatron"),
    Case("0.6b", 32768, "megatron", backend="megatron"),
    Case("0.6b", 32768, "megatron, recompute", whole_layers=True, backend="megatron"),
    Case("1.7b", 16384, "megatron", backend="megatron"),
    Case("1.7b", 32768, "megatron", backend="megatron"),
    Case("1.7b", 32768, "megatron, recompute", whole_layers=True, backend="megatron"),
)
RANKS = (
    Case("0.6b", 32768, "2 ranks", ranks=2),
    Case("0.6b", 32768, "2 ranks, dp", ranks=2, backend="megatron"),
    Case("0.6b", 32768, "2 ranks, tp", ranks=2, backend="megatron", tensor=2),
    Case("1.7b", 32768, "2 ranks", ranks=2),
    Case("1.7b", 32768, "2 ranks, dp", ranks=2, backend="megatron"),
    Case("1.7b", 32768, "2 ranks, tp", ranks=2, backend="megatron", tensor=2),
    Case("4b", 32768, "2 ranks, recompute", whole_layers=True, ranks=2),
    Case("4b", 32768, "2 ranks", ranks=2),
)


class Table:
    """Measurements so far; `add` prints one."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, predicted: float, measured: float, note: str = "") -> None:
        """Print and store one measurement in bytes."""
        ratio = predicted / measured if measured else float("nan")
        figures = f"predicted {predicted / GIB:6.2f} GiB  measured {measured / GIB:6.2f} GiB  {ratio:5.2f}"
        print(f"{what:<46} {figures}  {note}", flush=True)
        self.rows.append({"what": what, "predicted": predicted, "measured": measured, "ratio": ratio, "note": note})


def size_of(shape: str) -> ModelSize:
    """Return the dimensions that the prediction uses."""
    return ModelSize.read(SHAPES[shape].config().to_dict())


def build(case: Case, device: torch.device, ranks: Ranks) -> Any:
    """Build the backend of a case."""
    sections = {"train": case.train_flags, "optim": case.optim_flags}
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, **sections}
    if case.backend == "megatron":
        return megatron_backend(
            SHAPES[case.shape].config(), ranks, megatron=MegatronFlags(expert_tensor_parallel_size=1), **how
        )
    return RandomBackend(SHAPES[case.shape], ranks=ranks, **how)


def peaks_of(backend: Any, case: Case, device: torch.device) -> dict[str, int]:
    """Return the peak bytes of each phase in the second step."""
    task = Task(case.tokens, min(8192, case.tokens), min(512, case.tokens // 4), 2)
    batch, loss = task.batch(SHAPES[case.shape].vocab_size), PolicyLoss(AlgoFlags())
    weights = np.full(len(batch.loss_masks), 1 / len(batch.loss_masks), np.float32)
    micro_rows = np.split(np.arange(len(batch)), 2)
    micros = [pack_micro_batch(batch, rows, weights, device=device) for rows in micro_rows]
    peaks: dict[str, int] = {}

    def peak_of(name: str, work: Callable[[], Any]) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0

    for _ in range(2):
        if isinstance(backend, PipelinedBackend):
            peak_of("log-probs", lambda: backend.log_probs_of(micros))
            peak_of("train", lambda: backend.forward_backward_of(micros, loss))
        else:
            peak_of("log-probs", lambda: [backend.log_probs(micro) for micro in micros])
            peak_of("train", lambda: [backend.forward_backward(micro, loss) for micro in micros])
        peak_of("optimizer step", backend.optim_step)
    return peaks


def show(table: Table, case: Case, peaks: dict[str, int], device_bytes: int) -> None:
    """Add the phases of one case to the table."""
    for phase in training_phases(size_of(case.shape), case.training, usable(device_bytes)):
        what = f"{case.shape:>5} {case.tokens:>7,} {case.note:<19} {phase.name}"
        table.add(what, phase.total, peaks[phase.name], phase.note)


def measure_trainer(cases: tuple[Case, ...], table: Table, args: argparse.Namespace) -> None:
    """Measure cases, in this process or, for Megatron or several ranks, in subprocesses."""
    device = torch.device(args.device)
    for case in chosen(cases, args):
        if case.ranks == 1 and case.backend == "fsdp":
            backend = build(case, device, Ranks())
            show(table, case, peaks_of(backend, case, device), args.device_bytes)
            del backend
        else:
            peaks = peaks_of_ranks(case, args)
            if peaks is not None:
                show(table, case, peaks, args.device_bytes // (case.ranks if args.one_gpu else 1))
        free()


def chosen(cases: tuple[Case, ...], args: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases of the requested shapes; with `tiny`, scaled down for a CPU."""
    for case in cases:
        shape = args.shapes[0] if args.shapes == ["tiny"] else case.shape
        if shape in args.shapes:
            yield replace(case, shape="tiny", tokens=256, offload="nothing") if shape == "tiny" else case


# ---- multiple ranks


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank of a case; rank 0 writes the measurements."""
    case, rank = Case(**json.loads(args.case)), args.rank
    device = torch.device("cuda", 0 if args.one_gpu else rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if args.one_gpu:
            take_share(case.ranks)
    backend = "nccl" if device.type == "cuda" else "gloo"
    join(
        rank=rank, world_size=case.ranks, address="127.0.0.1", port=args.port, backend=backend,
        timeout=timedelta(seconds=args.limit),
    )  # fmt: skip
    ranks = Ranks(rank, case.ranks, tensor=case.tensor)
    peaks = peaks_of(build(case, device, ranks), case, device)
    if rank == 0:
        args.out.write_text(json.dumps(peaks))
    ranks.leave()


def take_share(count: int) -> None:
    """Limit this process to one of `count` equal shares of its GPU, also in the free memory it sees."""
    whole = torch.cuda.get_device_properties(0).total_memory
    outside = in_use()  # the CUDA context and earlier allocations
    torch.cuda.set_per_process_memory_fraction(1 / count)

    def of_share(_device: Any = None) -> tuple[int, int]:
        return max(whole // count - outside // count - torch.cuda.memory_reserved(), 0), whole // count

    torch.cuda.mem_get_info = of_share


def environment_of(rank: int, args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of a rank. NCCL rejects two ranks on one GPU unless their host ids differ."""
    own = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"} if args.one_gpu else {}
    return {**os.environ, **own}


def peaks_of_ranks(case: Case, args: argparse.Namespace) -> dict[str, int] | None:
    """Run a case in subprocesses, killed after `--limit` seconds; return the peaks of rank 0."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        out = Path(folder) / "peaks.json"
        words = ["--case", json.dumps(vars(case)), "--port", str(port), "--out", str(out), "--limit", str(args.limit)]
        words += ["--one-gpu"] if args.one_gpu else []
        command = [sys.executable, "-W", "ignore", __file__, "--device", args.device, *words]
        logs = [(Path(folder) / f"{rank}.log").open("w+") for rank in range(case.ranks)]
        running = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], stdout=log, stderr=subprocess.STDOUT, env=environment_of(rank, args)
            )
            for rank, log in enumerate(logs)
        ]
        deadline = time.monotonic() + args.limit
        while any(one.poll() is None for one in running) and not any(one.poll() for one in running):
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        codes = [one.poll() for one in running]
        for one, log in zip(running, logs, strict=True):
            one.kill()
            one.wait()
            log.seek(0)
            if any(codes) or None in codes:
                print(f"{case}: exit {codes}\n{log.read()[-3000:]}", flush=True)
            log.close()
        return json.loads(out.read_text()) if out.exists() else None


# ---- sleeping trainer


def measure_sleep(table: Table, args: argparse.Namespace) -> None:
    """Measure a trainer that sleeps after training steps."""
    device = torch.device(args.device)
    for case in (Case(shape, 8192) for shape in args.shapes if shape != "tiny" or args.device == "cpu"):
        case = Case(case.shape, 256) if case.shape == "tiny" else case
        backend = build(case, device, Ranks())
        peaks_of(backend, case, device)
        moved = backend.offload()
        held = on_host(size_of(case.shape), case.training, sleeps=True)
        table.add(
            f"{case.shape:>5} asleep, on the host", sum(held.values()), moved.num_bytes, f"in {moved.seconds:.2f} s"
        )
        if device.type == "cuda":
            left = torch.cuda.memory_reserved()
            print(f"{case.shape:>5} asleep, remaining on the device: {left / 2**20:.0f} MiB", flush=True)
        woken = backend.onload()
        print(f"{case.shape:>5} awake after {woken.seconds:.2f} s", flush=True)
        del backend
        free()


# ---- engines


def in_use() -> int:
    """Return the bytes of the GPU in use by all processes."""
    available, total = torch.cuda.mem_get_info()
    return total - available


async def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """Send a POST request to the server and return the JSON response."""
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        return (await client.post(f"{url}{path}", json=body)).raise_for_status().json()


async def answer(url: str) -> list[int]:
    """Return greedily sampled tokens for a batch of eight prompts, which uses CUDA graphs."""
    prompts = [list(range(5 + i, 69 + i)) for i in range(8)]
    params = sampling_json(SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True))
    said = await post(url, "/generate", {"input_ids": prompts, "sampling_params": params, "return_logprob": True})
    return [token for one in said for _, token, _ in one["meta_info"]["output_token_logprobs"]]


async def measure_engine(
    shape: str, fraction: float, *, frees_graphs: bool, table: Table, args: argparse.Namespace
) -> None:
    """Measure one server after start, asleep, and after resuming."""
    title = f"{shape:>5} engine at {fraction:g}" + (", releases graphs" if frees_graphs else "")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = write_model(shape, folder / "model", args.device)
        free()
        before = in_use()
        options = options_from(list(args.options)) | {"mem_fraction_static": fraction}
        env = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true" if frees_graphs else "false"}
        launch = SglangLaunch(model, num_gpus=1, has_text=False, is_colocated=True, options=options, env=env)
        served = await start_server(launch, 0, [HostGpus(LocalHost(), 0, 1)], log_dir=folder / "logs")
        try:
            await served.while_starting(served.wait_until_ready(), args.limit)
            server = await client_of(served, 8)
            whole = in_use() - before
            info = await server.ask("/server_info")
            says = next(iter(info.get("internal_states", [{}])), {}).get("memory_usage", {})
            print(f"{title}: reports {says}, max_total_num_tokens {info.get('max_total_num_tokens')}", flush=True)
            size = size_of(shape)
            plan = serving_phase(size, ServingSetup(fraction), args.device_bytes)
            for part, name in (("weights", "weight"), ("KV cache", "kvcache")):
                if name in says:
                    table.add(f"{title}: {part}", plan.parts[part], float(says[name]) * GIB)
            asleep = max(ASLEEP_FRAC * args.device_bytes, asleep_bytes(size, ServingSetup(fraction, requests=8)))
            table.add(f"{title}: in use", plan.total + asleep, whole, f"graphs {says.get('graph')} GiB")
            first = await answer(served.url)
            await server.release_memory(TAGS)
            table.add(f"{title}: asleep", asleep, in_use() - before, "remains allocated while the trainer runs")
            await server.resume_memory(TAGS)
            await post(served.url, "/update_weights_from_disk", {"model_path": str(model)})
            same = "are unchanged" if await answer(served.url) == first else "DIFFER FROM BEFORE"
            print(f"{title}: resumed at {(in_use() - before) / GIB:.2f} GiB, output tokens {same}", flush=True)
            await server.close()
        finally:
            await served.stop()


def main() -> None:
    """Measure the requested parts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("trainer", "offload", "megatron", "ranks", "sleep", "engine")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "1.7b", "4b"])
    parser.add_argument("--fractions", nargs="+", type=float, default=[0.4, 0.8])
    parser.add_argument(
        "--one-gpu", action="store_true", help="part `ranks`: run two ranks on one GPU, each with half of its memory"
    )
    parser.add_argument(
        "--limit", type=float, default=240.0, help="time limit in seconds of a multi-rank case, and of an engine start"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    for name, kind in (("case", str), ("rank", int), ("port", int), ("out", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help="options of the SGLang server, after `--`")
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
        return
    args.device_bytes, name = 16 * GIB, "CPU: memory is not measured"
    if args.device == "cuda":
        args.device_bytes, name = torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {name}, {args.device_bytes / GIB:.1f} GiB", flush=True)
    table = Table()
    for part in args.parts:
        match part:
            case "trainer":
                measure_trainer(TRAINER, table, args)
            case "offload":
                measure_trainer(OFFLOAD, table, args)
            case "megatron":
                measure_trainer(MEGATRON, table, args)
            case "ranks":
                if args.device == "cpu" or args.one_gpu or torch.cuda.device_count() > 1:
                    measure_trainer(RANKS, table, args)
            case "sleep":
                measure_sleep(table, args)
            case _ if args.device == "cuda":
                for shape in args.shapes:
                    for fraction in args.fractions:
                        for frees in (False, True):
                            asyncio.run(measure_engine(shape, fraction, frees_graphs=frees, table=table, args=args))
    measured = [row for row in table.rows if row["measured"]]
    outside = [row["what"].strip() for row in measured if not 0.85 <= row["ratio"] <= 1.15]
    print(f"{len(measured)} measurements, {len(outside)} with a ratio outside 0.85-1.15: {outside}")
    if args.json:
        args.json.write_text(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
