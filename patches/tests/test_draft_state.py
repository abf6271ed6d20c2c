"""What a drafter has read is stored and restored with the target's part."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_vlm.apc import APCManager
from mlx_vlm.generate.ar import BatchGenerator
from mlx_vlm.models import qwen3_5_text
from mlx_vlm.speculative.drafters import eagle3, qwen3_5_mtp, qwen3_dflash

HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [1, 1, 0],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}
LAYER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
BLOCK = 4
DRAFTERS = {
    "mtp": (
        qwen3_5_mtp,
        {
            "model_type": "qwen3_5_mtp",
            "text_config": {**HYBRID, "mtp_num_hidden_layers": 1},
        },
    ),
    "eagle3": (
        eagle3,
        {
            "model_type": "eagle3",
            "transformer_layer_config": LAYER,
            "draft_vocab_size": 96,
            "target_layer_ids": [1, 2, 3],
        },
    ),
    "dflash": (
        qwen3_dflash,
        {
            **LAYER,
            "model_type": "qwen3",
            "mask_token_id": 1,
            "target_layer_ids": [0, 2],
            "num_target_layers": 4,
        },
    ),
}


def build(module, config, seed=0):
    """A random model; wide weights, so that greedy text varies."""
    mx.random.seed(seed)
    model = module.Model(module.ModelConfig.from_dict(config))
    model.update(tree_map(lambda w: w * 3 if w.ndim > 1 else w, model.parameters()))
    mx.eval(model.parameters())
    return model


def build_drafter(kind, seed=0):
    """A random drafter, which notes its proposals in ``proposed``: rows of tokens."""
    module, config = DRAFTERS[kind]
    drafter = build(module, {**config, "block_size": BLOCK}, seed)
    base, proposed = type(drafter), []
    name = "draft_block" + ("_greedy" if hasattr(base, "draft_block_greedy") else "")

    def propose(self, *args, **kwargs):
        tokens = getattr(base, name)(self, *args, **kwargs)
        proposed.extend(tokens.tolist())
        return tokens

    drafter.__class__ = type("Proposing", (base,), {name: propose})
    drafter.proposed = proposed
    return drafter


def prompt_of(length, seed):
    return [(7 * i * i + 3 * i + 11 * seed) % 90 + 2 for i in range(length)]


class NoStop:
    def add_eos_token_ids(self, ids):
        pass

    def __call__(self, token):
        return False


class Server:
    """One target, drafters and prefix cache, asked again and again."""

    def __init__(self, kind):
        self.kind = kind
        self.model = build(qwen3_5_text, HYBRID)
        self.drafter = build_drafter(kind)
        self.manager = make_manager()

    def ask(self, *prompts, max_tokens=8):
        """Answer the prompts together: (replies, restored lengths, proposals)."""
        generator = BatchGenerator(
            self.model.language_model,
            SimpleNamespace(stopping_criteria=NoStop()),
            apc_manager=self.manager,
            prefill_step_size=16,
            greedy_sampling=True,
            draft_model=self.drafter,
            draft_kind=self.kind if self.drafter is not None else None,
            draft_block_size=BLOCK,
        )
        kwargs = [
            {
                **{
                    key: value
                    for key, value in self.model.get_input_embeddings(
                        mx.array([prompt])
                    )
                    .to_dict()
                    .items()
                    if value is not None
                },
                "_apc_semantic_hash": 1,
            }
            for prompt in prompts
        ]
        uids = generator.insert(
            list(prompts), max_tokens=max_tokens, prompt_kwargs=kwargs
        )
        if self.drafter is not None:
            self.drafter.proposed.clear()
        said, cached = {}, {}
        while generator.has_work:
            progress, responses = generator.next()
            cached.update({p.uid: p.cached_tokens for p in progress})
            for response in responses:
                if response.token is not None:
                    said.setdefault(response.uid, []).append(response.token)
        proposed = list(self.drafter.proposed) if self.drafter is not None else []
        return [said[u] for u in uids], [cached.get(u, 0) for u in uids], proposed

    def assert_drafts_as_cold(self, prompt, restored):
        """A prompt restores so much, and is drafted round by round as a cold one."""
        warm, cached, of_warm = self.ask(prompt)
        manager, self.manager = self.manager, make_manager()
        cold, _, of_cold = self.ask(prompt)
        self.manager = manager
        assert cached == [restored]
        assert warm == cold
        assert of_warm == of_cold and of_warm


def make_manager():
    return APCManager(
        num_blocks=256, block_size=16, overrides={"checkpoint_entries": 8}
    )


@pytest.fixture(params=list(DRAFTERS))
def server(request):
    return Server(request.param)


def test_after_a_prompt(server):
    prompt = prompt_of(40, 1)
    server.ask(prompt, max_tokens=1)
    server.assert_drafts_as_cold(prompt + prompt_of(9, 2), 40)


def test_after_replies(server):
    """The newest token of a reply is not processed."""
    asked = prompt_of(40, 1)
    for seed in range(2, 5):
        (reply,), _, _ = server.ask(asked, max_tokens=7 + seed)
        known = asked + reply
        asked = known + prompt_of(6, seed)
    server.assert_drafts_as_cold(asked, len(known) - 1)


def test_after_a_split(server):
    """Where two prompts have parted, a third one is resumed."""
    shared = prompt_of(30, 1)
    for seed in (2, 3):
        server.ask(shared + [seed] + prompt_of(12, seed), max_tokens=2)
    server.assert_drafts_as_cold(shared + [4] + prompt_of(12, 4), 30)


def test_warm_rows_of_one_batch(server):
    asks = []
    for seed, length in enumerate((40, 23)):
        prompt = prompt_of(length, seed)
        (reply,), _, _ = server.ask(prompt)
        asks.append(prompt + reply + prompt_of(5 + seed, 9))
    warm, cached, proposed = server.ask(*asks)
    assert all(cached)
    server.manager = make_manager()
    for place, asked in enumerate(asks):
        (cold,), _, of_cold = server.ask(asked)
        assert warm[place] == cold
        assert proposed[place] == of_cold[0]


def test_what_was_read_without_a_drafter_is_read_again_once(server):
    prompt, drafter = prompt_of(40, 1), server.drafter
    server.drafter = None
    (reply,), _, _ = server.ask(prompt)
    asked = prompt + reply + prompt_of(5, 9)
    server.drafter = drafter
    server.assert_drafts_as_cold(asked, 0)
    server.assert_drafts_as_cold(asked + prompt_of(4, 8), len(asked))


def test_another_drafter_does_not_take_the_first_one_s_part(server):
    prompt = prompt_of(40, 1)
    server.ask(prompt)
    server.drafter = build_drafter(server.kind, seed=5)
    server.assert_drafts_as_cold(prompt + prompt_of(5, 9), 0)


def test_the_budget_counts_the_drafter(server):
    (reply,), _, _ = server.ask(prompt_of(40, 1))
    segments = server.manager.segments
    held = segments.nbytes
    nodes = [node for tree in segments._trees.values() for node in tree]
    parts = [node.payload.companion for node in nodes]
    assert held == sum(node.nbytes for node in nodes)
    # Keys and values in float32, 2 heads of 16; every token but the newest is held.
    pending = sum(p.pending.nbytes for p in parts if p.pending is not None)
    assert sum(p.nbytes for p in parts) - pending == 256 * (40 + len(reply) - 1)
    server.manager.segments.evict_to(0)
    assert server.manager.segments.nbytes == 0
