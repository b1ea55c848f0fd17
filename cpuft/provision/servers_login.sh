# Logs in to each host as mpirun does, 16 at a time, and prints a line "HOST REASON" for each that cannot be used.
#   arguments: SSH_CONFIG HOST...
config=$1 count=0
shift
for host; do
    {
        said=$(ssh -F "$config" "$host" true 2>&1 </dev/null) ||
            echo "$host $(printf '%s\n' "$said" | tail -n 1 | tr -d '\r')"
    } &
    count=$((count + 1))
    [ $((count % 16)) != 0 ] || wait
done
wait
