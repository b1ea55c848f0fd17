# A key pair; ssh-keygen asks before it writes over a half-written one, so that goes first.
#   arguments: PATH COMMENT
umask 077
mkdir -p "$(dirname "$1")"
rm -f "$1" "$1.pub"
ssh-keygen -q -t ed25519 -N "" -C "$2" -f "$1"
