# Every host makes keys of its own: those of an image would be the same on all of them, and known to its readers.
#   arguments: ROOT PREFIX
remove "$1" "$1$2/wheels" "$1$2/install.lock" "$1"/var/cache/apt/* "$1"/root/.cache "$1"/etc/ssh/ssh_host_*
for file in machine-id hostname resolv.conf; do rm -f "$1/etc/$file"; : >"$1/etc/$file"; done
