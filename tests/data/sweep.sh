#!/usr/bin/env bash
set -eu
# 6 runs; at the same time on: a1; a2
cpuft launch --hostfile=/work/hosts --no-check --task=files --train-file=a.csv --text-columns=a,b --no-fast-path --np=2 --ppn=2 --seed=1 --lora-rank=0 --run-dir /work/s/run-1
cpuft launch --hostfile=/work/hosts --no-check --task=files --train-file=a.csv --text-columns=a,b --no-fast-path --np=2 --ppn=2 --seed=2 --lora-rank=0 --run-dir /work/s/run-2
cpuft launch --hostfile=/work/hosts --no-check --task=files --train-file=a.csv --text-columns=a,b --no-fast-path --np=2 --ppn=2 --seed=1 --lora-rank=8 --learning-rate=3e-4 --run-dir /work/s/run-3
cpuft launch --hostfile=/work/hosts --no-check --task=files --train-file=a.csv --text-columns=a,b --no-fast-path --np=2 --ppn=2 --seed=2 --lora-rank=8 --learning-rate=3e-4 --run-dir /work/s/run-4
cpuft launch --hostfile=/work/hosts --no-check --task=files --train-file=a.csv --text-columns=a,b --no-fast-path --np=2 --ppn=2 --seed=1 --lora-rank=16 --learning-rate=3e-4 --run-dir /work/s/run-5
cpuft launch --hostfile=/work/hosts --no-check --task=files --train-file=a.csv --text-columns=a,b --no-fast-path --np=2 --ppn=2 --seed=2 --lora-rank=16 --learning-rate=3e-4 --run-dir /work/s/run-6
