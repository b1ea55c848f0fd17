"""How files of tables are read, as options that several commands have, and in which formats they are written."""

from __future__ import annotations

from functools import partial

from cpuft.config.fields import data_option

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
"""The values of --delimiter, apart from auto, and the characters that they stand for."""
QUOTINGS = ("auto", "csv", "none")
OUTPUT_ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
"""Endings of the names of tables that are written, which tell their formats."""


delimiter_option = partial(
    data_option,
    "auto",
    "Character between the columns of CSV and TSV files; auto is found in the header line of each file",
    rare=True,
    choices=("auto", *DELIMITERS),
)
quoting_option = partial(
    data_option,
    "auto",
    "Whether quotation marks surround cells of CSV and TSV files (csv), or are a part of the texts, as in GLUE's "
    "files (none); auto is none if a file can only be read so, and refuses a file that is in doubt",
    rare=True,
    choices=QUOTINGS,
)
encoding_option = partial(
    data_option,
    "auto",
    "Encoding of files of texts, such as windows-1252 or shift_jis; auto is UTF-8, and UTF-16 for a file that begins "
    "with its byte order mark",
    rare=True,
    takes="NAME",
)
