# A restarted job resumes its run if the run has got far enough: $run/$progress is there, or a copy of a checkpoint.
# Otherwise the run starts again, and what an earlier start left is moved aside.
set -- --run-dir "$run"
if [ "$restarted" ] && { [ -s "$run/$progress" ] || [ -d "$run/checkpoints" ]; }; then
    set -- --resume "$run" --run-dir ''
elif [ "$restarted" ] && { [ -d "$run/logs" ] || [ -e "$run/state.json" ]; }; then
    mv "$run" "$run-$(date +%s)" || exit 1
fi
