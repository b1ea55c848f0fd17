"""What a CPU is and what it multiplies fast: pure functions of what the kernel says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cpuft.errors import CpuftError

PRECISIONS = ("auto", "bf16", "fp32")
DECIDING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""CPU flags that decide how fast a product is."""
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # x86 in two forms, Arm's name for its own


class Cpu(NamedTuple):
    """A CPU's name, and the kernel's names of what it can do."""

    model: str
    flags: tuple[str, ...]


def parse_cpuinfo(text: str, machine: str) -> Cpu:
    """The first CPU of /proc/cpuinfo; its name is `machine`, as `uname -m` says it, where there is none."""
    lines = [line.partition(":") for line in text.splitlines()]
    found = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    flags = found.get("flags") or found.get("Features", "")
    return Cpu(found.get("model name") or machine, tuple(flags.split()))


def effective_flags(flags: tuple[str, ...], max_isa: str) -> tuple[str, ...]:
    """CPU flags that oneDNN may use when ONEDNN_MAX_CPU_ISA is `max_isa`: a limit below bf16 hides the bf16 flags.

    Source: oneDNN's documentation, "CPU dispatcher control".
    """
    limits = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16")
    hidden: tuple[str, ...] = ()
    if max_isa.upper() in limits:
        hidden = ("amx_bf16", "amx_tile", "amx_int8")
        hidden += () if max_isa.upper() == limits[-1] else ("avx512_bf16",)
    return tuple(flag for flag in flags if flag not in hidden)


def bf16_hardware(flags: tuple[str, ...]) -> str:
    """The flag by which this CPU multiplies bf16 natively: amx_bf16 before avx512_bf16; empty when it does not."""
    return next((flag for flag in _BF16_FLAGS if flag in flags), "")


@dataclass(frozen=True)
class Precision:
    """What products are computed in (bf16 or fp32), and why."""

    name: str
    reason: str


def choose_precision(wanted: str, emulate: bool, cpu_flags: tuple[str, ...]) -> Precision:
    """The precision of a run on a CPU with these (effective) flags; `wanted` is auto, bf16 or fp32.

    Raises CpuftError: bf16 asked for where the hardware lacks it, without leave to emulate it.
    """
    flag = bf16_hardware(cpu_flags)
    if wanted == "fp32":
        return Precision("fp32", "as you asked")
    if flag:
        return Precision("bf16", f"this CPU multiplies bf16 ({flag})")
    if wanted == "auto":
        return Precision("fp32", "this CPU has neither AMX nor AVX512_BF16")
    if not emulate:
        raise CpuftError(
            "this CPU has neither AMX nor AVX512_BF16, and bf16 would be slower than fp32: "
            "use --precision fp32, or insist with --emulate-bf16"
        )
    return Precision("bf16", "warning: emulated, this CPU has neither AMX nor AVX512_BF16: slower than fp32")
