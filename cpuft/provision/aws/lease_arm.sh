#!/bin/sh
# cpuft-lease [renew]: schedules the shutdown at the end of the lease. With `renew` it first extends the lease, as far
# as the limit allows, and prints the end of the lease and the limit.
until=$(cat /var/lib/cpuft/until) now=$(date +%s)
if [ "${1:-}" = renew ]; then
    limit=$(cat /var/lib/cpuft/limit 2>/dev/null || echo "$until")
    # 15 minutes from now: jobs renew every five minutes.
    wanted=$((now + 900 < limit ? now + 900 : limit))
    [ "$wanted" -gt "$until" ] || { echo "$until $limit"; exit 0; }
    echo "$wanted" >/var/lib/cpuft/until.new && mv /var/lib/cpuft/until.new /var/lib/cpuft/until || exit 1
    until=$wanted
    echo "$until $limit"
fi
# `shutdown` takes whole minutes: rounding down makes the instance terminate before its lease ends, never after it.
left=$(((until - now) / 60))
shutdown -c 2>/dev/null
[ "$left" -gt 0 ] || exec shutdown -P now
exec shutdown -P "+$left"
