"""What `cpuft predict` can be asked."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.options.fields import option


@dataclass(frozen=True)
class PredictConfig:
    """Rows for the model of a run, and what becomes of the answers."""

    run: str = option("", "directory of the run")
    file: str = option("", "rows of your own: CSV, TSV or JSON lines", takes="FILE")
    split: str = option("", "the run's validation rows, or GLUE's test rows", takes="validation|test")
    output: str = option("", "(default: predictions.csv in RUN; of GLUE's test rows its own name)", takes="FILE")
    text_columns: str = option("", "one or two (default: the run's)")
    label_column: str = option("", "measured by these labels, if the file has them (default: the run's)")
    data_dir: str = option("", "holds TASK/test.tsv (default: the run's)", takes="FOLDER")
    overwrite: bool = option(False, "replace predictions that an earlier call has written")
    with_input: bool = option(False, "write each row's texts beside its predictions")
    batch_size: int = option(0, "rows at once (default: the run's in evaluation)", least=0)
    precision: str = option("auto", "auto: the run's", choices=("auto", "bf16", "fp32"))
