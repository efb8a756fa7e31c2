"""Verifies that weights arrived in engines outside this process, as strictly as each server allows.

- `furlong serve` computes the same checksums as this program: every bit of every tensor is compared.
- SGLang hashes the tensors of its own layout with its own function. Where both are known (`sglang_layout`), every
  tensor of every process is compared, too.
- SGLang's loader of quantized weights (`sglang_layout.quantized_loading`) compares the sums of all of their tensors.
  The checksums of the others are compared as above after the first update of a server, and by the loader after later
  ones, because SGLang dequantizes the whole model for its own.
- For other servers (later pipeline stages, unknown model families), rows of some tensors are compared if the model can
  show them; the server's checksum must change exactly when the weights do, and be equal on all servers of a layout.

A warning names what could not be compared.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping, Sequence

import torch

from furlong.catalogue import diagnosis
from furlong.core.tracing import tracer
from furlong.core.weights import WeightSource, checksum
from furlong.errors import EngineError, NoAnswerError, SyncError
from furlong.inference.sglang.server import SglangServer
from furlong.sglang_layout.layout_checksums import APART, DENSE, HEAD, WHOLE, WITH_EXPERTS, accepted, expected, kind_of
from furlong.transfer.threads import in_thread
from furlong.weight_sync.transports.ipc import check_message
from furlong.weight_sync.weight_record import ROWS, WeightRecord

logger = logging.getLogger(__name__)

EMBEDDING = "embed_tokens.weight"
UNTIE = (
    'compare lm_head.weight and the embedding in --hf-checkpoint: if they differ, set "tie_word_embeddings": false in '
    "its config.json; if they are equal, remove lm_head.weight from its files"
)


def compare_checksums(
    sent: Mapping[str, str], loaded: Mapping[str, str], *, version: int, source: WeightSource | None = None
) -> None:
    """Raise SyncError naming the tensors that differ, are missing, or were not sent (CKPT03).

    With the `source` of the weights, the message describes the first such tensor (shape, dtype, norm), and tensors that
    arrived as all zeros are reported as SYNC02.
    """
    different = [name for name in sent if name in loaded and loaded[name] != sent[name]]
    missing = [name for name in sent if name not in loaded]
    extra = [name for name in loaded if name not in sent]
    if not (different or missing or extra):
        return
    described: dict[str, str] = {}
    if source is not None:
        firsts, zero = {names[0] for names in (different, missing, extra) if names}, list[str]()
        for name, tensor in source.open():
            if name in firsts:
                dtype = str(tensor.dtype).removeprefix("torch.")
                norm = float(tensor.float().norm())
                described[name] = f", {tuple(tensor.shape)} {dtype} of norm {norm:.4g} in the trainer"
            if name in loaded and loaded[name] != sent.get(name) and loaded[name] == checksum(torch.zeros_like(tensor)):
                zero.append(name)
        if zero:
            raise zero_weights_error(zero, version=version)
    parts = [
        f"{len(names)} {what} (first: {names[0]}{described.get(names[0], '')})"
        for what, names in (("differ", different), ("did not arrive", missing), ("were never sent", extra))
        if names
    ]
    head_cause = _head_cause(loaded, [*different, *missing, *extra])
    difference = diagnosis(
        "CKPT03",
        f"weight_sync version {version}: of {len(sent)} tensors, {', '.join(parts)}; the engine must not serve these "
        "weights",
        cause=head_cause,
        remedy=UNTIE
        if head_cause
        else "check that trainer and engine read the same --hf-checkpoint, and the name mapping of this family; "
        "--check-weight-update-equal compares every tensor, --debug-weight-sync 1 logs it",
        evidence={"version": version, "differ": different[:16], "missing": missing[:16], "extra": extra[:16]},
    )
    raise SyncError(difference.text())


def _head_cause(loaded: Mapping[str, str], names: Sequence[str]) -> str | None:
    """Return why only the output layer differs: one side ties it to the embedding, the other does not; else None."""
    head = next((name for name in names if name.endswith(HEAD)), None)
    embedding = next((name for name in loaded if name.endswith(EMBEDDING)), None)
    if head is None or embedding is None or len(set(names)) > 1:
        return None
    if head not in loaded:
        return f"The trainer has a separate output layer ({head}); the engine uses its embedding, {embedding}."
    same = "the same values as" if loaded[head] == loaded[embedding] else "other values than"
    return (
        f"The engine has a separate output layer ({head}), with {same} its embedding ({embedding}); the trainer "
        "ties the two."
    )


def zero_weights_error(names: Sequence[str], *, version: int) -> SyncError:
    """Make the error for tensors that are all zero in the engine but not in the trainer (SYNC02)."""
    problem = diagnosis(
        "SYNC02",
        f"weight_sync version {version}: {len(names)} tensors are all zero in the engine and not in the trainer: "
        + ", ".join(names[:3]),
        cause="The engine skips them, because they were quantized under a name that it does not know.",
        remedy="add their patterns to quantization_config.ignore in config.json (see QNT01 of `furlong check DIR`)",
    )
    return SyncError(problem.text())


def record_for(servers: Sequence[SglangServer], *, is_quantized: bool = False) -> WeightRecord:
    """Make an empty record of what verifying these servers will need."""
    dtypes = [server.checksum_dtype for server in servers]
    on_device = [server for server in servers if server.device_dtypes]
    return WeightRecord(
        frozenset(dtype for dtype in dtypes if dtype is not None),
        None in dtypes,
        frozenset().union(*(server.device_dtypes for server in on_device)),
        frozenset(server.info.sharding for server in on_device if not server.info.layout_options),
        is_quantized=is_quantized,
    )


class WeightVerifier:
    """Compares the weights of servers with what was sent.

    Remembers the previous update, to check that a server's weights changed when the trainer's did.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, str]] = {}  # url -> (digest sent, digest that the server reported)
        self._families: dict[str, str] = {}  # by url
        self._compared: dict[str, bool] = {}  # by url, once all tensors were compared: whether it has an output layer
        self._warned: set[tuple[str, str]] = set()  # url and text of the warnings

    async def check(self, servers: Sequence[SglangServer], sent: WeightRecord, version: int) -> str:
        """Verify all servers; return a description of what was compared. Raises SyncError."""
        finished = in_thread(sent.finish)
        results = await asyncio.gather(*(self._check_one(server, sent, finished, version) for server in servers))
        alike: dict[str, set[str]] = {}  # by server info: servers that differ in it have different tensors
        for server, (_, digest) in zip(servers, results, strict=True):
            if digest:
                alike.setdefault(str(server.address.info), set()).add(digest)
        for digests in alike.values():
            if len(digests) > 1:
                raise SyncError(
                    f"weight_sync version {version}: engines of one model report different checksums "
                    f"{sorted(digests)}; they do not serve the same weights"
                )
        return "; ".join(sorted({text for text, _ in results}))

    async def _check_one(
        self, server: SglangServer, sent: WeightRecord, finished: Awaitable[None], version: int
    ) -> tuple[str, str]:
        """Verify one server; return what was compared, and the server's checksum over all tensors ("" if unknown)."""
        label = await server.served_version()
        if label != str(version):
            raise SyncError(
                f"weight_sync version {version}: {server.url} reports version {label!r}; another program may update it"
            )
        if (dtype := server.checksum_dtype) is not None:
            with tracer.flight("engine's checksums", url=server.url):
                loaded, _ = await server.checksums()
            await finished
            try:
                compare_checksums(sent.expected(dtype, loaded), loaded, version=version)
            except SyncError as error:
                raise SyncError(f"{server.url}: {error}") from error
            return "every checksum verified", ""
        if server.url not in self._families:
            self._families[server.url] = await server.model_type()
        family = self._families[server.url]
        if server.has_own_head(family) and not sent.has_head:
            raise SyncError(
                f"weight_sync version {version}: {server.url} has a separate output layer ({HEAD}) in a model of "
                f"the family {family!r}, but none was sent, since the trainer ties it to the embedding: the engine "
                "would sample with an untrained output layer. Untie the model (SYNC04 of docs/troubleshooting.md)"
            )
        if unused := server.unused_weights(family):
            self._warn(server, version, unused)
        sums = (
            sent.is_quantized and server.info.has_quantized_loader
        )  # compared by it, before kernels rearrange the weights
        also = ", sums of all quantized tensors verified" if sums else ""
        if sent.is_quantized and not sums:
            self._only_rows(server, version, "has quantized weights, whose layout in SGLang is not known")
        elif sums and server.url in self._compared:
            await self._compare_by_loader(server, sent, finished, version)
            return f"every checksum verified by the engine's loader{also}", ""
        elif server.device_dtypes and (result := await self._compare_all(server, sent, finished, version)) is not None:
            text, digest = result
            return f"{text}{also}", digest
        await finished
        num_compared = await self._compare_rows(server, sent, version)
        digest = await self._compare_change(server, sent, version)
        if not num_compared:
            seen = "that they change is checked by its checksum" if digest else "only its version label is checked"
            self._warn(
                server,
                version,
                f"shows no tensors of this model, so its weights are not compared with the trainer's; {seen}",
            )
        compared = f"{num_compared} tensors compared by rows, {'a' if digest else 'no'} checksum of the engine's own"
        return f"{compared}{also}", digest

    async def _compare_all(
        self, server: SglangServer, sent: WeightRecord, finished: Awaitable[None], version: int
    ) -> tuple[str, str] | None:
        """Compare all tensors in the server's layout; return what was compared, and the server's checksum over all.

        Experts whose layout is unknown are skipped, and so are quantized weights; returns None if no layout is known.
        Only the first of several pipeline stages is compared.
        """
        family, sharding = self._families[server.url], server.info.sharding
        if why := _unknown_layout(server, family):
            return self._only_rows(server, version, why)
        with tracer.flight("engine's checksums", url=server.url):
            answers, digest = await server.all_checksums()
        await finished
        for name, why in sent.wrong.items():
            raise SyncError(f"weight_sync version {version}: {server.url} was sent an incorrect {name}: {why}")
        for name, why in sent.unhashed.items():
            return self._only_rows(server, version, f"has {name}, which cannot be hashed: {why}")
        for count in (sharding.tp_size, sharding.attention_tp_size, sharding.head_tp_size):
            if count in sent.unknown_tp_sizes:
                return self._only_rows(server, version, f"has {sent.unknown_tp_sizes[count]}")
        if unknown := _unknown_experts(server, family, sent):
            self._warn(server, version, f"{unknown}, so for its experts only a change is checked")
        by_rank = _by_rank(server, answers, version, without_experts=bool(unknown))
        first = expected(sent.fused, by_rank[0], sharding, without_experts=bool(unknown))
        if sent.is_quantized and first.keys() <= by_rank[0].keys():
            by_rank = {rank: {name: loaded[name] for name in first} for rank, loaded in by_rank.items()}
            self._check_change(server, sent, digest, version)
        is_part = server.info.pp_size > 1 and by_rank[0].keys() < first.keys()
        if first.keys() != by_rank[0].keys() and not is_part:
            names = sorted(first.keys() ^ by_rank[0].keys())
            why = f"has other tensors than {family} models have ({len(names)}, such as {names[0]})"
            return self._only_rows(server, version, why)
        for rank, loaded in sorted(by_rank.items()):
            right = expected(sent.fused, loaded, sharding, rank, without_experts=bool(unknown))
            if is_part:
                right = {name: digest for name, digest in right.items() if name in by_rank[0]}
            try:
                compare_checksums(right, loaded, version=version)
            except SyncError as error:
                which = f", process {rank} of {sharding.tp_size}" if sharding.tp_size > 1 else ""
                raise SyncError(f"{server.url}{which}: {error}") from error
        where = f" of the first of {server.info.pp_size} stages" if is_part else ""
        if unknown:
            self._check_change(server, sent, digest, version)
            return f"every checksum{where} but those of experts verified, a checksum of the engine's own", digest
        if not is_part:
            self._compared[server.url] = HEAD in by_rank[0]
        return f"every checksum{where} verified", digest

    async def _compare_by_loader(
        self, server: SglangServer, sent: WeightRecord, finished: Awaitable[None], version: int
    ) -> None:
        """Have the loader compare the tensors that are not quantized, whose names an earlier update has compared."""
        await finished
        has_head, ranks = self._compared[server.url], range(server.info.sharding.tp_size)
        right = [accepted(sent.fused, server.info.sharding, rank, has_head=has_head) for rank in ranks]
        with tracer.flight("engine's checksums", url=server.url):
            await server.load_handles([check_message(each) for each in right], version, is_last=True)

    def _only_rows(self, server: SglangServer, version: int, why: str) -> None:
        self._warn(server, version, f"{why}, so only rows of its weights are compared")

    def _warn(self, server: SglangServer, version: int, text: str) -> None:
        if (server.url, text) not in self._warned:
            self._warned.add((server.url, text))
            logger.warning("weight_sync version %d: %s %s", version, server.url, text)

    async def _compare_rows(self, server: SglangServer, sent: WeightRecord, version: int) -> int:
        names = list(sent.rows)
        if server.info.sharding.tp_size > 1:  # only one-dimensional tensors are whole in each process
            names = [name for name in names if sent.rows[name].dim() == 1]
        num_compared = 0
        for name in names:
            shown = await server.first_rows(name, ROWS)
            if shown is None:
                continue
            num_compared += 1
            rows = sent.rows[name]
            right = [rows.to(dtype).float() for dtype in (rows.dtype, torch.bfloat16, torch.float16)]
            if not shown.any() and rows.any():
                raise zero_weights_error([name], version=version)
            if not any(shown.shape == each.shape and torch.equal(shown, each) for each in right):
                raise SyncError(
                    f"weight_sync version {version}: {server.url} has other values in {name} than were sent"
                )
        return num_compared

    async def _compare_change(self, server: SglangServer, sent: WeightRecord, version: int) -> str:
        """Check that the server's checksum changed if the weights did; return it, "" if the server has none."""
        try:
            _, digest = await server.checksums()
        except NoAnswerError:
            raise
        except EngineError as error:
            self._warn(server, version, f"has no checksum: {error}")
            return ""
        self._check_change(server, sent, digest, version)
        return digest

    def _check_change(self, server: SglangServer, sent: WeightRecord, digest: str, version: int) -> None:
        """Raise SyncError if the server's checksum changed and the trainer's did not, or the other way round.

        With pipeline stages the checksum covers the first one, which may stay the same while others change.
        """
        before = self._last.get(server.url)
        self._last[server.url] = (sent.digest, digest)
        if before is not None and (before[0] == sent.digest) != (before[1] == digest):
            change = "did not change" if before[1] == digest else "changed"
            if before[1] == digest and server.info.pp_size > 1:
                return
            raise SyncError(
                f"weight_sync version {version}: the weights of {server.url} {change}, unlike the trainer's, since the "
                "previous update"
            )


def _unknown_layout(server: SglangServer, family: str) -> str:
    sharding = server.info.sharding
    if family not in DENSE | WITH_EXPERTS:
        return f"has a model of the family {family!r}, whose layout in SGLang is not known"
    if server.info.layout_options:
        return f"may have tensors in another form ({server.info.layout_options})"
    if sharding.attention_tp_size != sharding.tp_size and family not in APART:
        return f"has data-parallel attention in a model of the family {family!r}, whose layout is not known"
    return ""


def _unknown_experts(server: SglangServer, family: str, sent: WeightRecord) -> str:
    if family not in WITH_EXPERTS or not any(kind_of(name) == "experts" for name in sent.fused.get(WHOLE, {})):
        return ""
    if server.info.expert_options:
        return f"rearranges experts ({server.info.expert_options})"
    tp_size, ep_size = server.info.sharding.tp_size, server.info.sharding.ep_size
    if ep_size != tp_size:
        return f"splits each expert over {tp_size // ep_size} processes"
    return f"has experts that {sent.unknown_ep_sizes[tp_size]}" if tp_size in sent.unknown_ep_sizes else ""


def _by_rank(
    server: SglangServer, answers: Sequence[tuple[int, dict[str, str]]], version: int, *, without_experts: bool
) -> dict[int, dict[str, str]]:
    by_rank: dict[int, dict[str, str]] = {}
    for rank, checksums in answers:
        loaded = {name: d for name, d in checksums.items() if not without_experts or kind_of(name) != "experts"}
        known = by_rank.setdefault(rank, loaded)
        if known != loaded:
            names = [name for name in known.keys() | loaded.keys() if known.get(name) != loaded.get(name)]
            raise SyncError(
                f"weight_sync version {version}: {server.url} has copies of process {rank} that differ in {len(names)} "
                f"tensors (first: {min(names)}); they do not serve the same weights"
            )
    if sorted(by_rank) != list(range(server.info.sharding.tp_size)):
        raise SyncError(
            f"weight_sync version {version}: {server.url} reports checksums of processes {sorted(by_rank)}, but has "
            f"{server.info.sharding.tp_size}; the others cannot be verified"
        )
    return by_rank
