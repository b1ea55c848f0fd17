"""What a CPU is and what it multiplies fast: pure functions of what the kernel says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cpuft.errors import CpuftError

PRECISIONS = ("auto", "bf16", "fp32", "int8")
DECIDING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""CPU flags that decide how fast a product is."""
CLASSES = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512_BF16, no AMX",
    "avx512_vnni": "AVX-512 with VNNI, no bf16",
    "avx2": "AVX2 only",
}
"""CPUs by the fastest products that training can use: the flag that tells, and what people say."""
_OLD = ("amx_", "avx512")
_HIDDEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("SSE41", "AVX", "AVX2", "AVX2_VNNI"), _OLD),
    "AVX512_CORE": ("amx_", "avx512_bf16", "avx512_vnni"),
    "AVX512_CORE_VNNI": ("amx_", "avx512_bf16"),
    "AVX512_CORE_BF16": ("amx_",),
}
"""What flags begin with that are of no use under a limit of oneDNN's."""
_TARGETS = {
    "AVX2": "haswell",
    "AVX512_CORE": "skylake-avx512",
    "AVX512_CORE_VNNI": "cascadelake",
    "AVX512_CORE_BF16": "cooperlake",
}
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
    return tuple(flag for flag in flags if not flag.startswith(_HIDDEN.get(max_isa.upper(), ())))


def compiler_target(max_isa: str) -> str:
    """What a compiler's -march takes, so that its code keeps to ONEDNN_MAX_CPU_ISA, too."""
    return _TARGETS.get(max_isa.upper(), "native")


def cpu_class(flags: tuple[str, ...]) -> str:
    """The first of CLASSES whose flag is among a CPU's; empty for one that has none of them."""
    return next((flag for flag in CLASSES if flag in flags), "")


def bf16_hardware(flags: tuple[str, ...]) -> str:
    """The flag by which this CPU multiplies bf16 natively: amx_bf16 before avx512_bf16; empty when it does not."""
    return next((flag for flag in _BF16_FLAGS if flag in flags), "")


@dataclass(frozen=True)
class Precision:
    """What products are computed in (bf16, fp32 or int8), and why."""

    name: str
    reason: str


def choose_precision(wanted: str, emulate: bool, cpu_flags: tuple[str, ...]) -> Precision:
    """The precision of a run on a CPU with these (effective) flags; `wanted` is one of PRECISIONS.

    Raises CpuftError: bf16 asked for where the hardware lacks it, without leave to emulate it.
    """
    flag = bf16_hardware(cpu_flags)
    if wanted == "fp32":
        return Precision("fp32", "as you asked")
    if wanted == "int8":
        return Precision("int8", _judge_int8(flag, cpu_flags))
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


def _judge_int8(bf16_flag: str, cpu_flags: tuple[str, ...]) -> str:
    """What 8-bit products are worth on such a CPU."""
    if bf16_flag:
        return f"warning: bf16, which this CPU multiplies ({bf16_flag}), is as fast or faster"
    vnni = next((flag for flag in ("avx512_vnni", "avx_vnni") if flag in cpu_flags), "")
    return f"as you asked; this CPU multiplies 8-bit numbers ({vnni})" if vnni else "as you asked; this CPU has no VNNI"
