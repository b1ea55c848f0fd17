# Checks that an environment can train: its packages import, mpirun works, and two ranks do an all-reduce over every
# backend.
#   arguments: PYTHON
set -eu
python=$1 folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
cat >"$folder/add.py" <<"END"
import sys
import torch
import torch.distributed as dist
import cpuft.comm
dist.init_process_group(sys.argv[1])
numbers = torch.full((1000,), 1.0 + dist.get_rank())
dist.all_reduce(numbers)
dist.destroy_process_group()
sys.exit(0 if bool((numbers == 3).all()) else f"{sys.argv[1]} computed {numbers[0]} instead of 3")
END
"$python" -c 'import accelerate, cpuft, datasets, mpi4py.MPI, numpy, scipy, sklearn, torch, transformers'
"$(dirname "$python")/mpiexec.hydra" --version
backends="gloo mpi"
[ "$(uname -m)" != x86_64 ] || backends="$backends ccl" # there is no oneCCL for Arm
for backend in $backends; do
    "$python" -m cpuft launch --np 2 --run-dir "$folder/$backend" -- "$folder/add.py" "$backend"
done
