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

# After a host is lost the job keeps the others (--no-kill). A new mpirun must not wait for the step that had the host:
export SLURM_OVERLAP=1
# Each job of an array has a run of its own, and is requeued under its own name.
task=${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID} job=$SLURM_JOB_ID
[ -z "$task" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
cpuft=/opt/cpuft/env/bin/cpuft retries=9
launch() { exec "$cpuft" launch --np 8 --ppn 2 --task mrpc --seed 1 "$@" ; }
run=runs/mrpc-np8$task progress=record.jsonl restarted=${SLURM_RESTART_COUNT#0}
# A restarted job resumes its run if the run has got far enough: $run/$progress is there, or a copy of a checkpoint.
# Otherwise the run starts again, and what an earlier start left is moved aside.
set -- --run-dir "$run"
if [ "$restarted" ] && { [ -s "$run/$progress" ] || [ -d "$run/checkpoints" ]; }; then
    set -- --resume "$run" --run-dir ''
elif [ "$restarted" ] && { [ -d "$run/logs" ] || [ -e "$run/state.json" ]; }; then
    mv "$run" "$run-$(date +%s)" || exit 1
fi
# Shortly before the time limit Slurm sends USR1 to this shell alone. The shell passes it on: the ranks save a
# checkpoint, the launch exits with code 75, and the job is requeued. scancel sends TERM: such a job is not requeued.
received='' cancelled='' pid=''
trap 'received=USR1; ${pid:+kill -USR1 $pid}' USR1
trap 'received=TERM cancelled=1; ${pid:+kill -TERM $pid}' TERM
launch "$@" &
pid=$!
[ ! "$received" ] || kill -"$received" "$pid"
# A signal interrupts `wait` before the launch has ended.
while received=''; wait "$pid"; code=$?; [ "$received" ]; do :; done
# USR1 that came before there were ranks ended the launch itself (128 + 10). Nothing is lost: the run starts again, or
# resumes from its checkpoint, and a sweep continues with its journal.
if [ "$code" = 138 ] && { [ ! -s "$run/$progress" ] || [ -d "$run/checkpoints" ] || [ "$progress" = sweep.jsonl ]; }; then
    code=75
fi
if [ "$code" = 75 ] && [ ! "$cancelled" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$retries" ]; then
    scontrol requeue "$job"
fi
exit "$code"
