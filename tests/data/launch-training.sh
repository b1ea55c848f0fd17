#!/usr/bin/env bash
set -euo pipefail
# ranks: 2 on node1
# CPUFT_RUN_KEY: secret by which ranks recognize each other; made at the start, on no command line
# 
# settings on every host:
#   MASTER_ADDR=127.0.0.1  address of the head host: all ranks are on one host
#   MASTER_PORT=40001  a free port on the head host
#   CPUFT_WORLD_SIZE=2  number of ranks; every rank checks that it finds as many
#   CPUFT_VERSION=0.1.0  every rank checks that its host has this version of cpuft
#   I_MPI_FABRICS=shm  one host: ranks communicate through shared memory
#   CCL_ATL_SHM=1  one host: ranks communicate through shared memory
#   FI_PROVIDER=tcp  works on every network; set it to efa, verbs or psm3 if the hosts support that
#   CCL_ATL_TRANSPORT=ofi  oneCCL communicates over libfabric by itself, not over MPI
#   CCL_PROCESS_LAUNCHER=hydra  oneCCL reads the rank numbers that mpirun provides
#   CCL_LOG_LEVEL=error  no warnings of oneCCL, which would only repeat these settings
#   KMP_BLOCKTIME=1  idle OpenMP threads release their core after 1 ms
#   KMP_AFFINITY=granularity=fine,compact,1,0  one OpenMP thread per core, and threads do not migrate
#   TOKENIZERS_PARALLELISM=false  examples are tokenized before the ranks start
#   CPUFT_RUN_DIR=/runs/one  the run folder; files that a script writes there are fetched
# 
# settings on node1:
#   CPUFT_HOSTNAME=node1  every rank checks that it runs on the planned host
#   CPUFT_CORES=2,3,4,5,6,7,8,9,10,11,12,13,14,15;18,19,20,21,22,23,24,25,26,27,28,29,30,31  hardware threads of each rank on this host, in the order of local ranks
#   OMP_NUM_THREADS=14  one OpenMP thread per core: a rank has 14 cores
#   I_MPI_PIN_DOMAIN=[0xfffc,0xfffc0000]  each rank runs on cores of its own, without those of communication workers
#   CCL_WORKER_COUNT=2  2 of 16 cores per rank carry communication
#   CCL_WORKER_AFFINITY=0,1,16,17  oneCCL's workers run on cores without compute threads
#   GLOO_SOCKET_IFNAME=lo  all ranks are on one host
#   FI_TCP_IFACE=lo  all ranks are on one host
#   CCL_KVS_IFACE=lo  all ranks are on one host
#   THP_MEM_ALLOC_ENABLE=1  huge pages for large tensors, which the kernel copies faster between ranks
#   LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so  tcmalloc and iomp5: found on this host
echo 'cpuft: make the run folder' >&2
sh -c 'mkdir -p "$0" && { mkdir "$1" || { [ ! -d "$1" ] || echo "another run took $1" >&2; exit 1; }; } && mkdir "$1/logs"' /runs /runs/one </dev/null
echo 'cpuft: check and tokenize the examples once, before any rank starts' >&2
python -c 'import sys; sys.path[:] = filter(None, sys.path); from cpuft.argv import run_module; run_module()' cpuft.train.data.prepare /runs/one/data.npz \
    --task=mrpc --learning-rate=2e-05 </dev/null
echo 'cpuft: start 2 ranks with intel'"'"'s mpirun; output of rank N: /runs/one/logs/rank-N.out and .err' >&2
sh -c 'export CPUFT_RUN_KEY="$(od -vAn -N32 -tx1 /dev/urandom | tr -d " \n")"; exec "$@"' key mpirun \
    -iface lo -silent-abort -outfile-pattern /runs/one/logs/rank-%r.out -errfile-pattern /runs/one/logs/rank-%r.err \
    -genv MASTER_ADDR 127.0.0.1 -genv MASTER_PORT 40001 -genv CPUFT_WORLD_SIZE 2 -genv CPUFT_VERSION 0.1.0 \
    -genv I_MPI_FABRICS shm -genv CCL_ATL_SHM 1 -genv FI_PROVIDER tcp -genv CCL_ATL_TRANSPORT ofi \
    -genv CCL_PROCESS_LAUNCHER hydra -genv CCL_LOG_LEVEL error -genv KMP_BLOCKTIME 1 -genv KMP_AFFINITY granularity=fine,compact,1,0 \
    -genv TOKENIZERS_PARALLELISM false -genv CPUFT_RUN_DIR /runs/one -host node1 -n 2 -env CPUFT_HOSTNAME node1 \
    -env CPUFT_CORES '2,3,4,5,6,7,8,9,10,11,12,13,14,15;18,19,20,21,22,23,24,25,26,27,28,29,30,31' \
    -env OMP_NUM_THREADS 14 -env I_MPI_PIN_DOMAIN '[0xfffc,0xfffc0000]' -env CCL_WORKER_COUNT 2 -env CCL_WORKER_AFFINITY 0,1,16,17 \
    -env GLOO_SOCKET_IFNAME lo -env FI_TCP_IFACE lo -env CCL_KVS_IFACE lo -env THP_MEM_ALLOC_ENABLE 1 \
    -env LD_PRELOAD /usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so python -c 'import sys; sys.path[:] = filter(None, sys.path); from cpuft.argv import run_module; run_module()' cpuft.rank \
    -m cpuft.train --task=mrpc --learning-rate=2e-05 --run-dir=/runs/one \
    --prepared=/runs/one/data.npz </dev/null
