#!/bin/bash
#SBATCH --comment=cpuft
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@120
#SBATCH --job-name=mrpc-np8
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --partition=cpu
#SBATCH --account=nlp
#SBATCH --constraint=amx&icelake
#SBATCH --time=8:00:00
#SBATCH --qos=high
#SBATCH --mem=0

# Where a host is lost, the others stay ours (--no-kill), and another mpirun need not wait for the one that had it:
export SLURM_OVERLAP=1
# An array's jobs are queued again by their own names, and have a run each.
task=${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID} job=$SLURM_JOB_ID
[ -z "$task" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
cpuft=/opt/cpuft/env/bin/cpuft retries=9
launch() { exec "$cpuft" launch --np 8 --ppn 2 --task mrpc --seed 1 "$@" ; }
run=runs/mrpc-np8$task proof=record.jsonl again=${SLURM_RESTART_COUNT#0}
# What this job began goes on from its checkpoint, once it came so far that it can be resumed; else it begins anew.
set -- --run-dir "$run"
if [ "$again" ] && [ -s "$run/$proof" ]; then
    set -- --resume "$run" --run-dir ''
elif [ "$again" ] && [ -d "$run/logs" ]; then
    mv "$run" "$run-$(date +%s)" || exit 1
fi
# Near the time limit Slurm sends USR1 to this shell alone: ranks save what they have, the launch ends with 75, and the
# job is queued again. Whoever cancels it sends TERM, and wants it gone.
told='' gone='' pid=''
trap 'told=USR1; ${pid:+kill -USR1 $pid}' USR1
trap 'told=TERM gone=1; ${pid:+kill -TERM $pid}' TERM
launch "$@" &
pid=$!
[ ! "$told" ] || kill -"$told" "$pid"
# A signal ends wait, and not what it waits for.
while told=''; wait "$pid"; code=$?; [ "$told" ]; do :; done
# USR1 before there were ranks to ask ended the launch itself: nothing is lost, and it begins anew, or where it was.
if [ "$code" = 138 ] && { [ ! -s "$run/$proof" ] || [ -d "$run/checkpoints" ]; }; then code=75; fi
if [ "$code" = 75 ] && [ ! "$gone" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$retries" ]; then
    scontrol requeue "$job"
fi
exit "$code"
