part=$1.part run=$1; shift
mkdir -p "$part"
"$@" | tar -C "$part" -xf - || { rmdir "$part" 2>/dev/null; exit 1; }
rmdir "$part" 2>/dev/null && exit
[ "$0" = merge ] && [ -d "$run" ] || exec mv -T "$part" "$run"
own=$run/logs
[ -d "$part/logs" ] || own=
for logs in ${own:+"$own"} "$part"/logs-*; do
    n=1; while [ -e "$run/logs-$n" ]; do n=$((n+1)); done
    [ ! -d "$logs" ] || mv -T "$logs" "$run/logs-$n"
done
cp -alT --remove-destination "$part" "$run" 2>/dev/null || cp -aT --remove-destination "$part" "$run"
rm -rf "$part"
