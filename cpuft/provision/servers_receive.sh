# Stores a wheel from standard input. The file appears only when it is complete and its hash is right.
#   arguments: PREFIX/wheels/NAME SHA256
mkdir -p "${1%/*}"
: >>"${1%/*/*}/install.lock"
part=$1.part.$(uname -n).$$ # hosts may share a disk
cat >"$part"
echo "$2  $part" | sha256sum --check --quiet
mv -f "$part" "$1"
# pip chooses among wheels of one version by their tags, and so could install an earlier one of this cpuft.
case "${1##*/}" in
    cpuft-*)
        for other in "${1%/*}"/cpuft-*.whl; do [ "$other" = "$1" ] || rm -f -- "$other"; done
        ;;
esac
