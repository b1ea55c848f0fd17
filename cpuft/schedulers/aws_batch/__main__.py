"""`python -m cpuft.schedulers.aws_batch FOLDER COMMAND...`: what every node of the job starts."""

import os
import sys

from cpuft.schedulers.aws_batch.nodes import run_node

if __name__ == "__main__":
    sys.exit(run_node(sys.argv[1:], os.environ))
