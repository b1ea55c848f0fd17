# Runs a script in which apt downloads through a SOCKS proxy on this host: the remote forwarding of the ssh connection.
#   arguments: PORT SCRIPT
APT_CONFIG=$(mktemp)
export APT_CONFIG
trap 'rm "$APT_CONFIG"' EXIT
for scheme in http https; do echo "Acquire::$scheme::Proxy \"socks5h://127.0.0.1:$1\";"; done >"$APT_CONFIG"
# Debian's cloud images look for updates when they boot, and apt would fail while they hold its lock.
echo 'DPkg::Lock::Timeout "300";' >>"$APT_CONFIG"
sh -c "$2"
