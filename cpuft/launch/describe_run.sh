# Print what this host has of a run. $1: the run's work folder, relative to this user's folder.
work=/var/tmp/cpuft-$(id -u)/$1
[ -d "${work%/*}" ] || exit 0
echo exists
[ ! -e "$work.lock" ] || flock -n "$work.lock" true || echo active
for folder in "$work" "$work"/checkpoints/[0-9]*.[0-9]*; do
    record=$folder/record.jsonl
    [ -f "$record" ] || continue
    case $folder in "$work") ;; *[!0-9.]) continue ;; *) echo "checkpoint ${folder##*/}" ;; esac
    echo "steps $(grep -c '"kind": "step"' "$record")"
    head -n 1 "$record"
done
[ ! -f "$work/data.npz" ] || echo data
for file in "$work"/checkpoints/rank-*.last; do [ ! -f "$file" ] || echo "steps $(head -c 16 "$file")"; done
# The supervisor writes exit code 0 when the run has finished; it has not been fetched yet.
[ "$(head -c 4 "$work/logs/exit-code" 2>/dev/null)" != 0 ] || echo finished
