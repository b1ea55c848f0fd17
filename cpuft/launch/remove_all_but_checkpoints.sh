# Remove a run from this host, except its checkpoints and its state, and print the name of the newest one.
# $1: this user's folder; $2: folder with the run's secret files; $3: the run's work folder; $4: `head` on the head host.
root=$1 secrets=$2 work=$3 folder=${3%/*}
remove "$root" "$secrets"
# Only the head host has the lock file. Another host that sees the file shares the head host's disk, so nothing is
# removed here.
[ "$4" = head ] || [ ! -e "$work.lock" ] || exit 0
newest=$(ls -- "$work/checkpoints" 2>/dev/null | grep -xE '[0-9]+\.[0-9]+' | sort -n | tail -n 1)
[ -n "$newest" ] || { remove "$root" "$folder"; exit; }
for path in "$folder"/* "$folder"/.[!.]* "$work"/* "$work"/.[!.]*; do
    case $path in "$work" | "$work/checkpoints" | "$folder/state.json") ;; *) remove "$root" "$path" ;; esac
done
echo "$newest"
