# The training environment at PREFIX/env, from the wheels in PREFIX/wheels or, without those, from a package index.
#   arguments: PREFIX STAMP PIN...
prefix=$1 stamp=$2
shift 2
# Only what this script has made is ever taken away: its lock and its stamp are the marks.
if [ -e "$prefix/env" ] && [ ! -f "$prefix/install.lock" ] && [ ! -f "$prefix/env/stamp" ]; then
    echo "$prefix/env is not cpuft's: move it away, or name another prefix" >&2
    exit 1
fi
mkdir -p "$prefix"
# Python's -m and -c import from the working folder, where others may write.
cd "$prefix"
prefix=$PWD
# A run that was killed may still be installing here: wait for it, and keep what it has done.
exec 9>"$prefix/install.lock"
flock -w 600 9
[ "$(cat "$prefix/env/stamp" 2>/dev/null || true)" != "$stamp" ] || exit 0
remove "$prefix" "$prefix/env"
pip=$(ls "$prefix"/wheels/pip-*.whl 2>/dev/null | tail -n 1)
if [ -n "$pip" ]; then
    python3 -m venv --without-pip "$prefix/env"
    "$prefix/env/bin/python" "$pip/pip" install --quiet --no-index --find-links "$prefix/wheels" "$@"
else
    python3 -m venv "$prefix/env"
    # As a file, because only there may pins have hashes: if one has, pip requires one of each.
    printf '%s\n' "$@" >"$prefix/env/pins.txt"
    "$prefix/env/bin/python" -m pip install --quiet --find-links "$prefix/wheels" -r "$prefix/env/pins.txt"
fi
echo "$stamp" >"$prefix/env/stamp"
