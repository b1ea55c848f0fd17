private "$1"
private "$1/inputs"
part=$(mktemp -d "$2.XXXXXX")
trap 'remove "$1/inputs" "$part"' EXIT
tar -C "$part" -xof -
mv -T "$part" "$2" 2>/dev/null || test -d "$2"
