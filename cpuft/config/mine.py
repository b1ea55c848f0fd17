"""The options of `cpuft mine`."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import option
from cpuft.config.table_files import delimiter_option, encoding_option, quoting_option


@dataclass(frozen=True)
class MineConfig:
    """Where `cpuft mine` searches hard negatives, and which ones it takes."""

    model: str = option(
        "",
        "Embedding model (required) that compares anchors and documents: the folder of a run, the folder or the "
        "Hugging Face hub name of a model of sentence-transformers, or minilm",
        takes="NAME",
    )
    file: str = option(
        "",
        "Data (required): rows of an anchor and a positive, in any format that --train-file of --task pairs reads",
        takes="FILE",
    )
    output: str = option(
        "",
        "File to write (required) with the columns anchor, positive, negative_1, negative_2 and so on; it ends in "
        ".csv, .tsv, .jsonl or .parquet",
        takes="FILE",
    )
    text_columns: str = option(
        "",
        "Columns of anchor and positive in --file, with a comma between them (default: anchor,positive or another "
        "usual pair)",
        takes="NAMES",
    )
    corpus: str = option(
        "", "More documents among which negatives are searched, beside the positives of --file", takes="FILE"
    )
    corpus_column: str = option(
        "",
        "Column of the documents in --corpus (default: the only column, or text or another usual name)",
        takes="NAME",
    )
    delimiter: str = delimiter_option()
    quoting: str = quoting_option()
    encoding: str = encoding_option()
    overwrite: bool = option(False, "Replace the --output file if it is there")
    negatives: int = option(3, "Number of negatives for each anchor; anchors with fewer are left out", least=1)
    skip_top: int = option(
        0,
        "Number of the most similar documents that are skipped, because they may be positives without a label; "
        "documents that the limits below leave out do not count",
        least=0,
    )
    search_depth: int = option(
        0, "Take negatives only from this number of documents that are most similar to the anchor; 0: from all", least=0
    )
    max_score: float = option(1.0, "Highest cosine of an anchor and its negative; 1 is no limit", least=-1.0, most=1.0)
    min_score: float = option(-1.0, "Lowest cosine of an anchor and its negative; -1 is no limit", least=-1.0, most=1.0)
    absolute_margin: float = option(
        -1.0,
        "How far the cosine of a negative must be below that of the anchor's least similar positive, such as 0.1 "
        "(default: no limit)",
        least=-1.0,
    )
    relative_margin: float = option(
        -1.0,
        "The same as a share of the positive's cosine: 0.05 takes negatives of up to 95 % of it (default: no limit)",
        least=-1.0,
    )
    batch_size: int = option(
        0, "Number of texts in one forward pass; 0 takes as many as have 1024 tokens together, 4096 in bf16", least=0
    )
    precision: str = option(
        "auto",
        "Number format; auto is bf16 where the CPU multiplies it (on Arm, unless torch's fp32 is clearly faster), "
        "else fp32",
        choices=("auto", "bf16", "fp32"),
    )
    np: int = option(1, "Number of processes of this host that compute embeddings; they share its cores", least=1)
