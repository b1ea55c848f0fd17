# What this job began goes on from its checkpoint, once it came so far that it can be resumed; else it begins anew.
set -- --run-dir "$run"
if [ "$again" ] && [ -s "$run/$proof" ]; then
    set -- --resume "$run" --run-dir ''
elif [ "$again" ] && [ -d "$run/logs" ]; then
    mv "$run" "$run-$(date +%s)" || exit 1
fi
