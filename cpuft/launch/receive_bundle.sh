# Store the tar archive on standard input as a folder. $1: this user's folder; $2: the bundle's folder.
# It is unpacked beside its place and renamed, so that a new bundle is complete or does not exist.
private "$1"
private "$1/inputs"
mkdir -p "${2%/*}"
part=$(mktemp -d "$2.XXXXXX")
trap 'remove "${2%/*}" "$part" "$part.files"' EXIT
tar -C "$part" -xof -
case $2 in
"$1/inputs"/*) store_bundle "$part" "$2" ;;
*) mv -T "$part" "$2" 2>/dev/null || test -d "$2" ;; # a checkpoint, which has checksums of its own
esac
