#!/bin/sh
# Proves that an image trains: its packages import, its mpirun runs, two ranks add up numbers over every backend.
# In namespaces of its own, so without a network, and with nothing of this machine but its kernel.
#
#   unshare --net --mount --pid --uts --ipc --fork --kill-child check_image.sh ROOT PYTHON
set -eu
root=$1 python=$2
hostname image
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
for folder in dev/shm tmp run var/tmp root; do mount -t tmpfs tmpfs "$root/$folder"; done
ip link set dev lo up
cat >"$root/tmp/add.py" <<"END"
import sys
import torch
import torch.distributed as dist
import cpuft.comm
dist.init_process_group(sys.argv[1])
numbers = torch.full((1000,), 1.0 + dist.get_rank())
dist.all_reduce(numbers)
dist.destroy_process_group()
sys.exit(0 if bool((numbers == 3).all()) else f"{sys.argv[1]} adds up wrongly: {numbers[0]}")
END
inside() { chroot "$root" env -i HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
inside "$python" -c 'import accelerate, cpuft, datasets, mpi4py.MPI, numpy, scipy, sklearn, torch, transformers'
inside "$(dirname "$python")/mpiexec.hydra" --version
for backend in gloo mpi ccl; do
    inside "$python" -m cpuft launch --np 2 --run-dir "/tmp/$backend" -- /tmp/add.py "$backend"
done
