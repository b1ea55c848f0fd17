#!/bin/bash
#SBATCH --comment=cpuft
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@120

# Where a host is lost, the others stay ours (--no-kill), and another mpirun need not wait for the one that had it:
export SLURM_OVERLAP=1
# An array's jobs are queued again by their own names, and have a run each.
task=${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID} job=$SLURM_JOB_ID
[ -z "$task" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
