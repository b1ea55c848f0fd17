# Gives a host a host key of its own in place of the key that all hosts share. Each step ends when sshd shows the keys that
# it should have then.
#   arguments: make COMMENT FOLDER PIDFILE | forget COMMENT FOLDER PIDFILE
set -eu
verb=$1 comment=$2 own=$3/ssh_host_ed25519_key shared=$3/ssh_host_ecdsa_key pidfile=$4
set -- ${SSH_CONNECTION:-here 0 127.0.0.1 22}
address=$3 port=$4
read_shown() { ssh-keyscan -T 5 -p "$port" -t "$1" "$address" 2>/dev/null | cut -d" " -f3; }
read_key() { cut -d" " -f2 "$1"; }
# Reloads sshd and waits, up to 20 s, until it shows the ed25519 key $1 and the ECDSA key $2 (empty: no such key).
reload() {
    kill -HUP "$(cat "$pidfile")"
    tries=100
    until [ "$(read_shown ed25519) $(read_shown ecdsa)" = "$1 $2" ]; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || { echo "sshd does not show its new host keys" >&2; exit 1; }
        sleep 0.2
    done
}
if [ "$verb" = make ]; then
    rm -f "$own" "$own.pub" "$own.new" "$own.new.pub"
    ssh-keygen -q -t ed25519 -N "" -C "$comment" -f "$own.new"
    mv "$own.new" "$own"
    reload "$(read_key "$own.new.pub")" "$(read_key "$shared.pub")"
    mv "$own.new.pub" "$own.pub"
else
    rm -f "$shared"
    reload "$(read_key "$own.pub")" ""
    rm -f "$shared.pub"
fi
