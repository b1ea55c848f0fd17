#!/usr/bin/env bash
set -euo pipefail
echo 'cpuft: start' >&2
(
# options with which mpirun's ssh reaches the other hosts
export I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS='-F /etc/ssh_config'
mpirun -iface ens5 -silent-abort -outfile-pattern /run/logs/rank-%r.out -errfile-pattern /run/logs/rank-%r.err \
    -genv MASTER_ADDR 10.0.0.1 -host node1 -n 2 -env OMP_NUM_THREADS 16 -env X 'a b' python train.py \
    --lr 1 : -host node2 -n 1 -env OMP_NUM_THREADS 32 python train.py --lr 1 </dev/null
)
