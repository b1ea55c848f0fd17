#!/usr/bin/env bash
set -euo pipefail
# made for a test
# make room
mkdir -p /run/logs
pids=()
# greet a
ssh -o BatchMode=yes a 'A='"'"'1 2'"'"' echo '"'"'hello there'"'"'' &
pids+=("$!")
# greet b
ssh -o BatchMode=yes b 'A='"'"'1 2'"'"' echo '"'"'hello there'"'"'' &
pids+=("$!")
for pid in "${pids[@]}"; do wait "$pid"; done
