for path; do
    path=$(command -v "$path") || continue
    case $(readlink -f "$path") in
        *ompi* | */srun) ;;
        *) own=$(dirname "$path")/mpiexec.hydra; [ ! -x "$own" ] || path=$own ;;
    esac
    echo "$path"
    exec "$path" --version
done
exit 1
