"""Decoders of transformers: small configurations with random weights, by name."""

from __future__ import annotations

import torch

from tests.integrations.common import Client

MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 16}
# Multi-head latent attention: values are narrower than keys.
MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
TEXT = "TextConfig"

# The models that README names.
CLIENTS = {
    "llama": Client("Llama"),
    "qwen3": Client("Qwen3"),
    "mistral": Client("Mistral", {"sliding_window": 7}),
    "gemma2": Client("Gemma2", {"sliding_window": 7, "attn_logit_softcapping": 2.0}),
    "gemma3": Client(
        "Gemma3",
        {
            "sliding_window": 7,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        config=TEXT,
    ),
    "gpt-oss": Client("GptOss", {**MOE, "sliding_window": 7}),
    "llama4": Client(
        "Llama4",
        {
            **MOE,
            "intermediate_size_mlp": 32,
            "attention_chunk_size": 9,
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": False,
        },
        config=TEXT,
    ),
    "mixtral": Client("Mixtral", {**MOE, "sliding_window": None}),
    "qwen3-moe": Client("Qwen3Moe", {**MOE, "decoder_sparse_step": 1}),
    "phi3": Client("Phi3", {"sliding_window": None}),
    "gpt2": Client("GPT2", {"n_inner": 48}, head="LMHeadModel"),
    "deepseek-v3": Client(
        "DeepseekV3",
        {**MLA, **MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
}

# Models that the integration was not developed with.
STRANGERS = {
    "qwen2": Client("Qwen2"),
    "qwen2-moe": Client("Qwen2Moe", MOE),
    "olmo2": Client("Olmo2"),
    "olmo3": Client("Olmo3", {"sliding_window": 7}),
    "olmoe": Client("Olmoe", MOE),
    "cohere": Client("Cohere"),
    "cohere2": Client("Cohere2", {"sliding_window": 7, "num_hidden_layers": 4}),
    "granite": Client("Granite", {"attention_multiplier": 0.3}),
    "granite-moe": Client("GraniteMoe", MOE),
    "starcoder2": Client("Starcoder2", {"sliding_window": 7}),
    "gpt-neox": Client("GPTNeoX"),
    "phi": Client("Phi"),
    "glm": Client("Glm"),
    "glm4": Client("Glm4"),
    "smollm3": Client("SmolLM3"),
    "gemma": Client("Gemma"),
    "ministral": Client("Ministral", {"sliding_window": 7}),
    "exaone4": Client(
        "Exaone4",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "hunyuan": Client("HunYuanDenseV1"),
    "stablelm": Client("StableLm"),
    "nemotron": Client("Nemotron"),
    "persimmon": Client("Persimmon"),
    "helium": Client("Helium"),
    "ernie4-5": Client("Ernie4_5"),
    "arcee": Client("Arcee"),
    "seed-oss": Client("SeedOss"),
    "apertus": Client("Apertus"),
    "bitnet": Client("BitNet"),
    "qwen2-windows": Client(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "deepseek-v2": Client(
        "DeepseekV2",
        {**MLA, **MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
        | {"n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "minimax-m2": Client("MiniMaxM2", MOE),
    "olmo": Client("Olmo"),
    "gpt-bigcode": Client("GPTBigCode"),
    "jais2": Client("Jais2"),
    "granite-moe-shared": Client("GraniteMoeShared", MOE),
    "modernbert-decoder": Client("ModernBertDecoder", {"local_attention": 14}),
    "qwen3.5-moe": Client("Qwen3_5Moe", MOE, config="TextConfig"),
    "ernie4-5-moe": Client("Ernie4_5_Moe", MOE),
    "exaone-moe": Client("ExaoneMoe", MOE),
    "hunyuan-moe": Client("HunYuanMoEV1", MOE),
    "flex-olmo": Client("FlexOlmo", MOE),
    "solar-open": Client("SolarOpen", MOE),
    "cohere2-moe": Client("Cohere2Moe", MOE),
    "mimo-v2-flash": Client("MiMoV2Flash", MOE),
    "glm4-moe": Client("Glm4Moe", {**MOE, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "dots1": Client(
        "Dots1", {**MOE, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
    ),
    "phimoe": Client("Phimoe", MOE),
    "diffllama": Client("DiffLlama"),
    "nanochat": Client("NanoChat"),
    "vaultgemma": Client("VaultGemma", {"sliding_window": 7}),
    "afmoe": Client("Afmoe", {**MOE, "num_dense_layers": 1, "sliding_window": 7}),
    "hy-v3": Client("HYV3", MOE),
    "youtu": Client("Youtu", MLA),
    "jetmoe": Client("JetMoe", MOE),
    "cwm": Client("Cwm", {"sliding_window": 7}),
    "gpt-neo": Client(
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
        | {"window_size": 7},
    ),
    "gpt-neo-global": Client(
        "GPTNeo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
    ),
    "gptj": Client("GPTJ", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "codegen": Client("CodeGen", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "opt": Client("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "xglm": Client(
        "XGLM",
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
        dtype=torch.float32,
    ),
    "biogpt": Client("BioGpt"),
    "bloom": Client("Bloom", {"n_layer": 2, "n_head": 4}),
    "mpt": Client("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "falcon": Client(
        "Falcon", {"new_decoder_architecture": False, "multi_query": True}, without=("head_dim",)
    ),
    "falcon-alibi": Client("Falcon", {"alibi": True}, without=("head_dim",)),
    "ctrl": Client(
        "CTRL", {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48}, head="LMHeadModel"
    ),
    "openai": Client("OpenAIGPT", {"n_embd": 32, "n_layer": 2, "n_head": 4}, head="LMHeadModel"),
    "mamba": Client("Mamba", {"state_size": 8, "expand": 2}),
    "jamba": Client(
        "Jamba",
        {**MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
        | {"mamba_d_state": 8},
        dtype=torch.float32,
    ),
    "lfm2": Client("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "recurrent-gemma": Client("RecurrentGemma", {"num_hidden_layers": 3, "lru_width": 32}),
    "rwkv": Client("Rwkv", {"attention_hidden_size": 32}),
    "gemma3n": Client(
        "Gemma3n",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 7,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 61,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 4,
        },
        config=TEXT,
    ),
    "gemma4": Client(
        "Gemma4",
        {"sliding_window": 7, "global_head_dim": 16, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 61, "num_hidden_layers": 3}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        config=TEXT,
    ),
    "doge": Client("Doge", {"keep_window_size": 7}),
    "doge-whole": Client("Doge", {"keep_window_size": 64}),
    "moshi": Client("Moshi", {"ffn_dim": 48, "sliding_window": 7}),
    "mixtral-router-loss": Client("Mixtral", {**MOE, "output_router_logits": True}),
    "jetmoe-router-loss": Client("JetMoe", {**MOE, "output_router_logits": True}),
    "minimax-m3": Client(
        "MiniMaxM3VL",
        {**MOE, "index_block_size": 2, "index_topk_blocks": 2}
        | {"layer_types": ["full_attention", "minimax_m3_sparse"]},
        config=TEXT,
    ),
    "classifier": Client("Llama", head="ForSequenceClassification"),
    "llama4-temperature": Client(
        "Llama4",
        {**CLIENTS["llama4"].options, "attn_temperature_tuning": True, "floor_scale": 5},
        # Temperatures are float32: a logarithm's last bit depends on where in a vector it is.
        wide_tolerance=1e-6,
        config=TEXT,
    ),
    "ministral3": Client(
        "Ministral3",
        {"sliding_window": None}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.3,
                "max_position_embeddings": 8,
            }
        },
    ),
}
_ROPE = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
for kind, more in {
    "linear": {},
    "yarn": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "dynamic": {},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]},
}.items():
    STRANGERS[f"llama-{kind}"] = Client(
        "Llama",
        {
            "rope_parameters": {"rope_type": kind, **_ROPE, **more},
            "max_position_embeddings": 16 if kind == "dynamic" else 64,
        },
    )

#: Refused options of families that equal one process, and a pattern of each refusal's message.
OPTIONS = {
    "mixtral-router-loss": r"MixtralForCausalLM has config\.output_router_logits=True",
    "jetmoe-router-loss": r"JetMoeForCausalLM has config\.output_router_logits=True",
    "classifier": "has type LlamaForSequenceClassification: it reads the first or last position",
}
#: Families that differ: without `AttentionInterface`, with other recurrent or sparse layers.
OTHERS = (
    *("bloom", "mpt", "falcon", "falcon-alibi", "gpt-neo", "gpt-neo-global", "openai", "xglm"),
    *("rwkv", "mamba", "jamba", "recurrent-gemma", "lfm2", "doge", "doge-whole", "minimax-m3"),
)
REFUSED = {**dict.fromkeys(OTHERS, r"has config\.model_type='[\w-]+': it is not among"), **OPTIONS}
