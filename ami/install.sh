#!/bin/sh
# Made from recipe.yaml by `cpuft provision recipe`: change that, not this. Run it as root.
set -eu
missing=
need() { dpkg -s "$1" >/dev/null 2>&1 || missing="$missing $1"; }
# hosts with internet fetch from package indexes
need ca-certificates
# the doctor looks at interfaces, local clusters shape them
need iproute2
# keeps freed blocks; some 6 % of a training step
need libtcmalloc-minimal4
# mpirun starts ranks by ssh
need openssh-client
# mpirun starts ranks by ssh
need openssh-server
# runs the training environment
need python3
# makes the environment where wheels come from an index
need python3-venv
[ -z "$missing" ] || { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $missing; }
# fast fabrics register buffers, which locks them; every rank is a connection to every other
mkdir -p /etc/security/limits.d
printf %s '* - memlock unlimited
* - nofile 65536
' >/etc/security/limits.d/cpuft.conf
# keys only; all hosts connect at once; sessions of a host that was lost end within 15 s
mkdir -p /etc/ssh/sshd_config.d
printf %s 'PasswordAuthentication no
MaxStartups 100:30:300
MaxSessions 100
ClientAliveInterval 5
ClientAliveCountMax 3
' >/etc/ssh/sshd_config.d/cpuft.conf
# room for gradients in flight; a rank that swaps holds up all others
mkdir -p /etc/sysctl.d
printf %s 'net.core.rmem_max = 16777216
net.core.wmem_max = 16777216
vm.swappiness = 1
' >/etc/sysctl.d/90-cpuft.conf
# large tensors on huge pages; cores that wait for the network keep their clock
mkdir -p /etc/tmpfiles.d
printf %s 'w /sys/kernel/mm/transparent_hugepage/enabled - - - - madvise
w /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor - - - - performance
' >/etc/tmpfiles.d/cpuft.conf
