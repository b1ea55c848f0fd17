# Removes what makes a host unique before an image is made of it: keys, names, logs and the end of its lease.
#   arguments: ROOT PREFIX WORK_ROOT; `remove` is defined by cpuft.files.REMOVE
# /etc/resolv.conf stays: in Debian's cloud images it is a link to systemd's resolver, the same on every host.
top=${1%/} prefix=$2 work=$3
remove "$top/etc" "$top"/etc/ssh/ssh_host_* "$top"/etc/systemd/system/*.wants/cpuft-lease.service \
    "$top/etc/systemd/system/cpuft-lease.service"
remove "$top/usr/local" "$top/usr/local/sbin/cpuft-lease"
for home in "$top/root" "$top"/home/*; do
    remove "$home" "$home/.ssh" "$home"/.*_history "$home/.cache" "$home/.local/state"
done
# D-Bus has a machine id of its own, or a link to /etc/machine-id, which is emptied below.
[ -L "$top/var/lib/dbus/machine-id" ] || remove "$top/var" "$top/var/lib/dbus/machine-id"
remove "$top/var" "$top/var/lib/cpuft" "$top"/var/lib/cloud/* "$top/var/lib/systemd/random-seed" \
    "$top"/var/cache/apt/* "$top"/var/lib/apt/lists/* "$top"/var/log/journal/*
remove "$top$prefix" "$top$prefix/wheels" "$top$prefix/clusters" "$top$prefix/install.lock"
remove "$top$work" "$top$work"/cpuft-*
find "$top/var/log" -xdev -type f -exec truncate -s 0 {} +
for file in machine-id hostname; do : >"$top/etc/$file"; done
sync
