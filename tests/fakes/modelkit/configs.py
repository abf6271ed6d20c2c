"""The four model configurations, as stock reads them from config.json."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from .tokenizer import END, STOP, VOCAB_SIZE

CONTEXT = 32768


def _ids(tokenizer: Tokenizer) -> dict[str, Any]:
    end, stop = tokenizer.token_to_id(END), tokenizer.token_to_id(STOP)
    return {"eos_token_id": [end, stop], "pad_token_id": stop}


def dense_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """A gemma4 whose layers all attend to everything; its vision tower is minimal."""
    layers = 4
    text = {
        "model_type": "gemma4_text",
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention"] * layers,
        "rope_parameters": {
            # Only the four fastest pairs turn: near positions are told apart and
            # what is matched by content stays the same at any distance.
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
    }
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "patch_size": 16,
        "position_embedding_size": 64,
        "default_output_length": 16,
    }
    picture = tokenizer.token_to_id("<|image_pad|>")
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "audio_config": None,
        "hidden_size": 128,
        "vocab_size": VOCAB_SIZE,
        "image_token_id": picture,
        "audio_token_id": VOCAB_SIZE + 1,
        "boi_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "eoi_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "boa_token_id": VOCAB_SIZE + 2,
        "eoa_token_id": VOCAB_SIZE + 3,
        "vision_soft_tokens_per_image": 16,
        "tie_word_embeddings": True,
        **_ids(tokenizer),
    }


def hybrid_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """A qwen3_5_text: gated delta layers, every second layer full attention."""
    return {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [2, 1, 1],
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        **_ids(tokenizer),
    }


def window_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """A gemma3_text: windows of 64 tokens, every fourth layer global."""
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "rope_global_base_freq": 10000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 64,
        "sliding_window_pattern": 4,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        **_ids(tokenizer),
    }


def vlm_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """A qwen3_vl with a vision tower of two blocks and pictures of a few tokens."""
    text = {
        "model_type": "qwen3_vl_text",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "rope_scaling": {
            "type": "default",
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
    }
    vision = {
        "model_type": "qwen3_vl",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "out_hidden_size": 128,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    return {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "vocab_size": VOCAB_SIZE,
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "tie_word_embeddings": True,
        **_ids(tokenizer),
    }


CONFIGS = {
    "dense": dense_config,
    "hybrid": hybrid_config,
    "window": window_config,
    "vlm": vlm_config,
}
NAMES: list[str] = list(CONFIGS)

#: How stock's processors cut pictures; models without one need no file.
PROCESSORS: dict[str, dict[str, Any]] = {
    "dense": {
        "processor_class": "Gemma4Processor",
        "image_processor": {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 16,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
        },
    },
    "vlm": {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 1024, "longest_edge": 36864},
        },
    },
}
