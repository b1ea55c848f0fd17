remove() {
    root=$(readlink -f -- "$1") || root=/
    home=$(readlink -f -- "${HOME:-/}") || home=/
    shift
    for path; do
        [ -e "$path" ] || [ -L "$path" ] || continue
        real=$(readlink -f -- "$path") || real=/
        case "$home/" in "$real"/*) real=/ ;; esac
        case "$real" in
            "$root"/?*) rm -rf --one-file-system --preserve-root=all -- "$path" || failed=1 ;;
            *) echo "$path is not below $root, or holds a home: it stays" >&2; return 1 ;;
        esac
    done
    return "${failed:-0}"
}
