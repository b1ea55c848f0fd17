#!/bin/sh
# First process of an instance, in its own namespaces: sets up network and disk, runs the first boot, then becomes sshd.
#
#   boot.sh <NETWORK
#
# NETWORK, standard input, is the region's network namespace. The rest comes from the environment:
#   DISK LOWER             folder of its disk, and the layers below it, separated by colons
#   NAME ADDRESS PUBLIC    its hostname and addresses; PUBLIC may be empty
#   LINK BRIDGE GATEWAY    its link in the region, the bridge of that link, and its gateway
#   PYTHON FIRST_BOOT      the program that reads user data, and its Python
#   BROKEN                 what fails: `final` (user data's commands) or `shutdown`; empty for nothing
set -eu
hostname "$NAME"
# An address always has the same MAC address, because neighbours cache it.
card=02:00$(printf ':%02x' $(echo "$ADDRESS" | tr . ' '))
plug='ip link add dev "$1" type veth peer name eth0 address "$2" netns 1
ip link set dev "$1" master "$3" up
[ -z "$4" ] || ip route replace "$4/32" dev "$3"'
nsenter --net=/proc/self/fd/0 sh -euc "$plug" plug "$LINK" "$card" "$BRIDGE" "$PUBLIC"
exec </dev/null
ip link set dev lo up
ip address add "$ADDRESS/16" dev eth0
[ -z "$PUBLIC" ] || ip address add "$PUBLIC/32" dev lo
ip link set dev eth0 up
ip route add default via "$GATEWAY"

root=$DISK/root
mount -t overlay -o "lowerdir=$LOWER,upperdir=$DISK/upper,workdir=$DISK/work" overlay "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/run/sshd" "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o size=1g,mode=1777 tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for device in null zero full random urandom tty; do
    : >"$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
cd "$root"
mkdir -p .machine
pivot_root . .machine
# As with systemd: host keys exist before sshd starts, and user data's commands run beside it.
exec chroot . sh -c '
umount -l /.machine
rmdir /.machine
"$PYTHON" -I "$FIRST_BOOT" init
[ "$BROKEN" != shutdown ] || : >/etc/no-shutdown
systemctl start-enabled
"$PYTHON" -I "$FIRST_BOOT" final &
exec /usr/sbin/sshd -D -e'
