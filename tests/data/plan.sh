#!/usr/bin/env bash
set -euo pipefail
# made for a test
echo 'cpuft: make room' >&2
mkdir -p /run/logs
pids=()
echo 'cpuft: greet a' >&2
ssh -o BatchMode=yes a 'A='"'"'1 2'"'"' echo '"'"'hello there'"'"'' &
pids+=("$!")
echo 'cpuft: greet b' >&2
ssh -o BatchMode=yes b 'A='"'"'1 2'"'"' echo '"'"'hello there'"'"'' &
pids+=("$!")
for pid in "${pids[@]}"; do wait "$pid"; done
