"""The families of transformers whose results and gradients over several ranks are those of one.

`FAMILIES` has their names, `config.model_type`, and those of their parts. All others are refused by
name before the first op. tests/integrations/test_families.py compares each with one process and
writes FAMILIES.md.
"""

from __future__ import annotations

#: Add the name of a family of your own once you have compared it with one process.
FAMILIES: set[str] = set(
    """
    afmoe albert apertus arcee bailing_hybrid bamba bart bert biogpt bitnet codegen cohere
    cohere2 ctrl cwm deepseek_v2 deepseek_v3 diffllama distilbert dots1 electra ernie4_5
    exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4_text glm glm4
    glm4_moe gpt2 gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium
    hunyuan_v1_dense hy_v3 jetmoe kimi_linear llama llama4_text llava mamba2 marian mbart
    minimax_m2 ministral ministral3 mistral mixtral modernbert moshi mt5 nanochat nemotron
    nemotron_h olmo2 olmo3 olmo_hybrid olmoe opt pegasus persimmon phi phi3 phimoe qwen2
    qwen2_5_vl qwen2_5_vl_text qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5 qwen3_5_text
    qwen3_moe qwen3_next qwen3_vl qwen3_vl_text roberta seed_oss smollm3 stablelm starcoder2
    t5 umt5 vaultgemma whisper xlm-roberta youtu zamba2
    """.split()
)
