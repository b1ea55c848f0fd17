# Adds each line of standard input to authorized_keys, unless it is there. `lock` is the function of servers_keys.sh.
umask 077
[ -d "$HOME/.ssh" ] || mark="$mark and its folder"
mkdir -p "$HOME/.ssh"
lock
[ -e "$file" ] || echo "$mark, to be removed with the last key of a cluster" >"$file"
# Without this, a key would become the comment of a last line that has no newline.
[ -z "$(tail -c 1 "$file")" ] || echo >>"$file"
while IFS= read -r key; do grep -aqxF "$key" "$file" || printf '%s\n' "$key" >>"$file"; done
