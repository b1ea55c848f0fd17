#!/usr/bin/env bash
set -euo pipefail
# ranks: 1 on node1, 1 on node2, 1 on node3, 1 on node4
# kept as you set them: FI_PROVIDER
# CPUFT_RUN_KEY: by it ranks know each other; made as they start, it is on no command line
# may be secret, so each rank gets it by a file of its own, over ssh: CPUFT_RUN_KEY
# 
# settings on every host:
#   MASTER_ADDR=10.0.0.1  the master's address: the interface of node1 that routes to 10.0.0.2
#   MASTER_PORT=40001  a port that is free on the master
#   CPUFT_WORLD_SIZE=4  ranks asked for: every rank checks that it finds as many
#   I_MPI_FABRICS=shm:ofi  shared memory inside a host, the network between hosts
#   CCL_ATL_SHM=1  shared memory inside a host, the network between hosts
#   FI_PROVIDER=efa  kept as you set it; cpuft would say tcp
#   CCL_ATL_TRANSPORT=ofi  oneCCL's own transport over libfabric, as in the recipe
#   CCL_PROCESS_LAUNCHER=none  the backend tells oneCCL its ranks
#   CCL_LOG_LEVEL=error  oneCCL's warnings would only repeat these settings
#   KMP_BLOCKTIME=1  idle OpenMP threads yield their core after 1 ms
#   KMP_AFFINITY=granularity=fine,compact,1,0  one OpenMP thread a core, none moves
#   TOKENIZERS_PARALLELISM=false  rows are tokenised before ranks start
#   CPUFT_RUN_DIR=/runs/one  what a script of yours writes there on the master, you get
# 
# settings on node1:
#   CPUFT_HOSTNAME=node1  every rank checks that it is where the plan put it
#   CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31  hardware threads of each rank of this host, in turn
#   OMP_NUM_THREADS=28  one OpenMP thread a core: a rank has 28 cores
#   I_MPI_PIN=off  mpirun does not pin here: cpuft.rank is the one owner
#   CPUFT_PIN=rank  cpuft.rank pins each rank to its CPUFT_CORES
#   CCL_WORKER_COUNT=4  4 of 32 cores a rank carry communication
#   CCL_WORKER_AFFINITY=0,1,2,3  oneCCL's workers on cores that compute leaves free
#   GLOO_SOCKET_IFNAME=ens5  the interface of node1 that routes to 10.0.0.2
#   FI_TCP_IFACE=ens5  the interface of node1 that routes to 10.0.0.2
#   CCL_KVS_IFACE=ens5  the interface of node1 that routes to 10.0.0.2
#   THP_MEM_ALLOC_ENABLE=1  huge pages for big tensors: the kernel copies them between ranks faster
#   LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so  tcmalloc and iomp5: found on this host
#   CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/0  each rank takes CPUFT_RUN_KEY from its file, which goes then
# 
# settings on node2:
#   CPUFT_HOSTNAME=node2  every rank checks that it is where the plan put it
#   CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31  hardware threads of each rank of this host, in turn
#   OMP_NUM_THREADS=28  one OpenMP thread a core: a rank has 28 cores
#   I_MPI_PIN=off  mpirun does not pin here: cpuft.rank is the one owner
#   CPUFT_PIN=rank  cpuft.rank pins each rank to its CPUFT_CORES
#   CCL_WORKER_COUNT=4  4 of 32 cores a rank carry communication
#   CCL_WORKER_AFFINITY=0,1,2,3  oneCCL's workers on cores that compute leaves free
#   GLOO_SOCKET_IFNAME=ens5  the interface of node2 that routes to 10.0.0.1
#   FI_TCP_IFACE=ens5  the interface of node2 that routes to 10.0.0.1
#   CCL_KVS_IFACE=ens5  the interface of node2 that routes to 10.0.0.1
#   THP_MEM_ALLOC_ENABLE=1  huge pages for big tensors: the kernel copies them between ranks faster
#   LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so  tcmalloc and iomp5: found on this host
#   CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/1  each rank takes CPUFT_RUN_KEY from its file, which goes then
# 
# settings on node3:
#   CPUFT_HOSTNAME=node3  every rank checks that it is where the plan put it
#   CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31  hardware threads of each rank of this host, in turn
#   OMP_NUM_THREADS=28  one OpenMP thread a core: a rank has 28 cores
#   I_MPI_PIN=off  mpirun does not pin here: cpuft.rank is the one owner
#   CPUFT_PIN=rank  cpuft.rank pins each rank to its CPUFT_CORES
#   CCL_WORKER_COUNT=4  4 of 32 cores a rank carry communication
#   CCL_WORKER_AFFINITY=0,1,2,3  oneCCL's workers on cores that compute leaves free
#   GLOO_SOCKET_IFNAME=ens5  the interface of node3 that routes to 10.0.0.1
#   FI_TCP_IFACE=ens5  the interface of node3 that routes to 10.0.0.1
#   CCL_KVS_IFACE=ens5  the interface of node3 that routes to 10.0.0.1
#   THP_MEM_ALLOC_ENABLE=1  huge pages for big tensors: the kernel copies them between ranks faster
#   LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so  tcmalloc and iomp5: found on this host
#   CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/2  each rank takes CPUFT_RUN_KEY from its file, which goes then
# 
# settings on node4:
#   CPUFT_HOSTNAME=node4  every rank checks that it is where the plan put it
#   CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31  hardware threads of each rank of this host, in turn
#   OMP_NUM_THREADS=28  one OpenMP thread a core: a rank has 28 cores
#   I_MPI_PIN=off  mpirun does not pin here: cpuft.rank is the one owner
#   CPUFT_PIN=rank  cpuft.rank pins each rank to its CPUFT_CORES
#   CCL_WORKER_COUNT=4  4 of 32 cores a rank carry communication
#   CCL_WORKER_AFFINITY=0,1,2,3  oneCCL's workers on cores that compute leaves free
#   GLOO_SOCKET_IFNAME=ens5  the interface of node4 that routes to 10.0.0.1
#   FI_TCP_IFACE=ens5  the interface of node4 that routes to 10.0.0.1
#   CCL_KVS_IFACE=ens5  the interface of node4 that routes to 10.0.0.1
#   THP_MEM_ALLOC_ENABLE=1  huge pages for big tensors: the kernel copies them between ranks faster
#   LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so  tcmalloc and iomp5: found on this host
#   CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/3  each rank takes CPUFT_RUN_KEY from its file, which goes then
echo 'cpuft: make the run'"'"'s directory' >&2
sh -c 'mkdir -p "$0" && { mkdir "$1" || { [ ! -d "$1" ] || echo "another run took $1" >&2; exit 1; }; } && mkdir "$1/logs"' /runs /runs/one </dev/null
echo 'cpuft: start 4 ranks with srun; output of rank N: /runs/one/logs/rank-N.out and .err' >&2
sh -c 'export CPUFT_RUN_KEY="$(od -vAn -N32 -tx1 /dev/urandom | tr -d " \n")"; exec "$@"' key mpirun \
    --quiet --mpi=pmi2 --kill-on-bad-exit=1 --wait=0 --export=ALL --input=none --overlap \
    --overcommit --cpu-bind=none --output=/runs/one/logs/rank-%t.out \
    --error=/runs/one/logs/rank-%t.err --nodes=4 --ntasks=4 --distribution=arbitrary \
    --nodelist=node1,node2,node3,node4 env MASTER_ADDR=10.0.0.1 MASTER_PORT=40001 CPUFT_WORLD_SIZE=4 I_MPI_FABRICS=shm:ofi CCL_ATL_SHM=1 FI_PROVIDER=efa CCL_ATL_TRANSPORT=ofi CCL_PROCESS_LAUNCHER=none CCL_LOG_LEVEL=error KMP_BLOCKTIME=1 KMP_AFFINITY=granularity=fine,compact,1,0 TOKENIZERS_PARALLELISM=false CPUFT_RUN_DIR=/runs/one sh \
    -c 'until [ "${1:?this host is in no plan}" = "@$SLURMD_NODENAME" ]; do shift; done; shift
while case $1 in @* | --) false ;; esac; do export "$1"; shift; done
until [ "$1" = -- ]; do shift; done; shift; exec "$@"
' pick @node1 CPUFT_HOSTNAME=node1 CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31 OMP_NUM_THREADS=28 I_MPI_PIN=off CPUFT_PIN=rank CCL_WORKER_COUNT=4 CCL_WORKER_AFFINITY=0,1,2,3 GLOO_SOCKET_IFNAME=ens5 FI_TCP_IFACE=ens5 CCL_KVS_IFACE=ens5 THP_MEM_ALLOC_ENABLE=1 LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/0 @node2 CPUFT_HOSTNAME=node2 CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31 OMP_NUM_THREADS=28 I_MPI_PIN=off CPUFT_PIN=rank CCL_WORKER_COUNT=4 CCL_WORKER_AFFINITY=0,1,2,3 GLOO_SOCKET_IFNAME=ens5 FI_TCP_IFACE=ens5 CCL_KVS_IFACE=ens5 THP_MEM_ALLOC_ENABLE=1 LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/1 @node3 CPUFT_HOSTNAME=node3 CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31 OMP_NUM_THREADS=28 I_MPI_PIN=off CPUFT_PIN=rank CCL_WORKER_COUNT=4 CCL_WORKER_AFFINITY=0,1,2,3 GLOO_SOCKET_IFNAME=ens5 FI_TCP_IFACE=ens5 CCL_KVS_IFACE=ens5 THP_MEM_ALLOC_ENABLE=1 LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/2 @node4 CPUFT_HOSTNAME=node4 CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31 OMP_NUM_THREADS=28 I_MPI_PIN=off CPUFT_PIN=rank CCL_WORKER_COUNT=4 CCL_WORKER_AFFINITY=0,1,2,3 GLOO_SOCKET_IFNAME=ens5 FI_TCP_IFACE=ens5 CCL_KVS_IFACE=ens5 THP_MEM_ALLOC_ENABLE=1 LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/3 \
    -- python -c 'import sys; sys.path[:] = filter(None, sys.path); from cpuft.words import run_module; run_module()' cpuft.rank python train.py </dev/null
