#!/bin/sh
# `systemctl` of an instance, as far as user data needs it: enabled units are started once, and at every boot.
wanted=/etc/systemd/system/multi-user.target.wants
start() { sh -c "$(sed -n 's/^ExecStart=//p' "/etc/systemd/system/$1")"; }
verb=$1
shift
case "$verb" in
daemon-reload) ;;
enable)
    now=
    [ "$1" != --now ] || { now=yes && shift; }
    mkdir -p "$wanted"
    for unit; do
        ln -sf "../$unit" "$wanted/$unit"
        [ -z "$now" ] || start "$unit"
    done
    ;;
disable) for unit; do rm -f "$wanted/$unit"; done ;;
start) for unit; do start "$unit"; done ;;
start-enabled) for path in "$wanted"/*.service; do [ ! -e "$path" ] || start "${path##*/}"; done ;;
*)
    echo "systemctl $verb: no instance of a bottle knows that" >&2
    exit 1
    ;;
esac
