# A host's own key in the place of the one that all of a call were given; each step ends when sshd shows what it has then.
#   arguments: make MARK FOLDER PIDFILE | forget MARK FOLDER PIDFILE
set -eu
verb=$1 mark=$2 own=$3/ssh_host_ed25519_key given=$3/ssh_host_ecdsa_key pidfile=$4
set -- ${SSH_CONNECTION:-here 0 127.0.0.1 22}
address=$3 port=$4
shown() { ssh-keyscan -T 5 -p "$port" -t "$1" "$address" 2>/dev/null | cut -d" " -f3; }
read_key() { cut -d" " -f2 "$1"; }
# Within 20 s sshd shows its own key, and the given one or none.
reload() {
    kill -HUP "$(cat "$pidfile")"
    tries=100
    until [ "$(shown ed25519) $(shown ecdsa)" = "$1 $2" ]; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || { echo "sshd does not show its keys anew" >&2; exit 1; }
        sleep 0.2
    done
}
if [ "$verb" = make ]; then
    rm -f "$own" "$own.pub" "$own.new" "$own.new.pub"
    ssh-keygen -q -t ed25519 -N "" -C "$mark" -f "$own.new"
    mv "$own.new" "$own"
    reload "$(read_key "$own.new.pub")" "$(read_key "$given.pub")"
    mv "$own.new.pub" "$own.pub"
else
    rm -f "$given"
    reload "$(read_key "$own.pub")" ""
    rm -f "$given.pub"
fi
