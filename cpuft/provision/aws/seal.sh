# What makes a host itself goes, before it becomes an image: every key, name and memory, and the end of its lease.
#   arguments: ROOT PREFIX WORK_ROOT; `remove` is cpuft.files.REMOVE, which has variables of its own
# Not /etc/resolv.conf: that of a cloud's Debian leads to its resolver, whatever the host is called.
top=${1%/} prefix=$2 work=$3
remove "$top/etc" "$top"/etc/ssh/ssh_host_* "$top"/etc/systemd/system/*.wants/cpuft-lease.service \
    "$top/etc/systemd/system/cpuft-lease.service"
remove "$top/usr/local" "$top/usr/local/sbin/cpuft-lease"
for person in "$top/root" "$top"/home/*; do
    remove "$person" "$person/.ssh" "$person"/.*_history "$person/.cache" "$person/.local/state"
done
# The system's bus calls the machine by a file of its own, or by a link to the other one.
[ -L "$top/var/lib/dbus/machine-id" ] || remove "$top/var" "$top/var/lib/dbus/machine-id"
remove "$top/var" "$top/var/lib/cpuft" "$top"/var/lib/cloud/* "$top/var/lib/systemd/random-seed" \
    "$top"/var/cache/apt/* "$top"/var/lib/apt/lists/* "$top"/var/log/journal/*
remove "$top$prefix" "$top$prefix/wheels" "$top$prefix/clusters" "$top$prefix/install.lock"
remove "$top$work" "$top$work"/cpuft-*
find "$top/var/log" -xdev -type f -exec truncate -s 0 {} +
for file in machine-id hostname; do : >"$top/etc/$file"; done
sync
