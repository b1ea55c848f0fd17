# What instances are told at birth: standard input, and behind it their host key, which no plan may show.
#   arguments: HOST_KEY PATH
set -eu
umask 077
{
    cat
    echo 'ssh_keys:'
    printf '  ecdsa_public: "%s"\n' "$(cat "$1.pub")"
    echo '  ecdsa_private: |'
    sed 's/^/    /' "$1"
} >"$2.new"
mv -f "$2.new" "$2"
