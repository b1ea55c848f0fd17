# Notes the end of the lease and its limit on an instance, and schedules its shutdown, also after a reboot.
#   arguments: UNTIL LIMIT, in seconds since the epoch, and the text of lease_arm.sh
set -eu
put() {
    mkdir -p "${1%/*}"
    printf '%s\n' "$2" >"$1.new"
    chmod "$3" "$1.new"
    mv -f "$1.new" "$1"
}
put /var/lib/cpuft/until "$1" 644
put /var/lib/cpuft/limit "$2" 644
put /usr/local/sbin/cpuft-lease "$3" 755
put /etc/systemd/system/cpuft-lease.service "[Unit]
Description=End of the lease of this instance
After=systemd-logind.service dbus.service

[Service]
Type=oneshot
ExecStart=/usr/local/sbin/cpuft-lease

[Install]
WantedBy=multi-user.target" 644
systemctl daemon-reload
systemctl enable cpuft-lease.service
exec /usr/local/sbin/cpuft-lease
