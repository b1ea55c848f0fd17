# Prints the end of the lease that an instance knows, and its scheduled shutdown: systemd's file `scheduled` exists only
# while one is scheduled.
echo "until $(cat /var/lib/cpuft/until 2>/dev/null)"
sed -n 's/^USEC=/usec /p; s/^MODE=/mode /p' /run/systemd/shutdown/scheduled 2>/dev/null
[ ! -e /etc/systemd/system/multi-user.target.wants/cpuft-lease.service ] || echo "enabled yes"
