# Removes what cpuft put on a server, and nothing else. `remove` is the function of cpuft.files.REMOVE, and `lock` that of
# servers_keys.sh.
#   arguments: PREFIX NAME KEY_COMMENT WORK_ROOT
prefix=$1
file=$HOME/.ssh/authorized_keys
# Prints the lines with which clusters other than $1 log in. The user may have written options before a key.
list_others() { grep -aE "$keys cpuft-[a-z0-9]+$blank\$" "$file" 2>/dev/null | grep -avE " $1$blank\$|$two"; }
# Another cluster on this server has a folder here if this is one of its head hosts, and its key may log in on all hosts.
is_shared() {
    for folder in "$prefix"/clusters/*/; do
        [ ! -d "$folder" ] || [ "$folder" = "$prefix/clusters/$1/" ] || return 0
    done
    list_others "$2" >/dev/null
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
[ -e "$file" ] && lock && [ -e "$file" ] || exit 0
new=$(mktemp "$file.XXXXXX" 2>/dev/null || mktemp) # only the file may be this user's, and not its folder
trap 'rm -f "$new"; unlock' EXIT
cp -a "$file" "$new" # keeps owner and mode
unmark=
list_others "$3" >/dev/null || unmark="/^$mark/d"
sed -E -e "/$two/!{/$keys $3$blank\$/d;}" -e "$unmark" "$file" >"$new"
! cmp -s "$file" "$new" || exit 0
if [ ! -s "$new" ] && grep -aq "^$mark" "$file"; then
    made_folder=$(grep -a "^$mark and its folder" "$file" || true)
    rm -f "$file" "$new"
    trap - EXIT
    unlock
    [ ! "$made_folder" ] || rmdir "$HOME/.ssh" 2>/dev/null || true
# A file with several names, or one that is mounted, is not replaced.
elif [ "$(stat -c %h "$file")" != 1 ] || ! mv -f "$new" "$file" 2>/dev/null; then
    cat "$new" >"$file"
fi
