#!/bin/sh
# Generated from recipe.yaml by `cpuft provision recipe`: edit recipe.yaml instead. Run this script as root.
#   install.sh [PREFIX STAMP PIN...]      Without arguments, it installs no training environment.
set -eu
missing=
need() { dpkg -s "$1" >/dev/null 2>&1 || missing="$missing $1"; }
# needed to download packages over https
need ca-certificates
# training compiles its fast kernels for the CPU of the host
need g++
# configures network interfaces, also of simulated hosts
need iproute2
# a memory allocator that saves about 6 % of a training step
need libtcmalloc-minimal4
# mpirun starts ranks by ssh
need openssh-client
# mpirun starts ranks by ssh
need openssh-server
# runs the training environment
need python3
# makes the environment if wheels come from a package index
need python3-venv
[ -z "$missing" ] || { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $missing; }
# fast fabrics lock the memory of their buffers, and every rank has a connection to every other
mkdir -p /etc/security/limits.d
printf %s '* - memlock unlimited
* - nofile 65536
' >/etc/security/limits.d/cpuft.conf
# login by key only; all hosts connect at the same time; sessions of a lost host end within 15 s
mkdir -p /etc/ssh/sshd_config.d
printf %s 'PasswordAuthentication no
MaxStartups 100:30:300
MaxSessions 100
ClientAliveInterval 5
ClientAliveCountMax 3
' >/etc/ssh/sshd_config.d/cpuft.conf
# large socket buffers for gradients; almost no swapping, because all ranks wait for one that swaps
mkdir -p /etc/sysctl.d
printf %s 'net.core.rmem_max = 16777216
net.core.wmem_max = 16777216
vm.swappiness = 1
' >/etc/sysctl.d/90-cpuft.conf
# huge pages for large tensors; cores that wait for the network keep their clock rate
mkdir -p /etc/tmpfiles.d
printf %s 'w /sys/kernel/mm/transparent_hugepage/enabled - - - - madvise
w /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor - - - - performance
' >/etc/tmpfiles.d/cpuft.conf
[ $# -gt 0 ] || exit 0
# the same path and the same versions as on servers that cpuft provision hosts sets up
remove() {
    root=$(readlink -f -- "$1") || root=/
    home=$(readlink -f -- "${HOME:-/}") || home=/
    shift
    for path; do
        [ -e "$path" ] || [ -L "$path" ] || continue
        real=$(readlink -f -- "$path") || real=/
        case "$home/" in "$real"/*) real=/ ;; esac
        case "$real" in
            "$root"/?*) rm -rf --one-file-system --preserve-root=all -- "$path" || failed=1 ;;
            *) echo "$path is not below $root, or holds a home: it stays" >&2; return 1 ;;
        esac
    done
    return "${failed:-0}"
}
# Installs the training environment at PREFIX/env: from the wheels in PREFIX/wheels, or from a package index if that has
# no pip wheel.
#   arguments: PREFIX STAMP PIN...
prefix=$1 stamp=$2
shift 2
# The lock and the stamp show that this script made the environment. Nothing else is ever removed.
if [ -e "$prefix/env" ] && [ ! -f "$prefix/install.lock" ] && [ ! -f "$prefix/env/stamp" ]; then
    echo "$prefix/env is not cpuft's: move it away, or give another prefix" >&2
    exit 1
fi
mkdir -p "$prefix"
# python -m and -c import modules from the working directory, where others may be able to write.
cd "$prefix"
prefix=$PWD
# A run that was killed may still be installing here: wait for it, and keep what it has installed.
exec 9>"$prefix/install.lock"
flock -w 600 9
[ "$(cat "$prefix/env/stamp" 2>/dev/null || true)" != "$stamp" ] || exit 0
remove "$prefix" "$prefix/env"
pip=$(ls "$prefix"/wheels/pip-*.whl 2>/dev/null | tail -n 1)
python3 -m venv ${pip:+--without-pip} "$prefix/env"
# pip accepts hashes only in a requirements file. If one pin has a hash, pip requires a hash of every pin.
printf '%s\n' "$@" >"$prefix/env/pins.txt"
set -- install --quiet --find-links "$prefix/wheels" -r "$prefix/env/pins.txt"
if [ -n "$pip" ]; then
    "$prefix/env/bin/python" "$pip/pip" "$@" --no-index
else
    "$prefix/env/bin/python" -m pip "$@"
fi
echo "$stamp" >"$prefix/env/stamp"
