"""When rows of a recurrent model may be prefilled together."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from mlx_vlm.apc_adapters import Capability

from mlx_vlm_cacheplus.core import recurrent_rows as core

RECURRENT = SimpleNamespace(capability=Capability.CHECKPOINT, children=())
DENSE = SimpleNamespace(capability=None, children=())
NESTED = SimpleNamespace(capability=None, children=(DENSE, RECURRENT))


class Disk:
    """Holds one prefix."""

    def __init__(self, prefix):
        self.prefix = tuple(prefix)

    def find_exact_prefix(self, ids, *, max_prefix_tokens, **_):
        length = len(self.prefix)
        fits = length <= max_prefix_tokens and ids[:length] == self.prefix
        return (hash(self.prefix), length) if fits else None


class Generator(SimpleNamespace):
    """What an admission looks at; prompts are given as lists of ids."""

    def _apc_extra_hash(self, kwargs):
        return kwargs.get("salt", 0)


def make(prompts, known=(), layers=(DENSE, RECURRENT), disk=None, **fields):
    states = {
        i: SimpleNamespace(token_ids=tuple(ids), extra_hash=salt)
        for i, (ids, salt) in enumerate(known)
    }
    manager = SimpleNamespace(
        lock=threading.RLock(), _exact_cache=states, disk=disk, block_size=16
    )
    defaults = {
        "prefill_batch_size": 4,
        "completion_batch_size": 32,
        "_unprocessed_sequences": [
            (uid, ids, 8, {}, None, None) for uid, ids in enumerate(prompts)
        ],
        "apc": SimpleNamespace(plan=SimpleNamespace(layer_specs=layers)),
        "apc_manager": manager,
        "_prompt_batch": None,
        "_generation_batch": [],
    }
    return Generator(**{**defaults, **fields})


def size_inside(generator):
    with core.rows_that_fit_together(generator):
        size = generator.prefill_batch_size
    assert generator.prefill_batch_size == 4
    return size


KNOWN = [((1, 2), 0)]
COLD = [[5, 6], [7, 8]]
MIXED = [[5, 6], [1, 2, 3]]


def test_cold_rows_go_together():
    assert size_inside(make(COLD, KNOWN)) == 4


@pytest.mark.parametrize("layers", [(RECURRENT,), (DENSE, NESTED)])
def test_a_warm_row_makes_them_go_alone(layers):
    assert size_inside(make(MIXED, KNOWN, layers)) == 1


def test_a_warm_row_of_another_kind_of_model_does_not():
    assert size_inside(make(MIXED, KNOWN, (DENSE,))) == 4


def test_a_state_under_another_salt_does_not_count():
    assert size_inside(make(MIXED, [((1, 2), 9)])) == 4


def test_a_state_on_disk_counts():
    assert size_inside(make(MIXED, disk=Disk([1, 2]))) == 1
    assert size_inside(make(COLD, disk=Disk([1, 2]))) == 4


def test_rows_behind_those_that_are_next_do_not_count():
    waiting = [[5], [6], [7], [8], [1, 2, 3]]
    assert size_inside(make(waiting, KNOWN)) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"apc": None},
        {"_prompt_batch": object()},
        {"_unprocessed_sequences": [(1, [1, 2, 3], 8, {}, None, None)]},
    ],
    ids=["no cache", "prefilling", "one row"],
)
def test_where_nobody_is_admitted_nothing_changes(fields):
    assert size_inside(make(MIXED, KNOWN, **fields)) == 4


def test_the_size_comes_back_after_an_error():
    generator = make(MIXED, KNOWN)
    with pytest.raises(ValueError), core.rows_that_fit_together(generator):
        raise ValueError("prefill")
    assert generator.prefill_batch_size == 4


def test_rows_go_alone_while_others_decode():
    """One that ends in this step stores its reply before these are admitted."""
    generator = make(COLD, _generation_batch=[None] * 30)
    generator._apc_extra_hash = None  # a lookup would call it
    assert size_inside(generator) == 1
    assert size_inside(make(COLD, layers=(DENSE,), _generation_batch=[None])) == 4


def test_nothing_is_looked_up_where_rows_elsewhere_have_all_places():
    generator = make(MIXED, KNOWN, completion_batch_size=3)
    generator._apc_extra_hash = None  # a lookup would call it
    assert size_inside(generator) == 4


def test_warm_rows_go_alone_where_a_drafter_may_be_resumed_elsewhere():
    alike = [[1, 2, 3], [1, 2, 4]]
    assert size_inside(make(alike, KNOWN)) == 4
    assert size_inside(make(alike, KNOWN, draft_model=object())) == 1
    assert size_inside(make(COLD, KNOWN, draft_model=object())) == 4


def test_warm_rows_with_as_many_tokens_left_go_together():
    known = [([1, 2, 3], 0)]
    assert size_inside(make([[1, 2, 3, 4], [1, 2, 3, 5]], known=known)) == 4
    assert size_inside(make([[1, 2, 3, 4], [1, 2, 3, 5, 6]], known=known)) == 1


def test_rows_with_features_in_a_list_go_alone():
    generator = make([[1, 2, 3], [4, 5, 6]], layers=(DENSE,))
    assert size_inside(generator) == 4
    uid, ids, *rest = generator._unprocessed_sequences[1]
    rest[1] = {"deepstack_visual_embeds": [object()], "inputs_embeds": object()}
    generator._unprocessed_sequences[1] = (uid, ids, *rest)
    assert size_inside(generator) == 1
