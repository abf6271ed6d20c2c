"""A warm row of a recurrent model, queued together with others, gives its solo tokens."""

import mlx.core as mx
from mlx_vlm.tests.generation_fixtures import Run, make_manager, prompt_of, tiny_model


def largest_prefill(run):
    """Run to the end; the rows of the largest prefill batch."""
    rows = 0
    for _ in run.steps():
        rows = max(rows, len(run.generator._prompt_batch or ()))
    return rows


def solo(model, prompt):
    return Run(model).ask(prompt)[0][0]


def queue_together(model, prompts, stored=40):
    """Store the first prompt's beginning, then queue all prompts at once."""
    manager = make_manager()
    Run(model, manager).ask(prompts[0][:stored], max_tokens=1)
    run = Run(model, manager)
    uids = run.insert(prompts)
    rows = largest_prefill(run)
    return uids, run.said, run.cached, rows


def test_warm_row_beside_cold_rows_gives_its_solo_tokens():
    model = tiny_model("hybrid")
    prompts = [prompt_of(49, 1), prompt_of(70, 2), prompt_of(23, 3)]
    uids, tokens, cached, _ = queue_together(model, prompts)
    assert cached[uids[0]] > 30
    for uid, prompt in zip(uids, prompts, strict=True):
        assert tokens[uid] == solo(model, prompt)


def test_rows_with_features_in_a_list_go_one_at_a_time():
    """Of a list, all rows of a batch would be given the first row's."""
    run = Run(tiny_model("dense"), make_manager())
    run.insert([prompt_of(49, 1), prompt_of(23, 3)])
    for number, row in enumerate(run.generator._unprocessed_sequences):
        row[3]["features_of_a_picture"] = [mx.array([number])]
    assert largest_prefill(run) == 1


def test_rows_without_recurrent_layers_stay_together():
    model = tiny_model("dense")
    prompts = [prompt_of(49, 1), prompt_of(23, 3)]
    uids, tokens, cached, rows = queue_together(model, prompts)
    assert cached[uids[0]] >= 32 and rows == 2
    for uid, prompt in zip(uids, prompts, strict=True):
        assert tokens[uid] == solo(model, prompt)
