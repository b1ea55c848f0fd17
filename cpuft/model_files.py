"""Names of the files in a model's folder, beside its weights and its configuration."""

from __future__ import annotations

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
)
"""Files of a tokenizer: their content is part of the data's checksum, in this order, and `cpuft push` uploads them."""
POOLING_FOLDER, NORMALIZE_FOLDER = "1_Pooling", "2_Normalize"
SENTENCE_TRANSFORMERS_FILES = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    f"{POOLING_FOLDER}/config.json",
    f"{NORMALIZE_FOLDER}/config.json",
)
"""Files, in a model's folder, without which sentence-transformers makes other embeddings of the same weights."""
