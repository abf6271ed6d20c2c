"""Figures of the changes about draft models; see ``pr_figures_plain``."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any


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
