#!/usr/bin/env bash
set -euo pipefail
echo 'cpuft: start' >&2
mpirun --quiet --mpi=pmi2 --kill-on-bad-exit=1 --wait=0 --export=ALL --input=none --overlap \
    --overcommit --cpu-bind=none --output=/run/logs/rank-%t.out --error=/run/logs/rank-%t.err \
    --nodes=2 --ntasks=3 --distribution=arbitrary --nodelist=node1,node1,node2 env MASTER_ADDR=10.0.0.1 sh \
    -c 'until [ "${1:?this host is not in the plan}" = "@$SLURMD_NODENAME" ]; do shift; done; shift
while case $1 in @* | --) false ;; esac; do export "$1"; shift; done
until [ "$1" = -- ]; do shift; done; shift; exec "$@"
' select_host @node1 OMP_NUM_THREADS=16 'X=a b' @node2 OMP_NUM_THREADS=32 \
    -- python train.py --lr 1 </dev/null
