# Write a run folder without its checkpoints to standard output, as a tar archive. $1: the folder; it may not exist.
# The supervisor holds the lock until the last rank has ended. A run that rejected its input has removed its folder.
flock -w 15 "$1.lock" true || { echo "the run is still active there" >&2; exit 1; }
test -d "$1" || exec tar -cf - -T /dev/null
exec tar -C "$1" --hard-dereference --exclude=./checkpoints -cf - .
