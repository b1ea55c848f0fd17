"""The options of `cpuft export`."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import option

EXPORT_FORMATS = ("onnx", "openvino")


@dataclass(frozen=True)
class ExportConfig:
    """What `cpuft export` exports, in which format, and where to."""

    run: str = option("", "Folder of the run")
    format: str = option(
        "onnx",
        "Format of the exported model: onnx for ONNX Runtime and others, or openvino for OpenVINO",
        choices=EXPORT_FORMATS,
    )
    precision: str = option(
        "fp32",
        "Number format of the weights: int8 makes the files smaller and the model faster on most CPUs, but may lose "
        "accuracy; --validate measures how much",
        choices=("fp32", "int8"),
    )
    validate: bool = option(
        False, "Compare metrics and speed of the exported model with those of the run, on the run's validation examples"
    )
    output: str = option(
        "",
        "Folder to make for the exported model (default: in RUN, named after format and precision, such as onnx-int8)",
        takes="FOLDER",
    )
    data_dir: str = option(
        "",
        "Folder of the GLUE data that --validate reads, with files such as MRPC/dev.tsv (default: as in the run)",
        takes="FOLDER",
    )
    batch_size: int = option(
        0, "Number of examples in one forward pass of --validate; 0 takes the run's --eval-batch-size", least=0
    )
