#!/usr/bin/env bash
set -euo pipefail
# made for a test
echo 'cpuft: make room' >&2
mkdir -p /run/logs </dev/null
pids=()
echo 'cpuft: greet a' >&2
# A: two
ssh -F 'my config' a 'exec env '"'"'A=1 2'"'"' echo '"'"'hello there'"'"'' </dev/null &
pids+=("$!")
echo 'cpuft: greet b' >&2
# A: two
ssh -F 'my config' b 'exec env '"'"'A=1 2'"'"' echo '"'"'hello there'"'"'' </dev/null &
pids+=("$!")
for pid in "${pids[@]}"; do wait "$pid"; done
