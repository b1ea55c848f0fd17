# A folder for a new image: what carries the stamp, written first and whole at the end, is an image of ours or was to be.
#   arguments: ROOT STAMP
if [ -e "$1" ] && [ ! -f "$1/$2" ]; then
    echo "$1 is not cpuft's: move it away, or name another --output" >&2
    exit 1
fi
remove "$(dirname "$1")" "$1"
mkdir "$1" "$1/etc"
echo "{}" >"$1/$2"
