# Kubeflow's operator starts this container again after any failure, because an MPIJob has no podFailurePolicy. A launch
# that was refused (exit code 2) would be refused again: later starts only repeat what the first one said.
memo=${CPUFT_MEMO:-}
[ "$memo" ] || launch "$@"
if [ -e "$memo/refused" ]; then
    cat "$memo/said" >&2
    echo "cpuft: this launch was refused and is not started again: cancel the job, and submit a corrected one" >&2
    exit 2
fi
rm -f "$memo/pipe"
mkfifo "$memo/pipe" || exit 1
tee "$memo/said" <"$memo/pipe" >&2 &
copy=$!
told='' pid=''
trap 'told=TERM; ${pid:+kill -TERM $pid}' TERM
launch "$@" 2>"$memo/pipe" &
pid=$!
[ ! "$told" ] || kill -TERM "$pid"
# A signal ends wait, and not what it waits for.
while told=''; wait "$pid"; code=$?; [ "$told" ]; do :; done
wait "$copy"
[ "$code" != 2 ] || : >"$memo/refused"
exit "$code"
