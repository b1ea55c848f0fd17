# Write the newest checkpoint of a run, and that of its best evaluation, to standard output as a tar archive.
# $1: the folder of the checkpoints, which may not exist; the others: names of checkpoints that the receiver has already.
folder=$1
shift
set -- "" "$@" ""
have="$*"
newest() { ls -- "$folder/$1" 2>/dev/null | grep -xE '[0-9]+\.[0-9]+' | sort -n | tail -n 1; }
last=$(newest .) best=$(newest best)
case $have in *" $last "*) last='' ;; esac
case $have in *" best/$best "*) best='' ;; esac
[ "$last$best" ] || exec tar -cf - -T /dev/null
# The ranks may remove the checkpoint while it is sent. Links keep its files until then.
rm -rf -- "$folder"/copy.*
part=$(mktemp -d "$folder/copy.XXXXXX") || exit 1
trap 'rm -rf -- "$part"' EXIT
trap 'exit 1' HUP INT TERM PIPE
[ -z "$last" ] || cp -rl -- "$folder/$last" "$part/" || exit 1
[ -z "$best" ] || { mkdir "$part/best" && cp -rl -- "$folder/best/$best" "$part/best/"; } || exit 1
# tar ends with 1 if a file has changed while it was read, as the number of its links does. The content never changes.
tar -C "$part" --hard-dereference --warning=no-file-changed -cf - . || [ $? = 1 ]
