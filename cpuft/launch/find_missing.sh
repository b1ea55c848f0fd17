# Print which of some folders are missing or lack files. $1: this user's folder; the others: the folders of bundles.
for folder in "$1" "$1/inputs"; do
    [ ! -e "$folder" ] && [ ! -L "$folder" ] || private "$folder" || exit 1
done
shift
for path; do has_bundle "$path" || echo "$path"; done
