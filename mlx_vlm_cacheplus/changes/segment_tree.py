"""One prefix cache for every kind of layer: a tree of segments."""

from __future__ import annotations

from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
APC = "mlx_vlm.apc"
COORDINATOR = "mlx_vlm.apc_coordinator"


class SegmentTree(Change):
    name = "segment-tree"
    summary = (
        "A prefix tree of segments in place of 16-token blocks and whole snapshots"
    )
    targets = (
        Target(APC, "APCManager.__init__"),
        Target(APC, "APCManager.release"),
        Target(APC, "APCManager._resident_bytes_locked"),
        Target(APC, "APCManager._make_room"),
        Target(APC, "APCManager.clear"),
        Target(APC, "APCManager.stats_snapshot"),
        Target(COORDINATOR, "APCCoordinator.lookup"),
        Target(COORDINATOR, "APCCoordinator.checkpoint_lengths"),
        Target(COORDINATOR, "APCCoordinator.merge_rows"),
        Target(COORDINATOR, "APCCoordinator.materialize_single"),
        Target(COORDINATOR, "APCCoordinator.store_checkpoint"),
        Target(COORDINATOR, "APCCoordinator.commit"),
        Target(AR, "BatchGenerator.__init__"),
        Target(AR, "BatchGenerator.remove"),
        Target(AR, "PromptProcessingBatch.prompt_step"),
    )
    why = (
        "Dense models are stored as one array per 16 tokens, layer and side, so that a warm turn can cost more than a "
        "cold one; everything else as two whole snapshots a server. The oldest blocks stay and the newest are refused "
        "when the budget is short, and a hybrid model has no state where a new chat leaves the old one."
    )
    upstream = "answers https://github.com/Blaizzy/mlx-vlm/issues/1629"
    remove_when = "the coordinator stores components by segment"
    requires = ("warm-single-row", "row-positions")
    marks = ("mlx_vlm.segment_cache:SegmentCache",)
    # Stock's disk tier writes blocks and snapshots, which are not there any more.
    env_defaults = {"APC_DISK_ENABLED": "0"}

    def apply(self, patcher: Any) -> None:
        from ..core import segment_coordination as core

        _apply_to_manager(patcher, core)
        _apply_to_reading(patcher, core)
        _apply_to_storing(patcher, core)
        _apply_to_generator(patcher, core)


def _apply_to_manager(patcher: Any, core: Any) -> None:
    def init(original: Any) -> Any:
        def wrapper(
            self: Any,
            num_blocks: int = 0,
            block_size: int = 16,
            disk: Any = None,
            **kwargs: Any,
        ) -> None:
            if disk is not None:
                disk.close()
            # Nothing is kept in the pool, so it needs no blocks.
            original(self, 1, block_size, None, **kwargs)
            core.attach(self)

        return wrapper

    def release(original: Any) -> Any:
        return lambda self, blocks: core.release(list(blocks))

    def resident(original: Any) -> Any:
        return lambda self: self.segments.nbytes

    def make_room(original: Any) -> Any:
        def wrapper(
            self: Any, allocation_bytes: int = 0, *, retain_bytes: int = 0
        ) -> bool:
            return core.make_room(self, allocation_bytes, retain_bytes)

        return wrapper

    def clear(original: Any) -> Any:
        def wrapper(self: Any) -> None:
            original(self)
            self.segments.clear()

        return wrapper

    def snapshot(original: Any) -> Any:
        return lambda self: {**original(self), **self.segments.statistics()}

    patcher.replace_method(APC, "APCManager.__init__", init)
    patcher.replace_method(APC, "APCManager.release", release)
    patcher.replace_method(APC, "APCManager._resident_bytes_locked", resident)
    patcher.replace_method(APC, "APCManager._make_room", make_room)
    patcher.replace_method(APC, "APCManager.clear", clear)
    patcher.replace_method(APC, "APCManager.stats_snapshot", snapshot)


def _apply_to_reading(patcher: Any, core: Any) -> None:
    def lookup(original: Any) -> Any:
        return lambda self, token_ids, **kwargs: core.lookup(self, token_ids, **kwargs)

    def lengths(original: Any) -> Any:
        def wrapper(self: Any, token_ids: Any, media_token_ids: Any) -> Any:
            return core.checkpoint_lengths(self, token_ids, media_token_ids)

        return wrapper

    def merge(original: Any) -> Any:
        def wrapper(
            self: Any, picks: Any, prefix_lens: Any, *, kv_quant_config: Any = None
        ) -> Any:
            return core.merge_rows(self, picks, prefix_lens, kv_quant_config)

        return wrapper

    def single(original: Any) -> Any:
        return lambda self, hit, **kwargs: core.materialize_single(self, hit)

    patcher.replace_method(COORDINATOR, "APCCoordinator.lookup", lookup)
    patcher.replace_method(COORDINATOR, "APCCoordinator.checkpoint_lengths", lengths)
    patcher.replace_method(COORDINATOR, "APCCoordinator.merge_rows", merge)
    patcher.replace_method(COORDINATOR, "APCCoordinator.materialize_single", single)


def _apply_to_storing(patcher: Any, core: Any) -> None:
    def checkpoint(original: Any) -> Any:
        def wrapper(
            self: Any,
            token_ids: Any,
            prompt_cache: Any,
            *,
            extra_hash: int = 0,
            batch_idx: Any = None,
        ) -> bool:
            return core.commit(
                self,
                token_ids,
                prompt_cache,
                batch_idx=batch_idx,
                extra_hash=extra_hash,
            )

        return wrapper

    def commit(original: Any) -> Any:
        def wrapper(
            self: Any,
            prompt_cache: Any,
            token_ids: Any,
            *,
            batch_idx: Any = None,
            extra_hash: int = 0,
            skip_first_n_tokens: int = 0,
            blocks_in_use: Any = (),
        ) -> bool:
            try:
                return core.commit(
                    self,
                    token_ids,
                    prompt_cache,
                    batch_idx=batch_idx,
                    extra_hash=extra_hash,
                )
            finally:
                core.release(blocks_in_use)

        return wrapper

    patcher.replace_method(COORDINATOR, "APCCoordinator.store_checkpoint", checkpoint)
    patcher.replace_method(COORDINATOR, "APCCoordinator.commit", commit)


def _apply_to_generator(patcher: Any, core: Any) -> None:
    def init(original: Any) -> Any:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.apc is not None:
                core.configure(
                    self.apc, self.tokenizer, plain_rows=self.draft_model is None
                )

        return wrapper

    def remove(original: Any) -> Any:
        def wrapper(self: Any, uid: Any) -> bool:
            core.keep_removed(self, uid)
            return original(self, uid)

        return wrapper

    def step(original: Any) -> Any:
        def wrapper(self: Any) -> int:
            try:
                return original(self)
            except Exception:
                for index in range(len(self.uids)):
                    core.keep_prefilled(self, index, with_state=False)
                raise

        return wrapper

    patcher.replace_method(AR, "BatchGenerator.__init__", init)
    patcher.replace_method(AR, "BatchGenerator.remove", remove)
    patcher.replace_method(AR, "PromptProcessingBatch.prompt_step", step)


CHANGE = SegmentTree()
