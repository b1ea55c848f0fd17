# Runs a script for which apt fetches through a SOCKS proxy on this host: ssh's own, back to where it was started.
#   arguments: PORT SCRIPT
APT_CONFIG=$(mktemp)
export APT_CONFIG
trap 'rm "$APT_CONFIG"' EXIT
for scheme in http https; do echo "Acquire::$scheme::Proxy \"socks5h://127.0.0.1:$1\";"; done >"$APT_CONFIG"
# A cloud's Debian looks for updates by itself when it starts.
echo 'DPkg::Lock::Timeout "300";' >>"$APT_CONFIG"
sh -c "$2"
