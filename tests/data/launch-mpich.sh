#!/usr/bin/env bash
set -euo pipefail
# ranks: 1 on node1, 1 on node2, 1 on node3, 1 on node4
# variables kept as you set them: FI_PROVIDER
# CPUFT_RUN_KEY: secret by which ranks recognize each other; made at the start, on no command line
# may be secret, so each rank gets them in a file of its own, over ssh: CPUFT_RUN_KEY
# 
# settings on every host:
#   MASTER_ADDR=10.0.0.1  address of the head host: the interface of node1 that routes to 10.0.0.2
#   MASTER_PORT=40001  a free port on the head host
#   CPUFT_WORLD_SIZE=4  number of ranks; every rank checks that it finds as many
#   CPUFT_VERSION=0.1.0  every rank checks that its host has this version of cpuft
#   I_MPI_FABRICS=shm:ofi  shared memory within a host, the network between hosts
#   CCL_ATL_SHM=1  shared memory within a host, the network between hosts
#   FI_PROVIDER=efa  kept as you set it; cpuft would set tcp
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
#   CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31  hardware threads of each rank on this host, in the order of local ranks
#   OMP_NUM_THREADS=28  one OpenMP thread per core: a rank has 28 cores
#   I_MPI_PIN=off  mpirun does not pin ranks here, because cpuft.rank does
#   CPUFT_PIN=rank  cpuft.rank pins each rank to its CPUFT_CORES
#   CCL_WORKER_COUNT=4  4 of 32 cores per rank carry communication
#   CCL_WORKER_AFFINITY=0,1,2,3  oneCCL's workers run on cores without compute threads
#   GLOO_SOCKET_IFNAME=ens5  the interface of node1 that routes to 10.0.0.2
#   FI_TCP_IFACE=ens5  the interface of node1 that routes to 10.0.0.2
#   CCL_KVS_IFACE=ens5  the interface of node1 that routes to 10.0.0.2
#   THP_MEM_ALLOC_ENABLE=1  huge pages for large tensors, which the kernel copies faster between ranks
#   LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so  tcmalloc and iomp5: found on this host
#   CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/0  each rank reads CPUFT_RUN_KEY from its file and removes the file
# 
# settings on node2:
#   CPUFT_HOSTNAME=node2  every rank checks that it runs on the planned host
#   CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31  hardware threads of each rank on this host, in the order of local ranks
#   OMP_NUM_THREADS=28  one OpenMP thread per core: a rank has 28 cores
#   I_MPI_PIN=off  mpirun does not pin ranks here, because cpuft.rank does
#   CPUFT_PIN=rank  cpuft.rank pins each rank to its CPUFT_CORES
#   CCL_WORKER_COUNT=4  4 of 32 cores per rank carry communication
#   CCL_WORKER_AFFINITY=0,1,2,3  oneCCL's workers run on cores without compute threads
#   GLOO_SOCKET_IFNAME=ens5  the interface of node2 that routes to 10.0.0.1
#   FI_TCP_IFACE=ens5  the interface of node2 that routes to 10.0.0.1
#   CCL_KVS_IFACE=ens5  the interface of node2 that routes to 10.0.0.1
#   THP_MEM_ALLOC_ENABLE=1  huge pages for large tensors, which the kernel copies faster between ranks
#   LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so  tcmalloc and iomp5: found on this host
#   CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/1  each rank reads CPUFT_RUN_KEY from its file and removes the file
# 
# settings on node3:
#   CPUFT_HOSTNAME=node3  every rank checks that it runs on the planned host
#   CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31  hardware threads of each rank on this host, in the order of local ranks
#   OMP_NUM_THREADS=28  one OpenMP thread per core: a rank has 28 cores
#   I_MPI_PIN=off  mpirun does not pin ranks here, because cpuft.rank does
#   CPUFT_PIN=rank  cpuft.rank pins each rank to its CPUFT_CORES
#   CCL_WORKER_COUNT=4  4 of 32 cores per rank carry communication
#   CCL_WORKER_AFFINITY=0,1,2,3  oneCCL's workers run on cores without compute threads
#   GLOO_SOCKET_IFNAME=ens5  the interface of node3 that routes to 10.0.0.1
#   FI_TCP_IFACE=ens5  the interface of node3 that routes to 10.0.0.1
#   CCL_KVS_IFACE=ens5  the interface of node3 that routes to 10.0.0.1
#   THP_MEM_ALLOC_ENABLE=1  huge pages for large tensors, which the kernel copies faster between ranks
#   LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so  tcmalloc and iomp5: found on this host
#   CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/2  each rank reads CPUFT_RUN_KEY from its file and removes the file
# 
# settings on node4:
#   CPUFT_HOSTNAME=node4  every rank checks that it runs on the planned host
#   CPUFT_CORES=4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31  hardware threads of each rank on this host, in the order of local ranks
#   OMP_NUM_THREADS=28  one OpenMP thread per core: a rank has 28 cores
#   I_MPI_PIN=off  mpirun does not pin ranks here, because cpuft.rank does
#   CPUFT_PIN=rank  cpuft.rank pins each rank to its CPUFT_CORES
#   CCL_WORKER_COUNT=4  4 of 32 cores per rank carry communication
#   CCL_WORKER_AFFINITY=0,1,2,3  oneCCL's workers run on cores without compute threads
#   GLOO_SOCKET_IFNAME=ens5  the interface of node4 that routes to 10.0.0.1
#   FI_TCP_IFACE=ens5  the interface of node4 that routes to 10.0.0.1
#   CCL_KVS_IFACE=ens5  the interface of node4 that routes to 10.0.0.1
#   THP_MEM_ALLOC_ENABLE=1  huge pages for large tensors, which the kernel copies faster between ranks
#   LD_PRELOAD=/usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so  tcmalloc and iomp5: found on this host
#   CPUFT_SENT=/var/tmp/cpuft-0/0436b62aebee.sent/3  each rank reads CPUFT_RUN_KEY from its file and removes the file
echo 'cpuft: make the run folder' >&2
sh -c 'mkdir -p "$0" && { mkdir "$1" || { [ ! -d "$1" ] || echo "another run took $1" >&2; exit 1; }; } && mkdir "$1/logs"' /runs /runs/one </dev/null
echo 'cpuft: start 4 ranks with mpich'"'"'s mpirun; output of rank N: /runs/one/logs/rank-N.out and .err' >&2
sh -c 'export CPUFT_RUN_KEY="$(od -vAn -N32 -tx1 /dev/urandom | tr -d " \n")"; exec "$@"' key mpirun \
    -iface ens5 -outfile-pattern /runs/one/logs/rank-%r.out -errfile-pattern /runs/one/logs/rank-%r.err \
    -genv MASTER_ADDR 10.0.0.1 -genv MASTER_PORT 40001 -genv CPUFT_WORLD_SIZE 4 -genv CPUFT_VERSION 0.1.0 \
    -genv I_MPI_FABRICS shm:ofi -genv CCL_ATL_SHM 1 -genv FI_PROVIDER efa -genv CCL_ATL_TRANSPORT ofi \
    -genv CCL_PROCESS_LAUNCHER hydra -genv CCL_LOG_LEVEL error -genv KMP_BLOCKTIME 1 -genv KMP_AFFINITY granularity=fine,compact,1,0 \
    -genv TOKENIZERS_PARALLELISM false -genv CPUFT_RUN_DIR /runs/one -host node1 -n 1 -env CPUFT_HOSTNAME node1 \
    -env CPUFT_CORES 4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31 \
    -env OMP_NUM_THREADS 28 -env I_MPI_PIN off -env CPUFT_PIN rank -env CCL_WORKER_COUNT 4 -env CCL_WORKER_AFFINITY 0,1,2,3 \
    -env GLOO_SOCKET_IFNAME ens5 -env FI_TCP_IFACE ens5 -env CCL_KVS_IFACE ens5 -env THP_MEM_ALLOC_ENABLE 1 \
    -env LD_PRELOAD /usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so -env CPUFT_SENT /var/tmp/cpuft-0/0436b62aebee.sent/0 python \
    -c 'import sys; sys.path[:] = filter(None, sys.path); from cpuft.argv import run_module; run_module()' cpuft.rank python train.py \
    : -host node2 -n 1 -env CPUFT_HOSTNAME node2 -env CPUFT_CORES 4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31 \
    -env OMP_NUM_THREADS 28 -env I_MPI_PIN off -env CPUFT_PIN rank -env CCL_WORKER_COUNT 4 -env CCL_WORKER_AFFINITY 0,1,2,3 \
    -env GLOO_SOCKET_IFNAME ens5 -env FI_TCP_IFACE ens5 -env CCL_KVS_IFACE ens5 -env THP_MEM_ALLOC_ENABLE 1 \
    -env LD_PRELOAD /usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so -env CPUFT_SENT /var/tmp/cpuft-0/0436b62aebee.sent/1 python \
    -c 'import sys; sys.path[:] = filter(None, sys.path); from cpuft.argv import run_module; run_module()' cpuft.rank python train.py \
    : -host node3 -n 1 -env CPUFT_HOSTNAME node3 -env CPUFT_CORES 4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31 \
    -env OMP_NUM_THREADS 28 -env I_MPI_PIN off -env CPUFT_PIN rank -env CCL_WORKER_COUNT 4 -env CCL_WORKER_AFFINITY 0,1,2,3 \
    -env GLOO_SOCKET_IFNAME ens5 -env FI_TCP_IFACE ens5 -env CCL_KVS_IFACE ens5 -env THP_MEM_ALLOC_ENABLE 1 \
    -env LD_PRELOAD /usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so -env CPUFT_SENT /var/tmp/cpuft-0/0436b62aebee.sent/2 python \
    -c 'import sys; sys.path[:] = filter(None, sys.path); from cpuft.argv import run_module; run_module()' cpuft.rank python train.py \
    : -host node4 -n 1 -env CPUFT_HOSTNAME node4 -env CPUFT_CORES 4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31 \
    -env OMP_NUM_THREADS 28 -env I_MPI_PIN off -env CPUFT_PIN rank -env CCL_WORKER_COUNT 4 -env CCL_WORKER_AFFINITY 0,1,2,3 \
    -env GLOO_SOCKET_IFNAME ens5 -env FI_TCP_IFACE ens5 -env CCL_KVS_IFACE ens5 -env THP_MEM_ALLOC_ENABLE 1 \
    -env LD_PRELOAD /usr/lib64/libtcmalloc.so.4:/opt/env/lib/libiomp5.so -env CPUFT_SENT /var/tmp/cpuft-0/0436b62aebee.sent/3 python \
    -c 'import sys; sys.path[:] = filter(None, sys.path); from cpuft.argv import run_module; run_module()' cpuft.rank python train.py </dev/null
