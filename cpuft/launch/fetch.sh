part=$1.part run=$1; shift
mkdir -p "$part"
"$@" | tar -C "$part" -xf - || { rmdir "$part" 2>/dev/null; exit 1; }
rmdir "$part" 2>/dev/null || mv -T "$part" "$run"
