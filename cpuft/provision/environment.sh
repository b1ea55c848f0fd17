# Installs the training environment at PREFIX/env: from the wheels in PREFIX/wheels, or from a package index if that has
# no pip wheel.
#   arguments: PREFIX STAMP PIN...
prefix=$1 stamp=$2
shift 2
# The lock and the stamp show that this script made the environment. Nothing else is ever removed.
if [ -e "$prefix/env" ] && [ ! -f "$prefix/install.lock" ] && [ ! -f "$prefix/env/stamp" ]; then
    echo "$prefix/env is not cpuft's: move it away, or give another prefix" >&2
    exit 1
fi
mkdir -p "$prefix"
# python -m and -c import modules from the working directory, where others may be able to write.
cd "$prefix"
prefix=$PWD
# A run that was killed may still be installing here: wait for it, and keep what it has installed.
exec 9>"$prefix/install.lock"
flock -w 600 9
[ "$(cat "$prefix/env/stamp" 2>/dev/null || true)" != "$stamp" ] || exit 0
remove "$prefix" "$prefix/env"
pip=$(ls "$prefix"/wheels/pip-*.whl 2>/dev/null | tail -n 1)
python3 -m venv ${pip:+--without-pip} "$prefix/env"
# pip accepts hashes only in a requirements file. If one pin has a hash, pip requires a hash of every pin.
printf '%s\n' "$@" >"$prefix/env/pins.txt"
set -- install --quiet --find-links "$prefix/wheels" -r "$prefix/env/pins.txt"
if [ -n "$pip" ]; then
    "$prefix/env/bin/python" "$pip/pip" "$@" --no-index
else
    "$prefix/env/bin/python" -m pip "$@"
fi
echo "$stamp" >"$prefix/env/stamp"
