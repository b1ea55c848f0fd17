# Kubeflow's operator starts this container again after any failure, because an MPIJob has no podFailurePolicy. A launch
# that was refused (exit code 2) would be refused again: later starts only repeat the message of the first one.
memo=${CPUFT_MEMO:-}
[ "$memo" ] || launch "$@"
if [ -e "$memo/refused" ]; then
    cat "$memo/errors" >&2
    echo "cpuft: this launch was refused and is not started again: cancel the job, and submit a corrected one" >&2
    exit 2
fi
rm -f "$memo/pipe"
mkfifo "$memo/pipe" || exit 1
tee "$memo/errors" <"$memo/pipe" >&2 &
copy=$!
received='' pid=''
trap 'received=TERM; ${pid:+kill -TERM $pid}' TERM
launch "$@" 2>"$memo/pipe" &
pid=$!
[ ! "$received" ] || kill -TERM "$pid"
# A signal interrupts `wait` before the launch has ended.
while received=''; wait "$pid"; code=$?; [ "$received" ]; do :; done
wait "$copy"
[ "$code" != 2 ] || : >"$memo/refused"
exit "$code"
