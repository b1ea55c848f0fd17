# Shell functions that change authorized_keys on a server.
export LC_ALL=C
# Beginning of the line that says what cpuft made, and so removes with the last key of a cluster.
mark='# cpuft provision made this file'
# Patterns: the beginning of a cluster's line, its end, and a line of the user to which a key was appended by mistake.
keys='^([^#].*[[:space:]])?ssh-ed25519 [^ ]*'
blank='[[:space:]]*'
two=' AAAA.* AAAA'
# Let only this process change the file, whose path is then $file. `lock` fails if the folder of the file is gone. Hosts
# may share a home, and every file system makes a folder only once.
unlock() { rmdir "$file.lock" 2>/dev/null || true; }
lock() {
    file=$(readlink -vf "$HOME/.ssh/authorized_keys") || return 1 # a link stays a link
    tries=0
    # Whoever has a lock for 5 s was killed.
    until mkdir "$file.lock" 2>/dev/null || [ $((tries += 1)) -gt 50 ]; do
        [ -d "${file%/*}" ] || return 1
        sleep 0.1
    done
    trap 'exit 1' HUP INT TERM
    trap unlock EXIT
}
# Add each line of standard input to authorized_keys, unless it is there.
authorize() {
    umask 077
    [ -d "$HOME/.ssh" ] || mark="$mark and its folder"
    mkdir -p "$HOME/.ssh"
    lock
    [ -e "$file" ] || echo "$mark, to be removed with the last key of a cluster" >"$file"
    # Without this, a key would become the comment of a last line that has no newline.
    [ -z "$(tail -c 1 "$file")" ] || echo >>"$file"
    while IFS= read -r key; do grep -aqxF "$key" "$file" || printf '%s\n' "$key" >>"$file"; done
}
