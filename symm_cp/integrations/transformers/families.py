"""The families of transformers whose results and gradients over several ranks are those of one.

`FAMILIES` has their names, `config.model_type`, and those of their parts. All others are refused by
name before the first op. tests/integrations/test_families.py compares each with one process and
writes FAMILIES.md.
"""

from __future__ import annotations

#: Add the name of a family of your own once you have compared it with one process.
FAMILIES = {
    # Decoders.
    *("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mistral", "ministral", "ministral3"),
    *("mixtral", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "vaultgemma"),
    *("phi", "phi3", "phimoe", "gpt2", "gpt_oss", "gpt_neox", "gptj", "codegen", "opt", "biogpt"),
    *("ctrl", "deepseek_v2", "deepseek_v3", "olmo2", "olmo3", "olmoe", "smollm3", "granite"),
    *("granitemoe", "llama4_text", "cohere", "cohere2", "starcoder2", "glm", "glm4", "glm4_moe"),
    *("exaone4", "hunyuan_v1_dense", "hy_v3", "stablelm", "nemotron", "persimmon", "helium"),
    *("ernie4_5", "arcee", "afmoe", "seed_oss", "apertus", "bitnet", "minimax_m2", "dots1"),
    *("diffllama", "nanochat", "youtu", "jetmoe", "cwm", "moshi", "gpt_bigcode", "jais2"),
    *("granitemoeshared", "modernbert-decoder", "ernie4_5_moe", "exaone_moe", "hunyuan_v1_moe"),
    *("flex_olmo", "solar_open", "cohere2_moe", "mimo_v2_flash", "olmo"),
    # Decoders with gated delta nets or Mamba 2.
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "mamba2"),
    *("bamba", "falcon_h1", "granitemoehybrid", "zamba2", "nemotron_h", "qwen3_5_moe_text"),
    # Encoders; encoders with decoders.
    *("bert", "modernbert", "roberta", "xlm-roberta", "distilbert", "electra", "albert", "t5"),
    *("mt5", "umt5", "bart", "mbart", "marian", "pegasus", "whisper", "camembert", "ernie"),
    # Language and pictures, and their language models.
    *("llava", "gemma3", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
    *("qwen3_vl", "qwen3_vl_text", "qwen3_5", "mistral3"),
}
