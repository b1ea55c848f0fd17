#!/bin/sh
# One simulated host: a process with its own namespaces, connected to the cluster's bridge by a veth pair.
#
#   simulated_node.sh up|down|pause|resume|crash|cut|join
#
# Its parameters come from the environment:
#   NODE NODE_DIR NODE_HOSTS NODE_KEYS   hostname, directory of its own files, its /etc/hosts, its authorized_keys
#   NODE_ADDRESS NODE_MAC                address with prefix length, MAC address
#   NODE_LINK NODE_BRIDGE                this machine's end of its network link, the bridge
#   NODE_CGROUPS NODE_CPUS NODE_QUOTA    control groups (separated by spaces), hardware threads, CPU time in
#                                        microseconds and the period (empty: no limit)
#   NODE_RATE NODE_SHM                   rate of the link as tc writes it (empty: no limit), size of /dev/shm
#   NODE_IMAGE NODE_CONTENTS             root filesystem (empty: this machine's), hash of its contents
#   NODE_CLUSTER NODE_THERE              the cluster's files, and where they go on its own disk (empty: nowhere)
#   NODE_BOOTED                          hash of all settings that are read only at its start
#
# It does not use `ip netns`, which leaves a mount behind: these namespaces end with their process.
set -eu

wait_for() {
    what=$1
    shift
    left=100
    until "$@" >/dev/null 2>&1; do
        left=$((left - 1))
        if [ "$left" -le 0 ]; then
            echo "$NODE: waited 10 s for $what" >&2
            tail -n 5 "$NODE_DIR/log" >&2 || true
            exit 1
        fi
        sleep 0.1
    done
}

up() {
    down
    mkdir -p "$NODE_DIR"
    echo "$NODE_BOOTED" >"$NODE_DIR/booted"
    for group in $NODE_CGROUPS; do mkdir -p "$group"; done
    setsid sh "$0" hold </dev/null >"$NODE_DIR/log" 2>&1 &
    wait_for "its first process" test -s "$NODE_DIR/pid"
    # The same MAC address after every start: the neighbours' ARP caches remember it.
    ip link add dev "$NODE_LINK" type veth peer name eth0 address "$NODE_MAC" netns "$(cat "$NODE_DIR/pid")"
    ip link set dev "$NODE_LINK" master "$NODE_BRIDGE" up
    limit
}

# Limits both ends of the link, so that a host neither sends nor receives faster.
limit() {
    for group in $NODE_CGROUPS; do
        if [ -e "$group/cpu.max" ]; then
            echo "${NODE_QUOTA:-max 100000}" >"$group/cpu.max"
        elif [ -e "$group/cpu.cfs_quota_us" ]; then
            echo -1 >"$group/cpu.cfs_quota_us"
            [ -z "$NODE_QUOTA" ] || echo "${NODE_QUOTA#* }" >"$group/cpu.cfs_period_us"
            [ -z "$NODE_QUOTA" ] || echo "${NODE_QUOTA% *}" >"$group/cpu.cfs_quota_us"
        fi
    done
    shape "$NODE_LINK" tc
    shape eth0 nsenter --target "$(cat "$NODE_DIR/pid")" --net tc
}

shape() {
    device=$1
    shift
    if [ -n "$NODE_RATE" ]; then
        "$@" qdisc replace dev "$device" root tbf rate "$NODE_RATE" burst 256kb latency 50ms
    else
        "$@" qdisc delete dev "$device" root 2>/dev/null || true
    fi
}

hold() {
    for group in $NODE_CGROUPS; do echo $$ >"$group/cgroup.procs"; done
    taskset -cp "$NODE_CPUS" $$ >/dev/null
    NODE_FIRST_PID=$$
    export NODE_FIRST_PID
    exec unshare --net --mount --uts --ipc --pid --fork --kill-child --mount-proc sh "$0" boot
}

boot() {
    hostname "$NODE"
    echo "$NODE" >"$NODE_DIR/hostname"
    echo "$NODE_FIRST_PID" >"$NODE_DIR/pid.tmp"
    mv "$NODE_DIR/pid.tmp" "$NODE_DIR/pid"
    wait_for "its network link" ip link show dev eth0
    ip link set dev lo up
    ip address add "$NODE_ADDRESS" dev eth0
    ip link set dev eth0 up
    root=
    [ -z "$NODE_IMAGE" ] || mount_image
    mount_system
    if [ -n "$root" ]; then
        cat "$NODE_HOSTS" >"$root/etc/hosts"
        cat "$NODE_DIR/hostname" >"$root/etc/hostname"
        [ -z "$NODE_THERE" ] || install -D --mode=600 --target-directory="$root$NODE_THERE" \
            "$NODE_CLUSTER"/there/* "$NODE_CLUSTER/id_ed25519"
    else
        mount --bind "$NODE_HOSTS" /etc/hosts
        [ ! -e /etc/hostname ] || mount --bind "$NODE_DIR/hostname" /etc/hostname
    fi
    # Copied by way of /dev/shm, because the files themselves may be below /run, which is mounted next.
    mkdir -m 700 "$root/dev/shm/etc"
    cp "$NODE_KEYS" "$NODE_DIR/host_key" "$NODE_DIR/sshd_config" "$root/dev/shm/etc"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mkdir "$root/run/sshd"
    mv "$root/dev/shm/etc" "$root/run/cpuft"
    serve="exec /usr/sbin/sshd -D -e -f /run/cpuft/sshd_config"
    [ -n "$root" ] || exec sh -c "$serve"
    cd "$root"
    mkdir -p .machine
    pivot_root . .machine
    exec chroot . sh -c "umount -l /.machine; rmdir /.machine; $serve"
}

# Mounts the host's disk, an overlay of the golden image and what the host has written. Like a disk, it survives a
# crash.
mount_image() {
    root=$NODE_DIR/root
    if [ "$(cat "$NODE_DIR/contents" 2>/dev/null)" != "$NODE_IMAGE $NODE_CONTENTS" ]; then
        case "$NODE_DIR" in "$NODE_CLUSTER"/nodes/[1-9]*) ;; *) exit 1 ;; esac
        rm -rf --one-file-system --preserve-root=all "$NODE_DIR/upper" "$NODE_DIR/work"
        echo "$NODE_IMAGE $NODE_CONTENTS" >"$NODE_DIR/contents"
    fi
    mkdir -p "$root" "$NODE_DIR/upper" "$NODE_DIR/work"
    mount -t overlay -o "lowerdir=$NODE_IMAGE,upperdir=$NODE_DIR/upper,workdir=$NODE_DIR/work" overlay "$root"
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    mkdir "$root/dev/shm" "$root/dev/pts"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    for device in null zero full random urandom tty; do
        : >"$root/dev/$device"
        mount --bind "/dev/$device" "$root/dev/$device"
    done
}

# Mounts a /sys that shows this host's interfaces and CPU limit, and a /dev/shm that no other host sees.
mount_system() {
    mount -t tmpfs -o "size=$NODE_SHM,mode=1777" tmpfs "$root/dev/shm"
    group_here=$root/dev/shm/group
    mkdir "$group_here"
    for group in $NODE_CGROUPS; do
        [ ! -e "$group/cpu.stat" ] || mount --bind "$group" "$group_here"
    done
    mount -t sysfs sysfs "$root/sys"
    target=$root/sys/fs/cgroup
    if [ -e "$group_here/cpu.cfs_quota_us" ]; then
        mount -t tmpfs tmpfs "$target"
        target=$target/cpu
        mkdir "$target"
    fi
    mount --bind "$group_here" "$target"
    umount -l "$group_here"
    rmdir "$group_here"
}

# In cgroup v1, SIGKILL ends a frozen process only after it is thawed, so this resumes the host first.
down() {
    resume
    crash
    ip link delete dev "$NODE_LINK" 2>/dev/null || true
    for group in $NODE_CGROUPS; do
        [ ! -d "$group" ] || wait_for "$group to empty" rmdir "$group"
    done
    rm -f "$NODE_DIR/pid" "$NODE_DIR/log" "$NODE_DIR/hostname" "$NODE_DIR/booted"
}

# The process number may have been reused: only a process that runs this file's `unshare` is a host.
kill_first_process() {
    if tr '\0' ' ' <"/proc/$1/cmdline" 2>/dev/null | grep -q "^unshare .* boot "; then
        kill -KILL "$1" 2>/dev/null || true
        wait_for "its processes to end" sh -c "! kill -0 $1"
    fi
}

freeze() {
    for group in $NODE_CGROUPS; do
        [ ! -e "$group/cgroup.freeze" ] || echo "$1" >"$group/cgroup.freeze"
        [ ! -e "$group/freezer.state" ] || echo "$2" >"$group/freezer.state"
    done
}

pause() { freeze 1 FROZEN; }
resume() { freeze 0 THAWED; }
cut() { ip link set dev "$NODE_LINK" down; }
join() { ip link set dev "$NODE_LINK" up; }
crash() {
    [ ! -s "$NODE_DIR/pid" ] || kill_first_process "$(cat "$NODE_DIR/pid")"
    for group in $NODE_CGROUPS; do
        # Files of the kernel always have size 0, so that test -s would not work.
        [ ! -e "$group/cgroup.procs" ] || xargs -r kill -KILL <"$group/cgroup.procs" 2>/dev/null || true
    done
}

"$1"
