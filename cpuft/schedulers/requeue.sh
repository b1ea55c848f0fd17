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
