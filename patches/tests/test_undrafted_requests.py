"""With a draft model loaded, what drafting cannot serve is decoded without it."""

from queue import Queue

import mlx.core as mx
import pytest
from mlx_vlm.server import generation
from mlx_vlm.tests.generation_fixtures import (
    MODELS,
    Run,
    build_mtp_drafter,
    prompt_of,
    tiny_model,
)
from mlx_vlm.tests.server_fixtures import (
    Streamer,
    bare_server,
    make_step_server,
    tokens_sent,
)

TOP_K = 3


def start(model, drafter=None, **options):
    kind = None if drafter is None else "mtp"
    drafting = {"draft_model": drafter, "draft_kind": kind}
    return Run(model, **drafting, **{"compute_logprobs": False, **options})


def never_twice(tokens, logits):
    """A penalty that no repetition survives."""
    return logits.at[:, tokens].add(-1e4)


def drain(run):
    """Tokens by uid, and the kinds of the batches that decoded."""
    kinds = []
    for _ in run.steps():
        beside = getattr(run.generator, "speculative_batches", ())
        for batch in (*beside, run.generator._generation_batch):
            if len(batch):
                speculative = getattr(batch, "is_speculative", False)
                kinds.append((speculative, tuple(batch.uids)))
    return run.said, list(dict.fromkeys(kinds))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_logits_processors_reach_every_token(name, rows):
    model = tiny_model(name)
    prompts = [prompt_of(20 + 7 * seed, seed) for seed in range(rows)]
    processors = [[never_twice]] * rows
    plain = start(model)
    plain.insert(prompts, logits_processors=processors)
    run = start(model, build_mtp_drafter())
    run.insert(prompts, logits_processors=processors)
    tokens, kinds = drain(run)
    assert tokens == drain(plain)[0]
    assert all(len(set(row)) == 8 for row in tokens.values())
    assert not any(speculative for speculative, _ in kinds)


def test_kinds_are_prefilled_apart_and_the_oldest_goes_first():
    model = tiny_model("hybrid")
    prompts = [prompt_of(31, 1), prompt_of(9, 2), prompt_of(31, 3)]
    processors = [None, [never_twice], None]
    plain = start(model)
    want = {}
    for uid, (prompt, row) in enumerate(zip(prompts, processors, strict=True)):
        (own,) = plain.insert([prompt], logits_processors=[row])
        want[uid] = drain(plain)[0][own]
    run = start(model, build_mtp_drafter())
    uids = run.insert(prompts, logits_processors=processors)
    tokens, kinds = drain(run)
    assert tokens == want
    first = (True, (uids[0], uids[2]))
    assert kinds[0] == first and (False, (uids[1],)) in kinds
    assert not any(uids[1] in rows for speculative, rows in kinds if speculative)


def test_a_row_that_could_be_drafted_joins_the_plain_ones():
    model = tiny_model("hybrid")
    run = start(model, build_mtp_drafter())
    run.insert([prompt_of(20, 1)], max_tokens=12, logits_processors=[[never_twice]])
    for _ in range(4):
        run.step()
    run.insert([prompt_of(20, 2)], max_tokens=2)
    kinds = drain(run)[1]
    # Where batches take turns it is drafted beside them.
    turns = hasattr(run.generator, "speculative_batches")
    assert ((True, (1,)) if turns else (False, (0, 1))) in kinds
    run.insert([prompt_of(20, 2)])
    assert drain(run)[1] == [(True, (2,))]


def test_a_thinking_budget_is_kept():
    class Budget:
        enable_thinking = True

        def __call__(self, token):
            self.seen = getattr(self, "seen", 0) + 1

        def pop_forced_token_id(self):
            return 5 if self.seen == 3 else None

    model = tiny_model("hybrid")
    run = start(model, build_mtp_drafter())
    run.insert([prompt_of(20, 1)], thinking_budget_criteria=[Budget()])
    assert drain(run)[0][0][3] == 5


def serve(monkeypatch, run, drafter, asks):
    """Run the server's step; (token, logprob, top logprobs) of each row in ``asks``."""
    server = make_step_server(
        monkeypatch, drafter, draft_kind="mtp", top_logprobs_k=TOP_K
    )
    active = {
        uid: {
            "rqueue": Queue(),
            "streamer": Streamer(),
            "logprobs": asked,
            "spec_snapshot": None if drafter is None else (0, 0, 0),
        }
        for uid, asked in asks.items()
    }
    queues = {uid: info["rqueue"] for uid, info in active.items()}
    while active:
        server._step(run.generator, active)
    return {
        uid: [
            (token.token, token.logprobs, token.top_logprobs, token.draft_n)
            for token in tokens_sent(queue)
        ]
        for uid, queue in queues.items()
    }


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_without_a_drafter(monkeypatch, name, rows):
    model = tiny_model(name)
    prompts = [prompt_of(20 + 7 * seed, seed) for seed in range(rows)]
    plain = start(model, compute_logprobs=True, top_logprobs_k=TOP_K)
    uids = plain.insert(prompts)
    want = serve(monkeypatch, plain, None, dict.fromkeys(uids, True))
    drafter = build_mtp_drafter()
    run = start(model, drafter)
    uids = run.insert(prompts)
    got = serve(monkeypatch, run, drafter, dict.fromkeys(uids, True))
    assert got == want
    assert all(len(top) == TOP_K for _, _, top, _ in got[uids[0]])
    assert any(logprob < 0 for _, logprob, _, _ in got[uids[0]])


def test_a_row_that_asks_for_logprobs_joins_one_that_does_not(monkeypatch):
    model = tiny_model("dense")
    plain = start(model, compute_logprobs=True, top_logprobs_k=TOP_K)
    plain.insert([prompt_of(20, 2)])
    (want,) = serve(monkeypatch, plain, None, {0: True}).values()
    drafter = build_mtp_drafter()
    run = start(model, drafter)
    run.insert([prompt_of(20, 1)], max_tokens=20, logits_processors=[[never_twice]])
    for _ in range(4):
        run.step()
    run.insert([prompt_of(20, 2)])
    got = serve(monkeypatch, run, drafter, {0: False, 1: True})[1]
    assert [token for token, *_ in got] == [token for token, *_ in want]
    for (_, logprob, top, _), (_, wanted, best, _) in zip(got, want, strict=True):
        assert logprob == pytest.approx(wanted, abs=1e-4)
        assert [t for t, _ in top] == [t for t, _ in best]


@pytest.mark.parametrize(
    "fields", [{"logits_processors": [never_twice]}, {"thinking_budget": 4}]
)
def test_the_server_takes_what_it_refused(fields):
    class Requests:
        def put(self, request):
            request.rqueue.put(EOFError("queued"))

    server = bare_server(
        draft_model=object(),
        requests=Requests(),
        wait_until_ready=lambda: None,
        _preprocess_request=lambda *args, **kwargs: {"input_ids": mx.array([[1, 2]])},
        _make_thinking_budget_criteria=lambda *args: None,
    )
    args = generation.GenerationArguments(max_tokens=4, **fields)
    with pytest.raises(EOFError, match="queued"):
        server.generate("fox", args=args)
