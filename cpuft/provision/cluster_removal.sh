directory=$1
shift
for file; do rm -f "$file"; rmdir "$(dirname "$file")" 2>/dev/null || true; done
remove "$(dirname "$directory")" "$directory" || exit 1
# Folders that only ever held clusters go with the last one.
case "$directory" in */cpuft/clusters/*) rmdir "${directory%/*}" "${directory%/*/*}" 2>/dev/null || true ;; esac
