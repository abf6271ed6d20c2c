"""Whose an error is; the batch generator and the server are played by plain objects."""

from __future__ import annotations

import copy
import queue
from types import SimpleNamespace

import pytest

from mlx_vlm_cacheplus.changes.row_errors import FailedInputs
from mlx_vlm_cacheplus.core import row_errors as core


class Planted(Exception):
    """What a test makes a layer raise."""


class Decoding(SimpleNamespace):
    """A decode batch of rows by uid."""

    def __init__(self, *uids):
        super().__init__(
            uids=list(uids), undelivered=[], logits_processors=[], prompt_cache=[]
        )

    def __len__(self):
        return len(self.uids)


class Prefill(SimpleNamespace):
    """A prompt batch of rows by uid."""

    def __init__(self, *uids):
        super().__init__(
            uids=list(uids), _prompt_uids=list(uids), logits_processors=[], released=0
        )

    def _release_apc_meta_blocks(self):
        self.released += 1


class Generator(SimpleNamespace):
    """Admits up to ``prefill_batch_size`` rows, then prefills them in one step more.

    ``bad`` rows raise when they are prefilled (or, ``when="built"``, admitted).
    """

    def __init__(self, *queued, bad=(), when="prefilled"):
        super().__init__(
            _unprocessed_sequences=[(uid, [uid]) for uid in queued],
            prefill_batch_size=4,
            _prompt_batch=None,
            _generation_batch=Decoding(),
            row_faults=[],
            bad=set(bad),
            when=when,
            admitted=[],
            done=[],
            removed=[],
        )

    def advance(self):
        if self._prompt_batch is None and self._unprocessed_sequences:
            taken = self._unprocessed_sequences[: self.prefill_batch_size]
            uids = [s[0] for s in taken]
            self.admitted.append(uids)
            if self.when == "built" and self.bad & set(uids):
                raise Planted(uids)
            self._unprocessed_sequences = self._unprocessed_sequences[len(taken) :]
            self._prompt_batch = Prefill(*uids)
        elif self._prompt_batch is not None:
            if self.bad & set(self._prompt_batch.uids):
                raise Planted(self._prompt_batch.uids)
            self.done += self._prompt_batch.uids
            self._prompt_batch = None
        return [], []

    def run(self, steps=30):
        for _ in range(steps):
            core.next_isolated(self, self.advance)
        return [uid for uid, _ in self.row_faults]


@pytest.mark.parametrize("when", ["prefilled", "built"])
@pytest.mark.parametrize("bad", [{2}, {1, 3}, {4}])
def test_rows_are_tried_again_alone_and_only_the_bad_ones_fail(when, bad):
    generator = Generator(1, 2, 3, 4, 5, bad=bad, when=when)
    assert set(generator.run()) == bad
    assert sorted(generator.done) == sorted({1, 2, 3, 4, 5} - bad)
    assert generator.admitted[:2] == [[1, 2, 3, 4], [1]]
    assert generator.prefill_batch_size == 4


def test_rows_that_come_later_go_together_again():
    generator = Generator(1, 2, 3, 4, bad={2})
    generator.run()
    generator._unprocessed_sequences = [(uid, [uid]) for uid in (6, 7)]
    generator.run(4)
    assert generator.admitted[-1] == [6, 7]


def test_no_row_is_remembered_once_it_was_tried():
    generator = Generator(1, 2, 3, 4, bad={2})
    generator.run()
    assert not generator.rows_alone


def test_a_row_that_was_cancelled_while_it_waited_is_forgotten():
    generator = Generator(1, 2, bad={2})
    for _ in range(2):
        core.next_isolated(generator, generator.advance)
    generator._unprocessed_sequences = [
        s for s in generator._unprocessed_sequences if s[0] != 2
    ]
    generator.run(6)
    assert not generator.rows_alone


def test_a_lease_of_the_failed_prefill_is_released():
    generator = Generator(1, bad={1})
    core.next_isolated(generator, generator.advance)
    prefill = generator._prompt_batch
    core.next_isolated(generator, generator.advance)
    assert prefill.released == 1 and generator._prompt_batch is None


def test_tokens_decoded_in_the_step_of_a_failed_prefill_are_delivered():
    generator = Generator(1, bad={1})
    decoding = generator._generation_batch

    def advance():
        core.decode_recorded(decoding, lambda: ["token"])
        return generator.advance()

    core.next_isolated(generator, advance)
    assert core.next_isolated(generator, advance) == ([], ["token"])


def test_without_a_server_that_collects_faults_the_error_is_raised():
    generator = Generator(1, bad={1}, when="built")
    del generator.row_faults
    with pytest.raises(Planted):
        core.next_isolated(generator, generator.advance)


# -- a decode batch that broke ---------------------------------------------------------
@pytest.fixture
def new_batch(monkeypatch):
    """What takes the place of a broken decode batch."""
    import importlib

    ar = importlib.import_module("mlx_vlm.generate.ar")
    empty = Decoding()
    monkeypatch.setattr(ar.GenerationBatch, "empty", lambda *a, **k: empty)
    return empty


def broken_generator(*uids, **fields):
    generator = Generator(**fields)
    generator._generation_batch = Decoding(*uids)
    for name in ("model", "sampler", "compute_logprobs", "top_logprobs_k"):
        setattr(generator, name, None)
    generator.greedy_sampling = True
    generator.tokenizer = SimpleNamespace(stopping_criteria=None)
    return generator


def test_a_decode_that_raises_fails_its_rows_and_spares_the_queue(new_batch):
    generator = broken_generator(7, 8)
    generator._unprocessed_sequences = [(9, [9])]
    generator._prompt_batch = Prefill(5)

    def decode():
        raise Planted

    def advance():
        return core.decode_recorded(generator._generation_batch, decode)

    assert core.next_isolated(generator, advance) == ([], [])
    assert [uid for uid, _ in generator.row_faults] == [7, 8]
    assert generator._generation_batch is new_batch
    assert generator._unprocessed_sequences == [(9, [9])]
    assert generator._prompt_batch.uids == [5]


@pytest.mark.parametrize("uids_joined", [False, True])
def test_a_join_that_raises_fails_both_sides(new_batch, uids_joined):
    """The joining rows have been prefilled to their end: they cannot be run again."""
    generator = broken_generator(7)
    generator._prompt_batch = Prefill(8)
    # As ``generate`` leaves it when it has handed its rows over.
    generator._prompt_batch.uids = []
    batch, other = generator._generation_batch, Decoding(8)

    def extend():
        if uids_joined:
            batch.uids.extend(other.uids)
        raise Planted

    def advance():
        core.extend_recorded(batch, extend)

    core.next_isolated(generator, advance)
    assert sorted(uid for uid, _ in generator.row_faults) == [7, 8]
    assert generator._generation_batch is new_batch
    assert generator._prompt_batch is None


# -- processors, text, embeddings ------------------------------------------------------
def raising(*_):
    raise Planted


def test_a_processor_that_raises_passes_the_logits_on():
    faults = []
    guarded = core.GuardedProcessor(raising, SimpleNamespace(row_faults=faults), 7)
    assert guarded([1], "logits") == "logits"
    assert [owner for owner, _ in faults] == [7]


def test_the_other_form_of_a_processor_is_guarded_too():
    faults = []
    inner = SimpleNamespace(process_last_token=raising, tag=5)
    guarded = core.GuardedProcessor(inner, SimpleNamespace(row_faults=faults), 7)
    assert guarded.process_last_token(1, "logits") == "logits"
    assert len(faults) == 1 and guarded.tag == 5
    assert not hasattr(core.GuardedProcessor(raising, None, 7), "process_last_token")


def test_a_guarded_processor_can_be_copied():
    guarded = copy.copy(
        core.GuardedProcessor(raising, SimpleNamespace(row_faults=[]), 7)
    )
    assert guarded(1, "logits") == "logits"


def test_an_embedding_that_raises_comes_out_where_the_ids_are_read():
    with pytest.raises(Planted):
        FailedInputs(Planted()).squeeze(0)


def make_server(uids):
    generator = Generator()
    generator._generation_batch = Decoding(*uids)
    generator.remove = generator.removed.append
    active = {uid: {"rqueue": queue.Queue(), "request_id": f"r{uid}"} for uid in uids}
    return SimpleNamespace(), generator, active


def drain(info):
    out = []
    while not info["rqueue"].empty():
        out.append(info["rqueue"].get())
    return out


def test_only_the_owner_is_told_and_removed():
    server, generator, active = make_server([7, 8])
    seven, eight = active[7], active[8]

    def step():
        core.stream_text(server, eight, raising)

    core.step_and_fail_rows(server, generator, active, step)
    told = drain(eight)
    assert isinstance(told[0], Planted) and told[1] is None
    assert drain(seven) == [] and list(active) == [7]
    assert generator.removed == [8] and not core.faults_of(server)


def test_a_processors_row_is_found_in_the_batch():
    server, generator, active = make_server([7, 8])
    generator._unprocessed_sequences = [(8, [1], 4, {}, [raising], None)]
    core.guard_queued(generator, [8])
    guarded = generator._unprocessed_sequences[0][4]
    generator._generation_batch.logits_processors = [None, guarded]
    core.step_and_fail_rows(
        server, generator, active, lambda: guarded[0]([1], "logits")
    )
    assert list(active) == [7] and generator.removed == [8]


def test_several_errors_of_one_row_fail_it_once_and_unknown_owners_nobody():
    server, generator, active = make_server([7])
    seven = active[7]

    def step():
        for owner in (7, 7, 99, object()):
            core.faults_of(server).append((owner, Planted()))

    core.step_and_fail_rows(server, generator, active, step)
    assert len(drain(seven)) == 2 and generator.removed == [7]
    assert not core.faults_of(server)


def test_outside_a_server_a_processor_raises_as_before():
    guarded = core.GuardedProcessor(raising, SimpleNamespace(), 7)
    with pytest.raises(Planted):
        guarded([1], "logits")
