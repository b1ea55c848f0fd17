#!/bin/sh
# Runs image_prove.sh inside an image: in namespaces of its own, so without a network and without the files of this
# machine.
#
#   unshare --net --mount --pid --uts --ipc --fork --kill-child image_check.sh ROOT PYTHON PROVE
set -eu
root=$1 python=$2
hostname image
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
for folder in dev/shm tmp run var/tmp root; do mount -t tmpfs tmpfs "$root/$folder"; done
ip link set dev lo up
exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -c "$3" prove "$python"
