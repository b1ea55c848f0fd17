"""Run by mpirun: a rank of `cpuft predict` on several hosts. Its arguments are those of embed_on_hosts.

Only rank 0 is told which file it is. The rank that FAILING_RANK names fails with its second window.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from cpuft.train import embed_on_hosts, embedder

own, calls = embedder.Embedder.embed_encoded, list[Any]()


def fail(*words: Any) -> Any:
    calls.append(words)
    if len(calls) == 2:
        raise MemoryError("a rank without memory")
    return own(*words)


if os.environ["PMI_RANK"] == os.environ.get("FAILING_RANK"):
    setattr(embedder.Embedder, "embed_encoded", fail)  # noqa: B010
if os.environ["PMI_RANK"] != "0":
    sys.argv.append("--file=none")
embed_on_hosts.main()
