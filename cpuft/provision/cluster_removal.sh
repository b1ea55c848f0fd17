directory=$1
shift
for file; do rm -f "$file"; rmdir "$(dirname "$file")" 2>/dev/null || true; done
remove "$(dirname "$directory")" "$directory" || exit 1
# Remove the folders of all clusters with the last cluster.
case "$directory" in */cpuft/clusters/*) rmdir "${directory%/*}" "${directory%/*/*}" 2>/dev/null || true ;; esac
