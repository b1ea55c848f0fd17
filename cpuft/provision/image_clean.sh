# Removes what must not be in an image. With the host keys of the image, all hosts would have the same keys, and whoever
# can read the image would know them.
#   arguments: ROOT PREFIX
remove "$1" "$1$2/wheels" "$1$2/install.lock" "$1"/var/cache/apt/* "$1"/root/.cache "$1"/etc/ssh/ssh_host_*
for file in machine-id hostname resolv.conf; do rm -f "$1/etc/$file"; : >"$1/etc/$file"; done
