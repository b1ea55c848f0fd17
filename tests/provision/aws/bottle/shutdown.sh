#!/bin/sh
# `shutdown` of an instance: now, in some minutes, or cancelled. The power is off when the first process ends.
pending=/run/shutdown.pid
[ ! -e "$pending" ] || kill "$(cat "$pending")" 2>/dev/null
rm -f "$pending" /run/systemd/shutdown/scheduled
[ ! -e /etc/no-shutdown ] || exit 1
minutes=1
for word; do
    case "$word" in
    -c) exit 0 ;;
    now) minutes=0 ;;
    +*) minutes=${word#+} ;;
    esac
done
# As logind of systemd does.
mkdir -p /run/systemd/shutdown
printf 'USEC=%s000000\nWARN_WALL=1\nMODE=poweroff\n' "$(($(date +%s) + minutes * 60))" >/run/systemd/shutdown/scheduled
echo "shutdown in $minutes min" >>/proc/1/fd/2
setsid sh -c 'sleep "$1"; kill -TERM 1' shutdown "$((minutes * 60))" </dev/null >/dev/null 2>&1 &
echo $! >"$pending"
