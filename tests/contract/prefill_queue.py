"""The loop and the queues of a server as plain objects, for tests of who waits for whose prefill."""

from __future__ import annotations

from queue import Empty, Queue
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_vlm_cacheplus.core import shared_prefill as core
from mlx_vlm_cacheplus.core import shared_prefixes as shared

WORTH = shared.WORTH_WAITING
SHARED = list(range(1, WORTH + 45))
IMAGE = 9999


class Segments:
    """What is known of each salt: whole prefixes, as a dense tree would restore them."""

    def __init__(self):
        self.known = {}
        self.stored_tokens = self.evictions = 0

    def keep(self, ids, salt=0):
        self.known.setdefault(salt, []).append(tuple(ids))
        self.stored_tokens += len(ids)

    def peek(self, ids, salt):
        lengths = [
            shared.common_prefix(ids[:-1], known) for known in self.known.get(salt, [])
        ]
        return max(lengths, default=0)


class PromptBatch:
    """Rows that are being read; ``done`` tokens of each."""

    def __init__(self, entries, checkpoints=False, done=0):
        self.uids = [entry[0] for entry in entries]
        self.checkpoints, self.done = checkpoints, done
        self._apc_meta = [
            {
                "full_input_ids": entry[1],
                "extra_hash": entry[3]["_apc_semantic_hash"],
                "checkpoint_lengths": [len(entry[1]) - 1] if checkpoints else [],
            }
            for entry in entries
        ]

    def _row_real_tokens_processed(self, index):
        return self.done

    def _apc_uses_checkpoints(self):
        return self.checkpoints


class Generator(SimpleNamespace):
    """A batch generator's queue; ``read`` moves its head into a prompt batch."""

    def __init__(self, manager, size=8):
        super().__init__(
            apc=object(),
            apc_manager=manager,
            prefill_batch_size=size,
            _prompt_batch=None,
            _unprocessed_sequences=[],
            _apc_media_token_ids=lambda: {IMAGE},
        )

    def insert(self, uid, ids, salt=0):
        entry = (uid, list(ids), 8, {"_apc_semantic_hash": salt}, None, None)
        self._unprocessed_sequences = sorted(
            [*self._unprocessed_sequences, entry], key=lambda e: len(e[1])
        )

    def begin(self, **fields):
        size = min(self.prefill_batch_size, len(self._unprocessed_sequences))
        self._prompt_batch = PromptBatch(self._unprocessed_sequences[:size], **fields)
        self._unprocessed_sequences = self._unprocessed_sequences[size:]

    def finish(self):
        for meta in self._prompt_batch._apc_meta:
            self.apc_manager.segments.keep(meta["full_input_ids"], meta["extra_hash"])
        self._prompt_batch = None


class Server(SimpleNamespace):
    """The loop of a response generator, one turn at a time."""

    def __init__(self, config=None):
        manager = SimpleNamespace(segments=Segments())
        super().__init__(
            apc_mode="block",
            apc_manager=manager,
            model=SimpleNamespace(config=config or SimpleNamespace()),
            requests=Queue(),
            _stop=False,
            generator=Generator(manager),
            active={},
            uids=0,
        )

    def ask(self, name, ids, salt=0):
        self.requests.put(
            SimpleNamespace(
                request_id=name,
                raw_inputs={"input_ids": mx.array([list(ids)])},
                prompt_tokens=len(ids),
                apc_semantic_hash=salt,
            )
        )

    def receive(self, *, active, capacity=None, **options):
        found, stop = [], False
        while capacity is None or len(found) < capacity:
            try:
                item = self.requests.get_nowait()
            except Empty:
                break
            if item is None:
                stop = stop or (self._stop and not found)
            else:
                found.append(item)
        return found, stop

    def turn(self, capacity=None):
        """Admit; returns the names that go to the generator."""
        requests, self.stopped = core.admit(
            self, self.receive, active=bool(self.active), capacity=capacity
        )
        for request in requests:
            ids = request.raw_inputs["input_ids"].reshape(-1).tolist()
            self.generator.insert(self.uids, ids, request.apc_semantic_hash)
            self.active[self.uids] = {"request_id": request.request_id}
            self.uids += 1
        core.note_rows_at_work(self, self.generator, self.active)
        return [request.request_id for request in requests]

    def cancel(self, name):
        uid = next(u for u, info in self.active.items() if info["request_id"] == name)
        del self.active[uid]
        generator = self.generator
        generator._unprocessed_sequences = [
            entry for entry in generator._unprocessed_sequences if entry[0] != uid
        ]
        if generator._prompt_batch is not None and uid in generator._prompt_batch.uids:
            generator._prompt_batch = None

    @property
    def waiting(self):
        return [prompt.request.request_id for prompt in self.followers]


def prompt(number, length=10, start=SHARED):
    return [*start, *(1000 * number + n for n in range(length))]


@pytest.fixture
def server():
    return Server()


def ask_all(server, count=4):
    for number in range(1, count + 1):
        server.ask(f"r{number}", prompt(number))
