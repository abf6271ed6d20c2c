"""The prefix cache is a tree of segments, whatever the model's layers are."""

import pytest
from mlx_vlm.apc import APCManager
from mlx_vlm.models import qwen3
from mlx_vlm.tests.generation_fixtures import (
    DENSE,
    Run,
    build_model,
    prompt_of,
    tiny_model,
)

START = 1  # the token that opens each message


@pytest.fixture(scope="module")
def dense():
    # Heads of 32, so that keys and values can be packed in groups of 32.
    return build_model(qwen3, {**DENSE, "num_hidden_layers": 3, "head_dim": 32})


@pytest.fixture(scope="module")
def hybrid():
    return tiny_model("hybrid")


@pytest.fixture(params=["dense", "hybrid"])
def model(request):
    return request.getfixturevalue(request.param)


def make_manager(memory_max_bytes=1 << 30):
    """A manager whose budget alone decides, not the free memory of the machine."""
    manager = APCManager(overrides={"memory_max_gb": memory_max_bytes / (1 << 30)})
    manager._memory_headroom = lambda: 1 << 40
    return manager


@pytest.fixture
def manager():
    return make_manager()


def start(model, manager=None, **options):
    return Run(model, manager, special_ids=[START], **options)


def run(model, manager, prompts, max_tokens=8, **options):
    """Tokens and restored lengths of prompts that arrive at once, in their order."""
    return start(model, manager, **options).ask(*prompts, max_tokens=max_tokens)


def text(length, seed):
    """Tokens of which none opens a message."""
    return [token + START for token in prompt_of(length, seed)]


def chat(*messages):
    return [token for message in messages for token in (START, *message)] + [START]


def needs(*modules):
    """Skip a test in a tree without another change that it stands on."""
    for name in modules:
        pytest.importorskip(f"mlx_vlm.generate.{name}")


@pytest.mark.parametrize("rows", [1, 3])
def test_turn_reads_its_new_tokens_alone(model, manager, rows):
    needs("output_tokens", "recurrent_rows")
    history = [text(40 + 7 * row, row) for row in range(rows)]
    known: list = []
    for turn in range(3):
        tokens, cached = run(model, manager, history)
        cold, _ = run(model, None, history)
        assert tokens == cold
        if turn:
            assert cached == known
        known = [len(h) + len(t) for h, t in zip(history, tokens, strict=True)]
        history = [
            h + t + text(5 + row, 9 + turn + row)
            for row, (h, t) in enumerate(zip(history, tokens, strict=True))
        ]


@pytest.mark.parametrize("rows", [1, 2])
def test_same_prompt_again_computes_one_token(model, manager, rows):
    prompts = [text(50, row) for row in range(rows)]
    cold, _ = run(model, manager, prompts)
    for _ in range(2):
        assert run(model, manager, prompts) == (cold, [49] * rows)


def test_new_chat_starts_from_the_end_of_the_system_text(model, manager):
    system = text(60, 1)
    run(model, manager, [chat(system, text(20, 2))])
    prompt = chat(system, text(25, 3))
    tokens, (cached,) = run(model, manager, [prompt])
    assert cached >= len(system) + 1
    assert tokens == run(model, None, [prompt])[0]


def test_prompt_that_left_in_the_middle_is_resumed_there(model, manager, request):
    """A dense model at once; one with end states from the second time on."""
    shared = text(45, 1)
    prompts = [shared + text(30, seed) for seed in (2, 3, 4)]
    lengths = []
    for prompt in prompts:
        tokens, (cached,) = run(model, manager, [prompt])
        assert tokens == run(model, None, [prompt])[0]
        lengths.append(cached)
    assert lengths[2] >= len(shared)
    if "dense" in request.node.callspec.id:
        assert lengths[1] >= len(shared)


def test_cold_and_warm_rows_share_a_batch(model, manager, request):
    if "hybrid" in request.node.callspec.id:
        needs("recurrent_rows")
    warm, cold = text(40, 1), text(55, 2)
    run(model, manager, [warm])
    prompts = [warm + text(9, 3), cold]
    tokens, cached = run(model, manager, prompts)
    assert cached[0] >= 39 and cached[1] == 0
    for prompt, got in zip(prompts, tokens, strict=True):
        assert [got] == run(model, None, [prompt])[0]


def test_what_was_read_last_is_kept(model):
    """Three conversations, room for two and a half: the one left alone goes."""
    probe = make_manager()
    run(model, probe, [text(60, 1)])
    manager = make_manager(2.5 * probe.resident_bytes())
    said = {}
    for seed in (1, 2, 1, 3):
        (reply,), _ = run(model, manager, [text(60, seed)])
        said[seed] = text(60, seed) + reply
    assert manager.resident_bytes() <= manager.memory_max_bytes
    for seed in (3, 1):
        _, (cached,) = run(model, manager, [said[seed] + text(3, 8)], max_tokens=1)
        assert cached >= 59  # the prompt; with output-tokens the reply as well
    assert run(model, manager, [said[2] + text(3, 8)])[1] == [0]


def test_prompt_beyond_the_budget_evicts_nobody(model):
    probe = make_manager()
    run(model, probe, [text(40, 1)])
    manager = make_manager(2 * probe.resident_bytes())
    run(model, manager, [text(40, 1)])
    run(model, manager, [text(400, 2)])
    assert run(model, manager, [text(40, 1)])[1] == [39]


def test_cancelled_prefill_keeps_its_chunks(model, manager):
    prompt = text(80, 1)
    cancelled = start(model, manager)
    (uid,) = cancelled.insert([prompt])
    for _ in range(3):
        cancelled.step()
    assert cancelled.generator.remove(uid)
    tokens, (cached,) = run(model, manager, [prompt])
    assert 32 <= cached < 80
    assert tokens == run(model, None, [prompt])[0]


def test_failed_chunk_stores_what_was_whole(dense, manager):
    prompt = text(80, 1)
    broken = start(dense, manager)
    broken.insert([prompt])
    broken.step()
    broken.step()
    batch = broken.generator._prompt_batch

    def fail(*args, **kwargs):
        raise RuntimeError("no memory")

    batch.model = fail
    with pytest.raises(RuntimeError):
        batch.prompt_step()
    tokens, (cached,) = run(dense, manager, [prompt])
    assert cached >= 32
    assert tokens == run(dense, None, [prompt])[0]


@pytest.mark.parametrize("rows", [1, 2])
def test_quantized_keys_and_values_stay_packed(dense, manager, rows):
    settings = {"kv_bits": 8, "kv_group_size": 32, "kv_quant_scheme": "uniform"}
    prompts = [text(40 + 6 * row, row) for row in range(rows)]
    cold, _ = run(dense, None, prompts, **settings)
    first, _ = run(dense, manager, prompts, **settings)
    again, cached = run(dense, manager, prompts, **settings)
    assert first == cold and again == cold
    assert cached == [len(prompt) - 1 for prompt in prompts]


def test_salts_share_nothing(model, manager):
    prompt = text(40, 1)
    run(model, manager, [prompt])
    assert start(model, manager).ask(prompt, max_tokens=2, salt=2)[1] == [0]


def test_nothing_is_held_after_requests_and_clear(model, manager):
    run(model, manager, [text(40, 1), text(33, 2)])
    run(model, manager, [text(40, 1), text(33, 2)])
    assert manager.stats_snapshot()["leases"] == 0
    manager.clear()
    assert manager.resident_bytes() == 0
