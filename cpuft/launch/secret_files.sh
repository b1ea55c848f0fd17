# Write, refresh or remove the files that give the processes of one run on this host their secret variables.
# $1: send, refresh or remove; $2: this user's folder; $3: the folder for the files of the run; then, with `send`, the
# file for the state of the run, which may be empty, and the files. The first line of standard input is the state.
# `remove` removes nothing if the host has got the state of a later start, whose files these are.
folder=$2 sent=$3
new() { find "$1" -type f -name '[0-9]*' -mmin -10 2>/dev/null | head -n 1; }
end_watch() {
    # The process may not have become the leader of a process group yet.
    read -r pid <"$sent/.watch" && grep -qzxF -- "$sent" "/proc/$pid/cmdline" &&
        { kill -9 "-$pid" || kill -9 "$pid"; }
} 2>/dev/null
owner() { sed -n 's/.*"owner": \([0-9]\{1,9\}\),.*/\1/p'; }
case $1 in
send)
    umask 077
    private "$folder" || exit 1
    IFS= read -r state
    if [ "$4" ]; then
        there=$(cat "$4" 2>/dev/null)
        number=$(printf '%s\n' "$there" | owner)
        [ "$there" = "$state" ] || [ "${number:-0}" -lt "$(printf '%s\n' "$state" | owner)" ] || {
            echo "number $number" >&2
            exit 213
        }
        end_watch
        new=$4.${5##*/}.new # hosts may share a disk, but no file has the name of another one
        mkdir -p "${4%/*}" && printf '%s\n' "$state" >"$new" && mv "$new" "$4" || exit 1
    fi
    for old in "$folder"/*.sent; do
        [ ! -d "$old" ] || [ "$old" = "$sent" ] || [ -n "$(new "$old")" ] || remove "$folder" "$old"
    done
    end_watch
    mkdir -p "$sent" || exit 1
    run=${4%/*}
    shift 4
    tee -- "$@" >/dev/null || exit 1
    # If the launcher never comes back, the host removes the files that no process has read, and the folder of a run
    # that has nothing but its state.
    setsid sh -c 'while sleep 2 && [ -d "$1" ]; do
        [ -n "$(find "$1" -type f -name "[0-9]*" -mmin -10 | head -n 1)" ] || {
            [ -z "$(find "$1" -type f -name "[0-9]*")" ] || [ -z "$2" ] ||
                [ "$(ls -A -- "$2" 2>/dev/null)" != state.json ] || { rm -f -- "$2/state.json" && rmdir -- "$2"; }
            exec rm -rf -- "$1"
        }
    done' watch "$sent" "$run" </dev/null >/dev/null 2>&1 &
    echo $! >"$sent/.watch"
    ;;
refresh)
    for file in "$sent"/[0-9]*; do [ ! -f "$file" ] || { touch -c -- "$file"; echo waiting; }; done
    ;;
remove)
    IFS= read -r state
    [ ! -e "$4" ] || [ "$(cat "$4")" = "$state" ] || exit 0
    end_watch
    remove "$folder" "$sent"
    [ -z "$4" ] || [ "$(ls -A -- "${4%/*}" 2>/dev/null)" != "${4##*/}" ] || remove "$folder" "${4%/*}"
    ;;
esac
