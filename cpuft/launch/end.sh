# Ends what is left on a host of the run that works in $1: its ranks, and mpirun's part above them.
for file in $(grep -lzxF -- "CPUFT_RUN_DIR=$1" /proc/[0-9]*/environ 2>/dev/null); do
    pid=${file#/proc/} pid=${pid%/environ}
    while [ "${pid:-0}" -gt 1 ]; do
        above=$(sed -n 's/^PPid:[^0-9]*//p' "/proc/$pid/status" 2>/dev/null)
        kill -KILL "$pid" 2>/dev/null
        case $(cat "/proc/${above:-0}/comm" 2>/dev/null) in
            hydra_* | mpiexec* | orted | prted) pid=$above ;;
            *) break ;;
        esac
    done
done
