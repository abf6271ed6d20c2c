"""Stock's batch generator as plain objects, for tests of the reuse record's seams."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from mlx_vlm_cacheplus.reports.ledger import Ledger
from mlx_vlm_cacheplus.reports.seams import Seams
from mlx_vlm_cacheplus.reports.tracker import Tracker

STOP = 99


class Stage:
    """One server of plain objects: a batch generator, and the steps of a request through the seams."""

    def __init__(
        self, *, block: int = 4, whole_states: bool = False, draft: Any = None
    ):
        stats = SimpleNamespace(disk_hits=0, memory_skips=0, evictions=0)
        self.manager = SimpleNamespace(
            stats=stats, block_size=block, exact_cache_min_tokens=3
        )
        apc = SimpleNamespace(manager=self.manager, is_checkpoint=whole_states)
        self.batch_generator = type("BatchGenerator", (), {})()
        self.batch_generator.apc = apc
        self.batch_generator.draft_model = draft
        self.batch_generator.draft_kind = "mtp" if draft is not None else None
        self.tracker = Tracker(Ledger())
        self.seams = Seams(self.tracker)
        self.server = SimpleNamespace(
            apc_manager=self.manager,
            model_path="tiny",
            _thread=threading.current_thread(),
        )

    def queue(self, uid: int, ids: list[int], tenant: str | None = None) -> Any:
        request = SimpleNamespace(
            request_id=f"r{uid}",
            rqueue=object(),
            prompt_tokens=len(ids),
            args=SimpleNamespace(tenant_id=tenant, _cacheplus_endpoint="/chat"),
        )
        seams, state = self.seams, {"request_id": request.request_id}
        seams.prefill_started(
            lambda *a, **k: state, self.server, (request,), {"backend": "batch"}
        )
        seams.insert(lambda *a, **k: [uid], self.batch_generator, ([ids],), {})
        return request

    def look_up(self, uid: int, change: Any = None) -> None:
        hit = lambda *a: change(self.manager.stats) if change else None  # noqa: E731
        self.seams.look_up(hit, self.batch_generator, ((uid,),), {})

    def prefill(self, *rows: tuple[int, int], salt: int = 0, **fields: Any) -> Any:
        """rows: (uid, restored)."""
        flights = self.tracker.flights
        batch = type("PromptProcessingBatch", (), {})()
        batch.uids = [uid for uid, _ in rows]
        batch._cached_tokens_per_row = [restored for _, restored in rows]
        batch._suffix_lens = [flights[uid].prompt - n for uid, n in rows]
        batch._apc_meta = [{"extra_hash": salt} for _ in rows]
        batch._right_pad_per_row, batch._left_padding_per_row = None, [0] * len(rows)
        batch._processed_prompt_columns = 0
        vars(batch).update(fields)
        self.seams.open_prompt_batch(lambda *a: None, batch, (), {})
        return batch

    def decode(self, prompt_batch: Any, ledgers: bool = True, limit: int = 8) -> Any:
        rows = {}
        for uid in prompt_batch.uids if ledgers else ():
            ids = self.tracker.flights[uid].ids.tolist()
            rows[uid] = SimpleNamespace(ids=ids, committed=0, reason=None)
        uids = list(prompt_batch.uids)
        batch = SimpleNamespace(
            uids=uids,
            output_rows=dict(rows),
            max_tokens=[limit] * len(uids),
            _num_tokens=[0] * len(uids),
            stop_criteria=lambda token: token == STOP,
        )
        self.seams.finish_prompt_batch(lambda: batch, prompt_batch, (), {})
        prompt_batch.uids = []
        return batch

    def step(self, batch: Any, *tokens: int) -> None:
        self.seams.step(lambda _: (list(tokens), None))(batch)
        for index, (uid, token) in enumerate(zip(batch.uids, tokens, strict=True)):
            batch._num_tokens[index] += 1
            if uid in batch.output_rows:
                batch.output_rows[uid].ids.append(token)

    def filter(self, batch: Any, keep: list[int], committed: bool = True) -> None:
        def stock(keep: list[int]) -> None:
            for index, uid in enumerate(batch.uids):
                row = batch.output_rows.get(uid)
                if index not in keep and row is not None:
                    row.committed = len(row.ids) if committed else 0
                    row.reason = None if committed else "layers disagree"
            batch.uids = [batch.uids[index] for index in keep]

        self.seams.filter(stock, batch, (keep,), {})

    def remove(self, uid: int, removed: bool = True) -> None:
        self.seams.remove(lambda uid: removed, self.batch_generator, (uid,), {})

    def cancel(self, uid: int) -> None:
        self.seams.cancel(lambda uid: None, self.server, (uid,), {})

    def run(
        self, uid: int, ids: list[int], reply: list[int], restored: int = 0, **kw: Any
    ) -> dict:
        salt = kw.pop("salt", 0)
        self.queue(uid, ids, kw.pop("tenant", None))
        self.look_up(uid, kw.pop("lookup", None))
        batch = self.decode(
            self.prefill((uid, restored), salt=salt), kw.pop("ledgers", True)
        )
        for token in reply:
            self.step(batch, token)
        self.filter(batch, [], **kw)
        return self.last()

    def last(self) -> dict[str, Any]:
        return self.tracker.ledger.last(1)[0]

    def count(self) -> int:
        return self.tracker.ledger.totals()["requests"]
