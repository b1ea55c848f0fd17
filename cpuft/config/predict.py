"""The options of `cpuft predict`."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import hosts_option, option
from cpuft.config.table_files import delimiter_option, encoding_option, quoting_option


@dataclass(frozen=True)
class PredictConfig:
    """What `cpuft predict` predicts, and where the predictions go."""

    run: str = option("", "Folder of the run")
    file: str = option(
        "",
        "Examples to predict: a CSV, TSV or JSON lines file, or a GLUE file of the run's task; with an embedding "
        "model, texts in any format that --train-file reads, also larger than memory; with a decoder, prompts in a "
        "column prompt or text, or conversations in JSON lines with messages",
        takes="FILE",
    )
    split: str = option(
        "",
        "Examples to predict instead of --file: the validation examples of the run, or the test examples of its GLUE "
        "task",
        choices=("validation", "test"),
    )
    output: str = option(
        "",
        "File to write, as CSV, TSV, JSON lines or Parquet by its ending: .csv, .tsv, .jsonl or .parquet (default: "
        "predictions.csv in RUN; for GLUE's test examples the file name that GLUE expects). With an embedding model, a "
        "file of embeddings that ends in .npy or .parquet (default: embeddings.npy in RUN)",
        takes="FILE",
    )
    text_columns: str = option(
        "",
        "Column of the texts in --file, or two columns separated by a comma (default: as in the run)",
        takes="NAMES",
    )
    label_column: str = option(
        "",
        "Column of the labels in --file, which are written beside the predictions, and with which the metrics are "
        "computed (default: as in the run, if the file has that column)",
        takes="NAME",
    )
    delimiter: str = delimiter_option()
    quoting: str = quoting_option()
    encoding: str = encoding_option()
    data_dir: str = option(
        "", "Folder of the GLUE data, with files such as MRPC/test.tsv (default: as in the run)", takes="FOLDER"
    )
    overwrite: bool = option(False, "Replace the --output file if it is there")
    model: str = option(
        "",
        "Embedding model, instead of RUN: the folder or the Hugging Face hub name of a model of sentence-transformers, "
        "or minilm",
        takes="NAME",
    )
    id_column: str = option(
        "",
        "Column of --file with an id of each example, which is written beside the prediction or, with an embedding "
        "model, into a Parquet file in place of the row's number; several rows may have the same id",
        takes="NAME",
    )
    normalize: bool = option(False, "Scale embeddings to length 1, if the model does not do so anyway")
    dimensions: int = option(
        0, "Cut embeddings to this number of dimensions, the first ones; 0 keeps those of the model", least=0
    )
    prompt: str = option(
        "",
        "Text that is put in front of each text to embed, such as 'query: ', or the name of a prompt of the model, "
        "such as query or document (default: none)",
        takes="NAME|TEXT",
    )
    np: int = hosts_option(
        1,
        "Number of processes that compute embeddings: ranks on all hosts together with --hostfile, --cluster or in a "
        "job on several hosts, else processes of this host, which share its cores",
        least=1,
    )
    threshold: str = option(
        "0.5",
        "With a run of several labels for each example, the probability above which a label is predicted; auto takes "
        "the number from 0 to 1 with the best f1_micro on the run's validation examples",
        takes="N|auto",
    )
    with_input: bool = option(False, "Also write the texts of each example, beside its prediction")
    max_new_tokens: int = option(
        256, "With a run of --task chat or --causal, largest number of tokens of an answer", least=1, most=1 << 20
    )
    temperature: float = option(
        0.0,
        "With a run of --task chat or --causal, temperature at which tokens are drawn, with the top-k and top-p of the "
        "model's generation_config.json; 0 always takes the most likely token",
        least=0.0,
        most=100.0,
    )
    batch_size: int = option(
        0,
        "Number of examples in one forward pass; 0 takes the run's --eval-batch-size, or for embeddings as many "
        "texts as have 1024 tokens together, 4096 in bf16",
        least=0,
    )
    precision: str = option(
        "auto",
        "Number format; auto is that of the run, or fp32 if it is int8; for embeddings, bf16 where the CPU "
        "multiplies it (on Arm, unless torch's fp32 is clearly faster), else fp32",
        choices=("auto", "bf16", "fp32"),
    )
