"""CPU models, CPU flags and the precision that they are fast in, and constants of networks; pure functions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from cpuft.errors import CpuftError

PRECISIONS = ("auto", "bf16", "fp32", "int8")
"""The values of --precision."""
DECIDING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""CPU flags that decide how fast matrix products are."""
CLASSES = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512_BF16, no AMX",
    "avx512_vnni": "AVX-512 with VNNI, no bf16",
    "avx2": "AVX2 only",
}
"""Classes of CPUs, the fastest first: the flag that marks the class, and its description."""
ETHERNET = 1448 / 1538
"""Payload of a TCP segment divided by the bytes that its 1,500-byte frame takes on the wire: headers of IP and TCP with
time stamps, and Ethernet's header, preamble and gap (RFC 9293, IEEE 802.3)."""
CPU_SECONDS_PER_BYTE = 2e-9
"""Core seconds per byte that a rank sends in a ring: copies, TCP in the kernel, and the additions. `cpuft bench comm`
measures the value of your hosts for `cpuft estimate --link`."""
CPU_SECONDS_PER_MESSAGE = 1e-4
"""Core seconds of a rank for each message to its neighbour in a ring, whatever its size. In slow motion, updates of 10
small all-reduces between 8, 16 and 32 ranks took 31, 52 and 60 ms on an AMD EPYC (family 23, model 1)."""
_OLD = ("amx_", "avx512")
_HIDDEN: dict[str, tuple[str, ...]] = {
    "SSE41": ("amx_", "avx", "f16c", "fma"),
    "AVX": (*_OLD, "avx2", "avx_", "f16c", "fma"),
    **dict.fromkeys(("AVX2", "AVX2_VNNI"), _OLD),
    "AVX512_CORE": ("amx_", "avx512_bf16", "avx512_vnni"),
    "AVX512_CORE_VNNI": ("amx_", "avx512_bf16"),
    "AVX512_CORE_BF16": ("amx_",),
}
"""Value of ONEDNN_MAX_CPU_ISA -> prefixes of the CPU flags that oneDNN then does not use."""
_TARGETS = {
    "SSE41": ("x86-64", "sse2"),
    "AVX": ("sandybridge", "avx"),
    "AVX2": ("haswell", "avx2"),
    "AVX2_VNNI": ("haswell", "avx2"),
    "AVX512_CORE": ("skylake-avx512", "avx512vl"),
    "AVX512_CORE_VNNI": ("cascadelake", "avx512_vnni"),
    "AVX512_CORE_BF16": ("cooperlake", "avx512_bf16"),
}
"""Value of ONEDNN_MAX_CPU_ISA -> value of -march within this limit, and the flag of CPUs that run such code."""
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # x86 in two forms, Arm's name for its own


class Cpu(NamedTuple):
    """What /proc/cpuinfo says about a CPU."""

    model: str
    """Its name with family and model number, such as "AMD EPYC (family 26, model 2)": clouds hide the rest of a name,
    so that CPUs of different generations have the same one."""
    flags: tuple[str, ...]
    """Its instruction sets, such as avx2."""


def parse_cpuinfo(text: str, machine: str) -> Cpu:
    """Return model and flags of the first CPU in the text of /proc/cpuinfo.

    Without a model name there, the CPU is called `machine` (as in uname -m). Family and model number are left out if
    the text lacks one of them, as on Arm. Without flags, `flags` is ().
    """
    lines = [line.partition(":") for line in text.splitlines()]
    found = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    flags = found.get("flags") or found.get("Features", "")
    numbers = [found.get("cpu family"), found.get("model")]
    generation = " (family {}, model {})".format(*numbers) if all(numbers) else ""
    return Cpu((found.get("model name") or machine) + generation, tuple(flags.split()))


def effective_flags(flags: tuple[str, ...], max_isa: str) -> tuple[str, ...]:
    """Return the CPU flags that oneDNN uses if ONEDNN_MAX_CPU_ISA is `max_isa`, in the same order.

    SSE41 and AVX hide AMX and all of AVX that is newer, with f16c and fma; AVX2 and AVX2_VNNI hide all flags that begin
    with amx_ or avx512; AVX512_CORE hides AMX, bf16 and VNNI; AVX512_CORE_VNNI hides AMX and bf16; AVX512_CORE_BF16
    hides AMX. Any other value, such as "", hides nothing. Upper and lower case are the same.

    Source: oneDNN's documentation, "CPU dispatcher control".
    """
    return tuple(flag for flag in flags if not flag.startswith(_HIDDEN.get(max_isa.upper(), ())))


def compiler_target(max_isa: str, flags: Collection[str]) -> str:
    """Return the -march value for a compiler whose code must obey the limit ONEDNN_MAX_CPU_ISA and run on this CPU.

    x86-64 for SSE41, sandybridge for AVX, haswell for AVX2 and AVX2_VNNI, skylake-avx512 for AVX512_CORE, cascadelake
    for AVX512_CORE_VNNI, cooperlake for AVX512_CORE_BF16. It is native for any other limit, such as "", and for a limit
    above what the CPU has. Upper and lower case are the same.

    Parameters
    ----------
    max_isa: value of ONEDNN_MAX_CPU_ISA.
    flags: of the CPU, as in /proc/cpuinfo, for example avx2.
    """
    target, needed = _TARGETS.get(max_isa.upper(), ("native", ""))
    return target if needed in flags else "native"


def cpu_class(flags: tuple[str, ...]) -> str:
    """Return the class of a CPU with these flags: amx_bf16, avx512_bf16, avx512_vnni or avx2, the first one that it
    has.

    Empty if the CPU has none of these flags. CLASSES describes the classes.
    """
    return next((flag for flag in CLASSES if flag in flags), "")


def bf16_hardware(flags: tuple[str, ...]) -> str:
    """Return the flag for native bf16 products: amx_bf16, else avx512_bf16, else bf16 (Arm). Empty if the CPU has
    none."""
    return next((flag for flag in _BF16_FLAGS if flag in flags), "")


@dataclass(frozen=True)
class Precision:
    """The number format of matrix products, and the reason for it."""

    name: str
    """bf16, fp32 or int8."""
    reason: str
    """A phrase for the user. It begins with "warning: " if another precision would be as fast or faster."""


def choose_precision(wanted: str, emulate: bool, cpu_flags: tuple[str, ...]) -> Precision:
    """Return the precision of a run.

    fp32 and int8 are chosen if they are wanted, whatever the CPU is. `auto` is bf16 on a CPU with bf16 instructions,
    else fp32.

    Parameters
    ----------
    wanted: one of PRECISIONS; any other text is treated as bf16.
    emulate: whether bf16 is allowed on a CPU without bf16 instructions.
    cpu_flags: the effective flags of the CPU (`effective_flags`).

    Raises
    ------
    CpuftError: bf16 was asked for, the CPU has no bf16 instructions, and `emulate` is False.
    """
    flag = bf16_hardware(cpu_flags)
    if wanted == "fp32":
        return Precision("fp32", "as you asked")
    if wanted == "int8":
        return Precision("int8", _describe_int8(flag, cpu_flags))
    if flag:
        return Precision("bf16", f"this CPU multiplies bf16 ({flag})")
    if wanted == "auto":
        return Precision("fp32", "this CPU has neither AMX nor AVX512_BF16")
    if not emulate:
        raise CpuftError(
            "this CPU has neither AMX nor AVX512_BF16, and bf16 would be slower than fp32: "
            "use --precision fp32, or force it with --emulate-bf16"
        )
    return Precision("bf16", "warning: emulated, this CPU has neither AMX nor AVX512_BF16: slower than fp32")


def _describe_int8(bf16_flag: str, cpu_flags: tuple[str, ...]) -> str:
    """Return the reason for int8, with a warning if bf16 would be as fast."""
    if bf16_flag:
        return f"warning: bf16, which this CPU multiplies ({bf16_flag}), is as fast or faster"
    vnni = next((flag for flag in ("avx512_vnni", "avx_vnni") if flag in cpu_flags), "")
    return f"as you asked; this CPU multiplies 8-bit numbers ({vnni})" if vnni else "as you asked; this CPU has no VNNI"
