#!/usr/bin/env bash
set -eu
# 6 runs; at the same time on: this machine
# 2 more of 3 configurations are chosen by Optuna while the sweep runs
cpuft launch --task=mrpc --eval-every=10 --np=1 --learning-rate=4.88e-05 --seed=1 --run-dir /work/s/run-1
cpuft launch --task=mrpc --eval-every=10 --np=1 --learning-rate=4.88e-05 --seed=2 --run-dir /work/s/run-2
