#!/usr/bin/env bash
set -euo pipefail
echo 'cpuft: start' >&2
(
# options with which mpirun's ssh reaches the other hosts
export OMPI_MCA_plm_rsh_args='-F /etc/ssh_config'
# you are root on the head host
export OMPI_ALLOW_RUN_AS_ROOT=1
# Open MPI requires both variables
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpirun -x CPUFT_RUN_KEY --bind-to none --map-by slot --oversubscribe --output-filename /run/logs \
    --mca oob_tcp_if_include ens5 --mca btl_tcp_if_include ens5 --host node1:2 -np 2 env MASTER_ADDR=10.0.0.1 OMP_NUM_THREADS=16 'X=a b' python train.py \
    --lr 1 : --host node2:1 -np 1 env MASTER_ADDR=10.0.0.1 OMP_NUM_THREADS=32 python train.py --lr 1 </dev/null
)
