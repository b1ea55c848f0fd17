#!/bin/sh
# A step of the Containerfile: installs into the environment $1 what cpuft needs, but not cpuft, and removes what only
# compiling and testing need. The headers of oneCCL are moved to $2. The same packages make the same files, so that the
# layer of an image changes only if a package does.
set -eu
env=$1 headers=$2
# An empty cpuft: another version of cpuft is no reason to install the packages again.
echo '__version__ = "0"' >cpuft/__init__.py
PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=0 VENV=$env scripts/install train,mpi,ccl,demo,sweep
"$env/bin/python" -m pip uninstall --quiet --yes cpuft
mkdir -p "$headers"
mv "$env/include" "$headers/include"
ln -s "$env/lib" "$headers/lib"
# Of MPI: benchmarks, a tuner, Fortran, and a way to start ranks that is used only if I_MPI_MPCP is set.
rm -rf "$env"/.installed-* "$env"/bin/IMB-* "$env/opt/mpi/tune_fast" "$env"/lib/libmpcp* "$env"/lib/libmpifort*
find "$env/lib" -name '*.a' -delete
cd "$env"/lib/python3*/site-packages
rm -rf torch/include torch/test pyarrow/include pyarrow/*flight*
# Wheels hold no links: some libraries are there under each of their names.
for folder in "$env/lib" pyarrow; do
    sha256sum "$folder"/lib*.so* | sort | while read -r sum file; do
        if [ "$sum" = "${last:-}" ]; then ln -sf "${kept##*/}" "$file"; else last=$sum kept=$file; fi
    done
done
strip --strip-unneeded torch/lib/libtorch_*.so pyarrow/lib*.so.*
find numpy pandas pyarrow scipy sklearn sympy -type d -name tests -prune -exec rm -r {} +
# Users who cannot write here need modules that are compiled: those that training imports. They are known by their
# contents, because pip gives files new times.
find . -name __pycache__ -prune -exec rm -r {} +
"$env/bin/python" -B -c '
import py_compile, sys
import accelerate, click, datasets, mpi4py.MPI, optuna, paramiko, peft, rich.live, sklearn.linear_model, torch, yaml
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification, Trainer
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
for module in list(sys.modules.values()):
    file = getattr(module, "__file__", None) or ""
    if file.startswith(sys.prefix) and file.endswith(".py"):
        py_compile.compile(file, invalidation_mode=mode)
'
find "$env" -exec touch --no-dereference --date=@0 {} +
