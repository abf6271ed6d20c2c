"""The before/after figures of the PR texts, on whichever mlx_vlm is imported.

    python tools/pr_figures.py                              stock
    python tools/make_patches.py --tree DIR
    PYTHONPATH=DIR python tools/pr_figures.py               patched

The models, prompts and generators are those of the tests that go upstream (patches/tests): tiny, random, float32.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["MLX_VLM_CACHEPLUS"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "patches" / "tests"))
# Stock has not got them yet: the tests that go upstream find them there. In the order in
# which they import each other.
tests = sys.modules["mlx_vlm.tests"] = ModuleType("mlx_vlm.tests")
for name in ("generation_fixtures", "drafting_fixtures", "server_fixtures"):
    fixtures = importlib.import_module(name)
    sys.modules[f"mlx_vlm.tests.{name}"] = fixtures
    setattr(tests, name, fixtures)


def warm_single_row() -> None:
    """Bytes of the cache that decoding puts together from rows, a token."""
    import test_warm_single_row as t

    for name, length in (("dense", 49), ("hybrid", 49), ("hybrid", 490)):
        patch = t.pytest.MonkeyPatch()
        model = t.build_model(*t.MODELS[name])
        run = t.Run(patch, model, t.make_manager())
        first = t.prompt_of(length, 1)
        for kind, prompt in (("cold", first), ("warm", first + t.prompt_of(20, 2))):
            before = run.copied
            tokens, (restored,) = run.ask(prompt)
            own = [layer.__name__ for layer in dict.fromkeys(run.types[-1])]
            copied = (run.copied - before) // len(tokens[0])
            print(
                f"{name}, {kind}, {restored} restored: {copied} bytes, {', '.join(own)}"
            )
        patch.undo()


def row_positions() -> None:
    """Distance of a row's first log-prob from a cold single row's, in nats."""
    import test_row_positions as t

    def models() -> tuple[Any, Any]:
        return t.tiny_model("hybrid"), t.tiny_model("hybrid")

    def distance(reference: Any, prompt: list[int], pairs: list) -> str:
        token, logprob = pairs[0]
        return f"{abs(logprob - t.cold_logprobs(reference, prompt)[token].item()):.4f}"

    for lengths in ((13,), (5, 31, 13)):
        model, reference = models()
        prompts = [t.prompt_of(n, seed) for seed, n in enumerate(lengths)]
        run = t.Run(model)
        uids = run.insert(prompts)
        run.drain()
        for uid, prompt in zip(uids, prompts, strict=True):
            off = distance(reference, prompt, run.pairs[uid])
            print(f"{len(lengths)} rows, prompt of {len(prompt):2}: off by {off}")
    model, fresh = models()
    manager = t.make_manager()
    prompt = t.prompt_of(40, 1)
    t.Run(model, manager).ask(prompt)
    run, prompt = t.Run(fresh, manager), prompt + t.prompt_of(9, 2)
    (uid,) = run.insert([prompt])
    run.drain()
    off = distance(reference, prompt, run.pairs[uid])
    print(f"1 row, warm, first of a process: off by {off}")


def recurrent_rows() -> None:
    """Tokens of a row that equal the same row's by itself."""
    import test_recurrent_rows as t

    for lengths in ((49,), (49, 70, 23)):
        model = t.tiny_model("hybrid")
        prompts = [t.prompt_of(n, seed) for seed, n in enumerate(lengths, 1)]
        uids, tokens, cached, _ = t.queue_together(model, prompts)
        for uid, prompt in zip(uids, prompts, strict=True):
            solo = t.solo(model, prompt)
            same = sum(a == b for a, b in zip(tokens[uid], solo, strict=True))
            print(
                f"{len(lengths)} rows, prompt of {len(prompt)}, {cached[uid]:2} restored: "
                f"{same} of {len(solo)} tokens as by itself"
            )


def row_errors() -> None:
    """Requests that end in an error when one prompt raises in its prefill."""
    import test_row_errors as t

    patch = t.pytest.MonkeyPatch()
    model = t.model.__wrapped__(patch)
    server = t.server.__wrapped__(patch)
    for rows in (1, 3):
        prompts = [t.prompt_of(12, seed) for seed in range(rows)]
        prompts[-1][-1] = t.POISON
        run = t.Run(model)
        active = t.activate(run.insert(prompts))
        queues = [info["rqueue"] for info in active.values()]
        try:
            t.serve_rows(server, run, active)
            failed = sum(t.outcome(queue)[1] is not None for queue in queues)
        except RuntimeError:
            # What leaves the step fails every request in flight.
            failed = rows
        print(f"{rows} rows, one raises: {failed} fail")
    patch.undo()


def output_tokens() -> None:
    """What the next turn restores of a prompt and its reply, and its tokens against a cold run."""
    import test_output_tokens as t

    for name in t.MODELS:
        for budget in ([30], [34, 30, 45]):
            model, manager = t.tiny_model(name), t.make_manager()
            prompts = [t.prompt_of(40, seed) for seed in range(len(budget))]
            replies, _ = t.Run(model, manager).ask(*prompts, max_tokens=budget)
            for prompt, reply in zip(prompts, replies, strict=True):
                history = prompt + reply
                after = history + t.prompt_of(5, 9)
                (tokens,), (restored,) = t.Run(model, manager).ask(after)
                same = [tokens] == t.Run(model).ask(after)[0]
                print(
                    f"{name}, {len(budget)} rows: next prompt {len(after)}, history {len(history)}, "
                    f"restored {restored}, tokens {'equal' if same else 'DIFFERENT'}"
                )


def segment_tree() -> None:
    """What a prompt restores of what was read before, and its tokens against a cold run."""
    import test_segment_tree as t

    for name in ("dense", "hybrid"):
        model = getattr(t, name).__wrapped__()
        for rows in (1, 3):
            for label, before, asked in _conversations(t, model, rows):
                manager = t.make_manager()
                for prompts in before:
                    t.run(model, manager, prompts)
                tokens, restored = t.run(model, manager, asked)
                same = tokens == [t.run(model, None, [ask])[0][0] for ask in asked]
                print(
                    f"{name}, {label}, {rows} rows: prompts {[len(a) for a in asked]}, "
                    f"restored {restored}, tokens {'equal' if same else 'DIFFERENT'}"
                )


def drafted_replies() -> None:
    """What the next turn restores of a prompt and a reply that a draft model helped to write."""
    import test_drafted_replies as t

    for kind in t.DRAFTERS:
        for budgets in ([14], [4, 21, 11]):
            model, manager = t.model.__wrapped__(), t.manager.__wrapped__()
            prompts = [t.prompt_of(40 + seed, seed) for seed in range(len(budgets))]
            run, uids, _ = t.drafted_run(model, manager, kind, prompts, budgets)
            said = run.drain()
            for uid, prompt in zip(uids, prompts, strict=True):
                asked = prompt + said[uid] + t.prompt_of(5, 9)
                again = t.Run(model, manager)
                again.insert([asked])
                tokens = again.drain()[0]
                same = tokens == t.reply_of(model, asked, 8)
                print(
                    f"{kind}, {len(budgets)} rows: next prompt {len(asked)}, history {len(prompt) + len(said[uid])}, "
                    f"restored {again.cached[0]}, tokens {'equal' if same else 'DIFFERENT'}"
                )


def draft_priming() -> None:
    """Rows whose first proposal is that of a drafter that read the whole prompt at once."""
    import test_draft_priming as t

    for kind in t.DRAFTERS:
        for lengths in ((40,), (11, 40, 23)):
            model = t.model.__wrapped__()
            prompts = [t.prompt_of(n, seed) for seed, n in enumerate(lengths)]
            drafter = t.build_drafter(kind)
            t.reply_to(model, prompts, drafter, kind, 16)
            found = drafter.proposed[: len(prompts)]
            wanted = [t.unchunked_proposal(model, kind, prompt) for prompt in prompts]
            same = sum(row in found for row in wanted)
            print(f"{kind}, prompts {list(lengths)}: {same} of {len(lengths)}")


def draft_state() -> None:
    """What a prompt restores, and whether its first proposal is that of a drafter that read it all."""
    import test_draft_priming as priming
    import test_draft_state as t

    for kind in t.DRAFTERS:
        for label in ("next turn", "third prompt that leaves at 30"):
            server = t.Server(kind)
            if label == "next turn":
                asked = t.prompt_of(40, 1)
                (reply,), _, _ = server.ask(asked)
                asked = asked + reply + t.prompt_of(5, 9)
            else:
                shared = t.prompt_of(30, 1)
                for seed in (2, 3):
                    server.ask([*shared, seed, *t.prompt_of(12, seed)], max_tokens=2)
                asked = [*shared, 4, *t.prompt_of(12, 4)]
            _, cached, proposed = server.ask(asked)
            wanted = priming.unchunked_proposal(server.model, kind, asked)
            same = "as one" if proposed[0] == wanted else "NOT as one"
            print(
                f"{kind}, {label}: prompt {len(asked)}, restored {cached[0]}, proposes {same} that read it all"
            )


def _conversations(t: Any, model: Any, rows: int) -> list[tuple[str, list, list]]:
    """What is asked of a tree: a name, the prompts before, and the prompts measured."""
    seeds = range(1, rows + 1)
    system, shared = t.text(60, 1), t.text(45, 1)
    asked = [t.text(40 + 7 * seed, seed) for seed in seeds]
    turns = [
        a + reply + t.text(5, 9)
        for a, reply in zip(asked, t.run(model, None, asked)[0], strict=True)
    ]
    return [
        ("same prompt again", [asked], asked),
        ("next turn", [asked], turns),
        (
            "new chat, same system text",
            [[t.chat(system, t.text(20, 8))]],
            [t.chat(system, t.text(25 + seed, seed)) for seed in seeds],
        ),
        (
            "third prompt that leaves at 45",
            [[shared + t.text(30, 8)], [shared + t.text(30, 9)]],
            [shared + t.text(30 + seed, seed) for seed in seeds],
        ),
    ]


def undrafted_requests() -> None:
    """Tokens and log-probabilities with a draft model that equal those without it."""
    import test_undrafted_requests as t

    patch = t.pytest.MonkeyPatch()
    model, drafter = t.tiny_model("hybrid"), t.build_mtp_drafter()
    for rows in (1, 3):
        prompts = [t.prompt_of(20 + 7 * seed, seed) for seed in range(rows)]
        plain, run = t.start(model), t.start(model, drafter)
        for made in (plain, run):
            made.insert(prompts, logits_processors=[[t.never_twice]] * rows)
        pairs = zip(plain.drain().values(), run.drain().values(), strict=True)
        tokens = [sum(map(int.__eq__, a, b)) for a, b in pairs]
        plain = t.start(model, compute_logprobs=True, top_logprobs_k=t.TOP_K)
        run = t.start(model, drafter)
        want, got = (
            t.serve(patch, made, own, dict.fromkeys(made.insert(prompts), True))
            for made, own in ((plain, None), (run, drafter))
        )
        logprobs = [sum(map(tuple.__eq__, want[uid], got[uid])) for uid in want]
        print(
            f"{rows} rows: penalty, {tokens} of 8 tokens; log-probabilities, {logprobs} of 8"
        )
    patch.undo()


def shared_prefill() -> None:
    """Tokens that prefills forward, for prompts of 400 shared tokens and 20 to 35 of their own."""
    import test_shared_prefill as t

    for name in t.MODELS:
        for rows in (1, 2, 4):
            patch = t.pytest.MonkeyPatch()
            server = t.Server(patch, t.tiny_model(name))
            server.run(t.agents(rows))
            patch.undo()
            least = 400 + sum(len(prompt) - 400 for prompt in t.agents(rows))
            print(
                f"{name}, {rows} rows: {sum(server.forwarded)} forwarded, {least} differ"
            )


def row_samplers() -> None:
    """Tokens of each request in one batch that equal those of the same request alone."""
    import test_row_samplers as t

    patch = t.pytest.MonkeyPatch()
    serve = t.serve.__wrapped__(patch)

    def same(model: Any, requests: list, *drafter: Any) -> str:
        alone = [t.alone(serve, model, *request[1:]) for request in requests]
        pairs = zip(serve(model, requests, *drafter), alone, strict=True)
        counts = (sum(map(int.__eq__, *map(t.tokens_of, pair))) for pair in pairs)
        return ", ".join(map(str, counts))

    one, two = t.prompt_of(20, 1), t.prompt_of(13, 2)
    for name in t.MODELS:
        model = t.tiny_model(name)
        for first, late in (("HOT", "GREEDY"), ("GREEDY", "HOT"), ("HOT", "OTHER")):
            pair = [(0, one, getattr(t, first)), (5, two, getattr(t, late))]
            print(f"{name}, {first} and later {late}: {same(model, pair)} of 12")
        cases = ("seed", "greedy", "top_p", "top_k", "temperature", "greedy", "min_p")
        eight = [
            (0, t.prompt_of(9 + seed, seed), t.ASKS[case])
            for seed, case in enumerate((*cases, "seed"))
        ]
        print(f"{name}, 8 rows at once: {same(model, eight)} of 12")
    model = t.tiny_model("hybrid")
    three = [(0, one, t.HOT), (0, two, t.GREEDY), (4, t.prompt_of(16, 3), t.OTHER)]
    for kind in ("mtp", "eagle3", "dflash"):
        found = same(model, three, t.build_drafter(kind), kind)
        print(f"{kind}, HOT and GREEDY, later OTHER: {found} of 12")
    patch.undo()


def speculative_turns() -> None:
    """Rounds of a running reply between the arrival of a short request and its first token."""
    import test_speculative_turns as t

    for kind in t.DRAFTERS:
        model, drafter = t.build_target(), t.build_drafter(kind)
        asks = [(t.prompt_of(40, 1), 60), (t.prompt_of(12, 2), 6)]
        want = [t.alone(model, kind, *ask)[0] for ask in asks]
        run = t.drafted(model, drafter, kind)
        uids = []
        for prompt, max_tokens in asks:
            uids += run.insert([prompt], max_tokens=max_tokens)
            before = len(drafter.proposed)
            run.step_until_said(uids[-1])
        waited = len(drafter.proposed) - before
        same = [run.drain()[uid] for uid in uids] == want
        print(f"{kind}: {waited} rounds, tokens {'equal' if same else 'DIFFERENT'}")


def speculative_merge() -> None:
    """Verify steps of four replies of 40 tokens, each begun four steps after the one before, and rows a step."""
    import test_speculative_merge as t

    for kind in t.DRAFTERS:
        model = t.build_target()
        asks = [t.prompt_of(20 + 9 * seed, seed) for seed in range(4)]
        want = [t.alone(model, kind, ask, 40) for ask in asks]
        for mode in ("never", "always"):
            os.environ[t.MODE] = mode
            run, steps, uids = t.drafted(model, kind), [], []
            with _verify_steps(steps):
                for ask in asks:
                    uids += run.insert([ask], max_tokens=40)
                    for _ in range(4):
                        run.step()
                said = run.drain()
            same = [said[uid] for uid in uids] == want
            tokens = "equal" if same else "DIFFERENT"
            print(f"{kind}, {mode}: {len(steps)} verify steps, tokens {tokens}")
    del os.environ[t.MODE]


@contextlib.contextmanager
def _verify_steps(steps: list[None]) -> Iterator[None]:
    """Add an item for each verify step that is committed."""
    modules = [
        importlib.import_module(f"mlx_vlm.speculative.{kind}")
        for kind in ("mtp", "eagle3", "dflash")
    ]
    # A patched tree has both in some modules; neither calls the other through them.
    commits = [
        (module, name, getattr(module, name))
        for module in modules
        for name in ("commit_speculative_round", "commit_round")
        if hasattr(module, name)
    ]

    def counting(commit: Any) -> Any:
        def counted(*args: Any) -> Any:
            steps.append(None)
            return commit(*args)

        return counted

    for module, name, commit in commits:
        setattr(module, name, counting(commit))
    try:
        yield
    finally:
        for module, name, commit in commits:
            setattr(module, name, commit)


def fair_queue() -> None:
    """Prompts answered before one of 60 tokens, 30 prompts of 6 tokens coming behind it."""
    import test_fair_queue as t

    for places in (1, 4):
        model = t.model.__wrapped__()
        run = t.start(model, places)
        (long,) = t.insert(run, t.LONG)
        t.insert(run, *[t.SHORT] * 30)
        before = t.order_of_first_tokens(run).index(long)
        print(f"{places} admitted at once: {before}")


def main() -> int:
    spec = importlib.util.find_spec("mlx_vlm")
    if spec is None or spec.origin is None:
        print("error: mlx_vlm is not installed", file=sys.stderr)
        return 2
    patched = (Path(spec.origin).parent / "CACHEPLUS_PATCHED").is_file()
    print("patched tree" if patched else "stock")
    logging.disable(logging.ERROR)
    for figures in (
        warm_single_row,
        row_positions,
        recurrent_rows,
        row_errors,
        output_tokens,
        segment_tree,
        drafted_replies,
        draft_priming,
        draft_state,
        shared_prefill,
        undrafted_requests,
        row_samplers,
        speculative_turns,
        speculative_merge,
        fair_queue,
    ):
        print(f"{figures.__name__.replace('_', '-')}: {figures.__doc__}")
        figures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
