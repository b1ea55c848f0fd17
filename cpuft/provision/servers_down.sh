# Removes what cpuft put on a server, and nothing else. `remove` is the function of cpuft.files.REMOVE.
#   arguments: PREFIX NAME KEY_COMMENT WORK_ROOT
prefix=$1
file=$HOME/.ssh/authorized_keys
# Another cluster on this server has a folder here if this is one of its head hosts, and its key may log in on all hosts.
is_shared() {
    for folder in "$prefix"/clusters/*/; do
        [ ! -d "$folder" ] || [ "$folder" = "$prefix/clusters/$1/" ] || return 0
    done
    grep -E ' cpuft-[a-z0-9]+$' "$file" 2>/dev/null | grep -qv " $2\$"
}
shared=
if is_shared "$2" "$3"; then
    shared=yes
    echo "the environment at $prefix and the inputs stay, because another cluster uses them"
elif [ -f "$prefix/install.lock" ] || [ -f "$prefix/env/stamp" ]; then
    remove "$prefix" "$prefix/env" "$prefix/wheels" "$prefix/install.lock"
fi
remove "$prefix" "$prefix/clusters/$2"
rmdir "$prefix/clusters" 2>/dev/null || true
case "$prefix" in /*/*) rmdir "$prefix" 2>/dev/null || true ;; esac
for folder in "$4"/cpuft-*; do
    [ ! "$shared" ] && [ -O "$folder" ] && [ ! -L "$folder" ] || continue
    case "$folder" in */cpuft-inputs) remove "$4" "$folder" ;; *) remove "$4" "$folder/inputs" ;; esac
    rmdir "$folder" 2>/dev/null || true
done
[ -e "$file" ] || exit 0
grep -v " $3\$" "$file" >"$file.new" || [ $? = 1 ]
cat "$file.new" >"$file"
rm "$file.new"
