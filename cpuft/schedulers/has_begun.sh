# Print "yes" if an earlier start of this job has begun the run in the folder $1. If there is no such folder yet, this
# start begins the run, and notes the job's identifier in a file beside the folder. A new job with the same folder must
# not take over the run of another job: it starts anew, and the launch refuses the folder. Where the service gives no
# identifier, the run cannot be told from that of another job, and the answer is "yes".
has_begun() {
    note=$(dirname "$1")/.$(basename "$1").job
    if [ ! "${CPUFT_JOB_UID:-}" ] || [ "$(cat "$note" 2>/dev/null)" = "$CPUFT_JOB_UID" ]; then
        echo yes
    elif [ ! -e "$1" ]; then
        mkdir -p "$(dirname "$note")" && echo "$CPUFT_JOB_UID" >"$note"
    fi
}
