# Removes what cpuft put on a server, and nothing else. `remove` is the function of cpuft.files.REMOVE.
#   arguments: PREFIX NAME KEY_COMMENT WORK_ROOT
prefix=$1
if [ -f "$prefix/install.lock" ] || [ -f "$prefix/env/stamp" ]; then
    remove "$prefix" "$prefix/env" "$prefix/wheels" "$prefix/install.lock"
fi
remove "$prefix" "$prefix/clusters/$2"
rmdir "$prefix/clusters" 2>/dev/null || true
case "$prefix" in /*/*) rmdir "$prefix" 2>/dev/null || true ;; esac
for folder in "$4"/cpuft-*; do
    [ -O "$folder" ] && [ ! -L "$folder" ] || continue
    case "$folder" in */cpuft-inputs) remove "$4" "$folder" ;; *) remove "$4" "$folder/inputs" ;; esac
    rmdir "$folder" 2>/dev/null || true
done
file=$HOME/.ssh/authorized_keys
[ -e "$file" ] || exit 0
grep -v " $3\$" "$file" >"$file.new" || [ $? = 1 ]
cat "$file.new" >"$file"
rm "$file.new"
