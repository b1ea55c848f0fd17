# Write the newest checkpoint of a run, and that of its best evaluation, to standard output as a tar archive.
# $1: the folder of the checkpoints, which may not exist; the others: names of checkpoints that the receiver has already.
folder=$1
shift
set -- "" "$@" ""
have="$*"
newest() { ls -- "$folder/$1" 2>/dev/null | grep -xE '[0-9]+\.[0-9]+' | sort -n | tail -n 1; }
last=$(newest .) best=$(newest best)
set --
[ -z "$last" ] || case $have in *" $last "*) ;; *) set -- "./$last" ;; esac
[ -z "$best" ] || case $have in *" best/$best "*) ;; *) set -- "$@" "./best/$best" ;; esac
[ $# -gt 0 ] || exec tar -cf - -T /dev/null
exec tar -C "$folder" --hard-dereference -cf - "$@" 2>/dev/null
