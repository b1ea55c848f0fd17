# Makes an empty directory for a new image. The stamp file marks it as cpuft's from the start.
#   arguments: ROOT STAMP
if [ -e "$1" ] && [ ! -f "$1/$2" ]; then
    echo "$1 is not cpuft's: move it away, or give another --output" >&2
    exit 1
fi
remove "$(dirname "$1")" "$1"
mkdir "$1" "$1/etc"
echo "{}" >"$1/$2"
