"""Figures of the changes that need no draft model.

Each function is for one change, and prints on whichever mlx_vlm is imported; the first
line of its text heads its table.  ``pr_figures`` makes the tests findable that it imports.
"""

from __future__ import annotations

from typing import Any


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
