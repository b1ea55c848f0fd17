# list_files FOLDER: print the size and path of each file, but not of modules that a run has compiled since.
list_files() { (cd -- "$1" && find . -name __pycache__ -prune -o -type f -exec stat -c '%s %n' {} +) | LC_ALL=C sort; }
# has_bundle FOLDER: succeed if every file that was unpacked there is there and has its size.
# systemd-tmpfiles removes single files from /var/tmp, and a disk that was full leaves files that were cut off.
has_bundle() { [ -d "$1" ] && [ -f "$1.files" ] && [ -z "$(list_files "$1" | LC_ALL=C comm -13 - "$1.files")" ]; }
# store_bundle PART FOLDER: give an unpacked bundle its place, and note its files beside it.
# Of a bundle that lacks files, each file is replaced by itself, because another run may be reading them.
store_bundle() {
    list_files "$1" >"$1.files"
    if ! mv -T -- "$1" "$2" 2>/dev/null; then
        to=$(readlink -f -- "$2")
        (cd -- "$1" && find . -type d -exec mkdir -p -- "$to/{}" \; && find . -type f -exec mv -f -- {} "$to/{}" \;)
    fi
    mv -f -- "$1.files" "$2.files"
}
# keep_bundles FOLDER BUNDLE...: note that these bundles are used now, and remove those in FOLDER that no run has used
# for 30 days and that no process names. Access times keep systemd-tmpfiles away; changed ones would compile modules.
keep_bundles() {
    folder=$1
    shift
    for path; do
        [ ! -d "$path" ] || { find "$path" -type f -exec touch -ac -- {} +; touch -c -- "$path" "$path.files"; }
    done
    find "$folder" -mindepth 1 -maxdepth 1 -type d -user "$(id -u)" -mtime +30 |
        grep -E '/[0-9a-f]{24}(\.[A-Za-z0-9_]{6,8})?$' |
        while IFS= read -r path; do
            # The pattern comes from standard input, so that grep does not find it on its own command line.
            printf '%s' "$path" | grep -qsaF -f - /proc/[0-9]*/cmdline || remove "$folder" "$path" "$path.files"
        done
}
