"""A laptop that rents a cluster and is gone: `python -m ... SECONDS OPTION...`, its clock so many seconds ahead."""

from __future__ import annotations

import os
import sys
import time

from cpuft.config import parse_arguments
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.provider import Aws, Edge
from tests.provision.aws.region import refuse


def main(ahead: float, words: list[str]) -> None:
    """Rent; log in nowhere."""
    edge = Edge(now=lambda: time.time() + ahead, logs_in=False)
    Aws(parse_arguments(AwsConfig, words), os.environ, edge=edge).make(print, refuse)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
