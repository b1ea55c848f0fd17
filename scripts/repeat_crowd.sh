#!/bin/sh
# The concurrency test, 50 fresh starts a backend: what goes wrong between threads goes wrong now and then.
set -eu
cd "$(dirname "$0")/.."
for backend in ${BACKENDS:-ccl mpi gloo}; do
    for round in $(seq "${ROUNDS:-50}"); do
        python -c "
import sys
from tests.comm.ranks import mpirun
run = mpirun(2, 'crowd', '$backend', '2', seconds=60)
sys.exit(0 if run.returncode == 0 and run.stdout.count('all right') == 2 else run.stdout)" ||
            { echo "$backend failed in round $round"; exit 1; }
    done
    echo "$backend: ${ROUNDS:-50} of ${ROUNDS:-50} rounds"
done
