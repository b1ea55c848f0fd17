# Writes the user data of instances: standard input, then the host key, which must not be shown in a plan.
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
