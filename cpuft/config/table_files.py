"""How files of tables are read, as options that several commands have, and in which formats they are written."""

from __future__ import annotations

from typing import Any, Protocol

from cpuft.config.fields import option

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
"""The values of --delimiter, apart from auto, and the characters that they stand for."""
QUOTINGS = ("auto", "csv", "none")
OUTPUT_ENDINGS = (".csv", ".tsv", ".jsonl", ".parquet")
"""Endings of the names of tables that are written, which tell their formats."""


def delimiter_option(section: str = "") -> Any:
    """Return the field of --delimiter."""
    text = "Character between the columns of CSV and TSV files; auto is found in the header line of each file"
    return option("auto", text, section=section, rare=True, choices=("auto", *DELIMITERS))


def quoting_option(section: str = "") -> Any:
    """Return the field of --quoting."""
    text = (
        "Whether quotation marks surround cells of CSV and TSV files (csv), or are a part of the texts, as in GLUE's "
        "files (none); auto is none if a file can only be read so, and refuses a file that is in doubt"
    )
    return option("auto", text, section=section, rare=True, choices=QUOTINGS)


def encoding_option(section: str = "") -> Any:
    """Return the field of --encoding."""
    text = (
        "Encoding of files of texts, such as windows-1252 or shift_jis; auto is UTF-8, and UTF-16 for a file that "
        "begins with its byte order mark"
    )
    return option("auto", text, section=section, rare=True, takes="NAME")


class TableOptions(Protocol):
    """Options with --delimiter, --quoting and --encoding."""

    @property
    def delimiter(self) -> str:
        """auto, or one of DELIMITERS."""

    @property
    def quoting(self) -> str:
        """One of QUOTINGS."""

    @property
    def encoding(self) -> str:
        """auto, or the name of an encoding."""
