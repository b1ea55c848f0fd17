"""glibc's allocator, told to keep what a training step frees: the next step asks for the same again."""

from __future__ import annotations

import ctypes

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = -1
_HEAD_ROOM = 64 << 20


def keep_freed_memory() -> bool:
    """Stop malloc from returning big blocks to the kernel. True where that was possible (glibc, not preloaded over).

    By default each block above 32 MB is mapped anew and each free top of the heap goes back, so that every step takes
    page faults for all its activations and gradients. Memory that the process freed stays with it: its peak is the
    same, its resident size does not fall after the peak.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _HEAD_ROOM))
    accepted = [mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings]
    return all(accepted)
