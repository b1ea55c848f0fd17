# Print which of some folders are missing. $1: this user's folder; the others: the folders of bundles.
for folder in "$1" "$1/inputs"; do
    [ ! -e "$folder" ] && [ ! -L "$folder" ] || private "$folder" || exit 1
done
shift
for path; do test -d "$path" || echo "$path"; done
