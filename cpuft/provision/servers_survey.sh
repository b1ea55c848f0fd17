#!/bin/sh
# Prints what a server has of a cluster's environment, one "key value" per line. The server may have no Python yet.
#
#   servers_survey.sh PREFIX NAME
prefix=$1
cluster=$1/clusters/$2
. /etc/os-release 2>/dev/null
echo "os $ID $VERSION_ID"
echo "kernel $(uname -r)"
echo "machine $(uname -m)"
ldd --version 2>&1 | grep -qi musl && echo "musl yes"
echo "python $(python3 -c 'import platform; print(platform.python_version())' 2>/dev/null)"
python3 -c 'import ensurepip' 2>/dev/null && echo "ensurepip yes"
folder=$prefix
while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
[ -w "$folder" ] && echo "writable yes"
echo "free_kb $(df -Pk "$folder" | awk 'NR == 2 { print $4 }')"
echo "stamp $(cat "$prefix/env/stamp" 2>/dev/null)"
case "$(stat -Lc '%a %u' "$prefix" 2>/dev/null)" in
    *[2367]" "*) echo "foreign $prefix can be written by other users" ;;
    "" | *" 0" | *" $(id -u)") ;;
    *) echo "foreign $prefix belongs to another user" ;;
esac
if [ -f "$prefix/install.lock" ] || [ -f "$prefix/env/stamp" ]; then
    echo "marked yes"
else
    for folder in env wheels; do [ ! -e "$prefix/$folder" ] || echo "foreign $prefix/$folder is not cpuft's"; done
fi
for wheel in "$prefix"/wheels/*.whl; do
    [ ! -e "$wheel" ] || echo "wheel $(basename "$wheel") $(sha256sum <"$wheel" | cut -d' ' -f1)"
done
for file in ssh_config known_hosts hostfile cluster.json; do
    echo "sum_$file $(sha256sum <"$cluster/$file" 2>/dev/null | cut -d' ' -f1)"
done
[ ! -s "$cluster/id_ed25519" ] || echo "key $(cat "$cluster/id_ed25519.pub" 2>/dev/null)"
sed 's/^/authorized /' "$HOME/.ssh/authorized_keys" 2>/dev/null
exit 0
