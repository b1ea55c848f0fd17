"""`python -m cpuft.provision.batch FOLDER COMMAND...`: what every node of the job starts."""

import os
import sys

from cpuft.provision.batch.nodes import run_node

if __name__ == "__main__":
    sys.exit(run_node(sys.argv[1:], os.environ))
