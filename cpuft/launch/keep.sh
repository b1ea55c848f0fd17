root=$1 sent=$2 work=$3 folder=${3%/*}
remove "$root" "$sent"
[ "$4" = master ] || [ ! -e "$work.lock" ] || exit 0
newest=$(ls -- "$work/checkpoints" 2>/dev/null | grep -xE '[0-9]+\.[0-9]+' | sort -n | tail -n 1)
[ -n "$newest" ] || { remove "$root" "$folder"; exit; }
for path in "$folder"/* "$folder"/.[!.]* "$work"/* "$work"/.[!.]*; do
    case $path in "$work" | "$work/checkpoints") ;; *) remove "$root" "$path" ;; esac
done
echo "$newest"
