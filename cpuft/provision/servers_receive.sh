# A file from standard input, there as a whole or not at all.
#   arguments: PREFIX/wheels/NAME SHA256
mkdir -p "${1%/*}"
: >>"${1%/*/*}/install.lock"
cat >"$1.part.$$"
echo "$2  $1.part.$$" | sha256sum --check --quiet
mv -f "$1.part.$$" "$1"
