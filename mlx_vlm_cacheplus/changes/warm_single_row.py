"""A warm batch of one gets the caches that a cold one would have."""

from __future__ import annotations

from typing import Any

from ..change import Change, Target

AR = "mlx_vlm.generate.ar"
COORDINATOR = "mlx_vlm.apc_coordinator"


class WarmSingleRow(Change):
    name = "warm-single-row"
    summary = "A warm row that is alone has plain caches, and is decoded as fast as a cold one"
    targets = (
        Target(AR, "BatchGenerator.__init__"),
        Target(COORDINATOR, "APCCoordinator.merge_rows"),
    )
    why = (
        "A restored row is put into batch caches even where it is alone. Qwen3.5 takes a single row out of them and puts it "
        "back with every token, which copies its whole cache: decoding slows down with the length of the context."
    )
    upstream = "https://github.com/Blaizzy/mlx-vlm/issues/2210"
    remove_when = (
        "the caches of a warm batch of one have the types that a cold one's have"
    )
    marks = ("mlx_vlm.warm_single_row:stays_plain",)

    def apply(self, patcher: Any) -> None:
        from ..core import warm_single_row as core

        def init(original: Any) -> Any:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                if self.apc is not None:
                    own = hasattr(self.model, "make_cache")
                    self.apc.plain_rows = self.draft_model is None and own

            return wrapper

        def merge(original: Any) -> Any:
            def wrapper(
                self: Any, picks: Any, prefix_lens: Any, *, kv_quant_config: Any = None
            ) -> Any:
                if not core.stays_plain(self, picks, kv_quant_config):
                    return original(
                        self, picks, prefix_lens, kv_quant_config=kv_quant_config
                    )
                (hit,) = picks
                length = len(hit["full_input_ids"])
                row = self.materialize_single(hit, min_capacity_tokens=length)
                return row, hit["prefix_len"]

            return wrapper

        patcher.replace_method(AR, "BatchGenerator.__init__", init)
        patcher.replace_method(COORDINATOR, "APCCoordinator.merge_rows", merge)


CHANGE = WarmSingleRow()
