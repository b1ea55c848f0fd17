"""A laptop that rents a cluster and is switched off: `python -m ... SECONDS OPTION...` with a clock SECONDS ahead."""

from __future__ import annotations

import os
import sys
import time

from cpuft.config.fields import parse_arguments
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.aws.provider import Aws, Services
from tests.provision.aws.region import refuse


def main(ahead: float, words: list[str]) -> None:
    """Rent without logging in."""
    services = Services(now=lambda: time.time() + ahead, uses_ssh=False)
    Aws(parse_arguments(AwsConfig, words), os.environ, services=services).make(print, refuse)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
