work=/var/tmp/cpuft-$(id -u)/$1
[ -d "${work%/*}" ] || exit 0
echo there
[ ! -e "$work.lock" ] || flock -n "$work.lock" true || echo going
for folder in "$work" "$work"/checkpoints/[0-9]*.[0-9]*; do
    record=$folder/record.jsonl
    [ -f "$record" ] || continue
    case $folder in "$work") echo broke off ;; *[!0-9.]) continue ;; *) echo "checkpoint ${folder##*/}" ;; esac
    echo "steps $(grep -c '"kind": "step"' "$record")"
    head -n 1 "$record"
done
[ ! -f "$work/data.npz" ] || echo rows
for file in "$work"/checkpoints/rank-*.last; do [ ! -f "$file" ] || echo "steps $(head -c 16 "$file")"; done
# A run that came to its end and was not fetched: the supervisor noted exit code 0.
[ "$(head -c 4 "$work/logs/exit-code" 2>/dev/null)" != 0 ] || echo finished
