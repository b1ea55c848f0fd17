"""`cpuft errors RUN`: the validation examples that the model of a run gets wrong. Imports no torch."""

from __future__ import annotations

import dataclasses

import click

from cpuft.cli.options import CONFIG_FILE, Verb, complete_runs, make_options
from cpuft.config.fields import option
from cpuft.errors import requires


@dataclasses.dataclass(frozen=True)
class ErrorsConfig:
    """What `cpuft errors` lists."""

    most: int = option(20, "Largest number of examples in each list", least=1)


@click.command(
    cls=Verb,
    params=[
        *make_options(ErrorsConfig),
        click.Option(["--json"], is_flag=True, help="Print the examples as one JSON object"),
        CONFIG_FILE,
        click.Argument(["run"], metavar="RUN", shell_complete=complete_runs),
    ],
)
def errors(run: str, most: int, json: bool, config: str) -> None:
    """List the validation examples that a run gets most wrong, and labels that may be wrong.

    RUN is the folder of a finished run. Of labels, first come the wrong predictions of which the model is most certain;
    of scores, the largest differences; of tags, the texts with the most wrong tags; of queries, those with the lowest
    metric. Pairs of equal or near-identical texts that have different labels follow, and other examples whose labels
    may be wrong, found by confident learning, the method of cleanlab. Texts are shown up to 500 characters.
    """
    from cpuft.serialization import format_json

    with requires("train", "the examples are read with NumPy and PyArrow"):
        from cpuft.judge.model_errors import format_errors, list_errors
        from cpuft.judge.predictions import read_predictions

    found = list_errors(run, read_predictions(run), most)
    click.echo(format_json(dataclasses.asdict(found)) if json else format_errors(found).rstrip("\n"))
