"""The disk tier of a server's prefix cache: opened with the model, closed with it.

Each function is called at one place of the server or the batch generator.  A storage
manager has ``disk_settings`` where a disk tier is wanted, and ``disk_tier`` once its
model is loaded.  Without either, every function here does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from mlx_vlm.version import __version__

from . import disk_format, disk_index, draft_state
from .disk_identity import (
    Fingerprint,
    Mismatch,
    fingerprint,
    name_of,
    tokenizer_name,
    verify,
)
from .disk_settings import DiskSettings, size_text
from .disk_store import DiskStore
from .disk_summary import summary
from .disk_tier import FLUSH_SECONDS, DiskTier, say_left
from .disk_writer import FAULTS
from .reply_ids import reply_ids_of

logger = logging.getLogger(__name__)

# How long a step waits for the disk where there is nothing else to do.
STEP_SECONDS = 0.05


def tier_of(manager: Any) -> DiskTier | None:
    """A storage manager's disk tier, or None."""
    return getattr(manager, "disk_tier", None)


def _tier_of_server(server: Any) -> DiskTier | None:
    return tier_of(getattr(server, "apc_manager", None))


# -- a model is loaded, and goes ---------------------------------------------------------
def open_tier(server: Any) -> None:
    """Give the manager of a response generator its tier; call when the model is loaded.

    A fault leaves the server without, and is said.
    """
    manager = server.apc_manager
    settings: DiskSettings | None = getattr(manager, "disk_settings", None)
    if settings is None or getattr(server, "apc_mode", None) is None:
        return
    store = DiskStore(settings.folder, settings.max_bytes)
    try:
        store.open()
        if store.is_writer:
            store.sweep()
    except Exception as fault:
        # The tier tries again; here it would hold the start up.
        logger.debug("Disk cache not opened: %s", fault)
    try:
        _open_tier(server, store, settings)
    except Exception as fault:  # also of a path that no repository can have
        store.close()
        logger.warning("No disk cache: %s", fault)


def _open_tier(server: Any, store: DiskStore, settings: DiskSettings) -> None:
    found = fingerprint(
        _folders(server.model_path, server.adapter_path), _recall(store)
    )
    note = " + ".join(str(p) for p in (server.model_path, server.adapter_path) if p)
    companions: dict[Any, str] = {}
    drafter, kind = server.draft_model, getattr(server, "draft_kind", None)
    if drafter is not None and kind is not None:
        path = server.draft_model_path or os.environ.get("MLX_VLM_DRAFT_MODEL")
        print_ = fingerprint(_folders(path, None), _recall(store))
        found.facts |= print_.facts
        found.unverified += print_.unverified
        name = name_of([kind, type(drafter).__name__, print_.name, _types(drafter)])
        companions[draft_state.identity_of(drafter, kind)] = name
    identity = name_of([found.name, _policy(server), _types(server.model)])
    manager = server.apc_manager
    limits = settings.queue_bytes, settings.sync
    tier = DiskTier(manager.segments, store, identity, note, companions, *limits)
    manager.disk_tier = tier
    _remember_replies(server, tier)
    _say_found(tier)
    threading.Thread(
        target=_verify, args=(tier, found), name="disk-verify", daemon=True
    ).start()


def _remember_replies(server: Any, tier: DiskTier) -> None:
    """Spell what clients send back as it was written, also after a restart."""
    owner = name_of([tier.identity, tokenizer_name(_local(server.model_path))])
    server.apc_manager.keep_reply = functools.partial(tier.keep_reply, owner)
    try:
        reply_ids_of(server.apc_manager).remember(tier.store.replies(owner))
    except (*FAULTS, ValueError) as fault:
        logger.debug("No replies remembered: %s", fault)


def _recall(store: DiskStore) -> Any:
    def recall(name: str) -> str | None:
        try:
            return store.recall(name)
        except FAULTS:
            return None

    return recall


def _folders(model: Any, adapter: Any) -> list[Path]:
    return [_local(path) for path in (model, adapter) if path]


def _local(path: Any) -> Path:
    """The folder of a model that was loaded: a path, or the name of a repository."""
    found = Path(str(path))
    if found.exists():
        return found if found.is_dir() else found.parent
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), local_files_only=True))


def _policy(server: Any) -> list[Any]:
    """How keys and values are computed and stored, beside the weights."""
    names = (
        *("kv_bits", "kv_key_bits", "kv_value_bits", "kv_key_scheme", "kv_group_size"),
        *("kv_value_scheme", "kv_quant_scheme", "quantized_kv_start"),
    )
    policy = [getattr(server, name, None) for name in names]
    versions = [__version__, disk_index.SCHEMA, disk_format.VERSION]
    return [policy, os.environ.get("MAX_KV_SIZE"), versions]


def _types(model: Any) -> str:
    """Names the shapes and types that a model's parameters have in memory."""
    parameters: list[Any] = list(tree_flatten(model.parameters()))
    return name_of([[name, a.shape, str(a.dtype)] for name, a in parameters])


def _say_found(tier: DiskTier) -> None:
    try:
        tier.found = found = summary(tier.store)
    except Exception as fault:
        logger.debug("Disk cache not looked at: %s", fault)
        return
    mine = [row for row in found if row["identity"] == tier.identity]
    logger.info(
        "Disk cache %s: %d entries, %s for this model; %s of %s in use%s",
        tier.store.folder.path,
        sum(row["entries"] for row in mine),
        size_text(sum(row["bytes"] for row in mine)),
        size_text(tier.store.nbytes),
        "any size" if tier.store.max_bytes is None else size_text(tier.store.max_bytes),
        "" if tier.store.is_writer else "; another server writes there, this one reads",
    )


def _verify(tier: DiskTier, found: Fingerprint) -> None:
    """Read whole what was only sampled, and drop what a sample did not show."""
    facts = dict(found.facts)
    try:
        facts |= verify(found.unverified, _recall(tier.store), lambda: tier.is_closed)
    except Mismatch as mismatch:
        logger.warning(
            "The weights are not those that the disk cache was made with; it is dropped"
        )
        tier.distrust({f"content {mismatch}": ""})
        return
    except OSError as fault:
        logger.warning("The weights could not be verified: %s", fault)
    if facts:
        tier.writer.do(lambda store: store.note(facts))


def close(manager: Any) -> None:
    """Write what waits and let the folder go; call where the model goes."""
    tier = tier_of(manager)
    if tier is not None:
        tier.close()
        manager.disk_tier = None


def flush(manager: Any, seconds: float = FLUSH_SECONDS) -> None:
    """Have everything written before the process ends, and say what was left."""
    tier = tier_of(manager)
    if tier is None:
        return
    left = tier.flush(seconds)
    if left:
        say_left(left, tier.writer.trouble, seconds)


async def flush_at_end(runtime: Any) -> None:
    """``flush`` for the server's one text model, while the event loop goes on."""
    await asyncio.to_thread(flush, runtime.apc_manager)


def tick(server: Any) -> None:
    """Hand over what was noted; call between two steps of the generation thread."""
    tier = _tier_of_server(server)
    if tier is not None:
        tier.tick()


# -- the end of a reply ------------------------------------------------------------------
def ends_wait(server: Any) -> bool:
    """Whether ends of replies wait until these are written."""
    tier = _tier_of_server(server)
    return tier is not None and tier.sync is not None


def promise_end(server: Any, queue: Any) -> None:
    """Have the end of a reply wait; call when its row has ended, before it is told so.

    Args:
        server: a response generator.
        queue: the reply's, which carries what is waited for to who reads it.
    """
    tier = _tier_of_server(server)
    receipt = None if tier is None else tier.promise()
    if receipt is not None:
        queue.receipt = receipt


def hold_end(queue: Any) -> None:
    """Wait until a reply is written; call where its end is read for a client."""
    receipt = vars(queue).pop("receipt", None)
    if receipt is not None:
        receipt.hold()


def statistics(manager: Any) -> dict[str, Any]:
    """Counts of the tier, if there is one."""
    tier = tier_of(manager)
    return {} if tier is None else tier.statistics()


# -- prompts -------------------------------------------------------------------------------
@contextlib.contextmanager
def reading_prompt(prompt_batch: Any) -> Iterator[None]:
    """What is committed meanwhile is a prompt's; how fast it is read is measured."""
    tier = tier_of(getattr(prompt_batch, "_apc_manager", None))
    if tier is None:
        yield
        return
    before, began = _columns(prompt_batch), time.perf_counter()
    tier.reading = True
    try:
        yield
    finally:
        tier.reading = False
    tokens = (_columns(prompt_batch) - before) * len(prompt_batch.uids)
    tier.measure_prefill(tokens, time.perf_counter() - began)


def _columns(prompt_batch: Any) -> int:
    return int(getattr(prompt_batch, "_processed_prompt_columns", 0) or 0)


def ask_ahead(generator: Any, uids: Sequence[int]) -> None:
    """Have the disk looked at for rows that were queued; they wait meanwhile."""
    tier = tier_of(generator.apc_manager)
    if tier is None:
        return
    for uid, ids, _, kwargs, *_ in generator._unprocessed_sequences:
        if uid not in uids or len(ids) < 2:
            continue
        try:
            load = tier.ask(ids, generator._apc_extra_hash(kwargs or {}))
        except Exception as error:
            logger.warning("The disk is not asked: %s", error, exc_info=True)
            continue
        if load is not None:
            generator.__dict__.setdefault("disk_loads", {})[uid] = load


@contextlib.contextmanager
def rows_being_read_wait(generator: Any) -> Iterator[None]:
    """Take in what has come; rows that the disk is read for are not admitted yet.

    Rows that can be admitted, and those that decode, go on.  Where there are none, the
    step waits, and no longer than ``STEP_SECONDS``.
    """
    loads = generator.__dict__.get("disk_loads")
    tier = tier_of(generator.apc_manager)
    if tier is None:
        yield
        return
    if not loads:
        yield
        _hand_over(generator, tier)
        return
    try:
        _take_in(generator, loads, tier)
    except Exception as error:
        logger.warning("Nothing taken from disk: %s", error, exc_info=True)
        loads.clear()
    queue = generator._unprocessed_sequences
    waiting = [row for row in queue if row[0] in loads]
    generator._unprocessed_sequences = [row for row in queue if row[0] not in loads]
    try:
        yield
    finally:
        rows = [*generator._unprocessed_sequences, *waiting]
        generator._unprocessed_sequences = sorted(rows, key=lambda row: len(row[1]))
    _hand_over(generator, tier)


def _hand_over(generator: Any, tier: DiskTier) -> None:
    """The last row has ended: hand over before its reply does, as nobody decodes."""
    if not _decodes(generator):
        tier.tick()


def _decodes(generator: Any) -> bool:
    """Whether rows decode, also in speculative batches that take turns."""
    return len(generator._generation_batch) > 0 or bool(
        getattr(generator, "speculative_batches", None)
    )


def _take_in(generator: Any, loads: dict[int, Any], tier: DiskTier) -> None:
    queued = {row[0] for row in generator._unprocessed_sequences}
    for uid in [uid for uid in loads if uid not in queued]:
        tier.reader.release(loads.pop(uid))
    busy = (
        _decodes(generator)
        or generator._prompt_batch is not None
        or len(queued) > len(loads)
    )
    patience = 0.0 if busy else STEP_SECONDS
    for uid in list(loads):
        if tier.wait(loads[uid], patience):
            if tier.adopt(loads.pop(uid)):
                generator.__dict__.setdefault("rows_from_disk", set()).add(uid)
            patience = 0.0
