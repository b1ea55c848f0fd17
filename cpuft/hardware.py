"""CPU models, CPU flags and the precision that they are fast in; pure functions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from cpuft.errors import CpuftError

ARCHITECTURES = ("x86_64", "aarch64")
"""Architectures of hosts on which cpuft trains, as in uname -m."""
PRECISIONS = ("auto", "bf16", "fp32", "int8")
DECIDING_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"),
    *("asimd", "sve", "asimddp", "bf16", "i8mm"),  # of Arm; only its CPUs have asimd, and all of them
)
CLASSES = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX512_BF16, no AMX",
    "avx512_vnni": "AVX-512 with VNNI, no bf16",
    "avx2": "AVX2 only",
    "bf16": "bf16 of Arm",
    "asimd": "NEON of Arm, no bf16",
}
"""Flag -> description of a class of CPUs, the fastest first, Arm's behind those of x86."""
_OLD = ("amx_", "avx512")
_ISAS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "SSE41": (("amx_", "avx", "f16c", "fma"), "x86-64", "sse2"),
    "AVX": ((*_OLD, "avx2", "avx_", "f16c", "fma"), "sandybridge", "avx"),
    "AVX2": (_OLD, "haswell", "avx2"),
    "AVX2_VNNI": (_OLD, "haswell", "avx2"),
    "AVX512_CORE": (("amx_", "avx512_bf16", "avx512_vnni"), "skylake-avx512", "avx512vl"),
    "AVX512_CORE_VNNI": (("amx_", "avx512_bf16"), "cascadelake", "avx512_vnni"),
    "AVX512_CORE_BF16": (("amx_",), "cooperlake", "avx512_bf16"),
}
"""Value of ONEDNN_MAX_CPU_ISA -> prefixes of the CPU flags that oneDNN then does not use (its documentation, "CPU
dispatcher control"), value of -march within this limit, and the flag of CPUs that run such code."""
_ANY = ((), "native", "")
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")  # x86 in two forms, Arm's name for its own


_X86_NUMBERS = ("cpu family", "model"), "family {}, model {}"
_ARM_NUMBERS = ("CPU implementer", "CPU part"), "implementer {}, part {}"


class Cpu(NamedTuple):
    """What /proc/cpuinfo says about a CPU."""

    model: str
    """Name with family and model number, such as "AMD EPYC (family 26, model 2)": clouds hide the rest of a name, so
    that CPUs of different generations have the same one."""
    flags: tuple[str, ...]


def parse_cpuinfo(text: str, machine: str) -> Cpu:
    """Return name, with family and model number behind it in parentheses, and flags of the first CPU in the text of
    /proc/cpuinfo. A CPU without a name, as Arm's, is called `machine` (as in uname -m).
    """
    lines = [line.partition(":") for line in text.splitlines()]
    found = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    flags = found.get("flags") or found.get("Features", "")
    generation = ""
    for names, words in (_X86_NUMBERS, _ARM_NUMBERS):
        if all(numbers := [found.get(name) for name in names]):
            generation = f" ({words})".format(*numbers)
    return Cpu((found.get("model name") or machine) + generation, tuple(flags.split()))


def effective_flags(flags: tuple[str, ...], max_isa: str) -> tuple[str, ...]:
    """Return the CPU flags that oneDNN uses with this ONEDNN_MAX_CPU_ISA, in any case: all if it is no known value."""
    hidden, *_ = _ISAS.get(max_isa.upper(), _ANY)
    return tuple(flag for flag in flags if not flag.startswith(hidden))


def compiler_target(max_isa: str, flags: Collection[str]) -> str:
    """Return the -march value for a value of ONEDNN_MAX_CPU_ISA, in any case, such as "haswell" for AVX2; "native" if
    it is unknown or `flags`, those of the CPU, lack the ISA.
    """
    _, target, needed = _ISAS.get(max_isa.upper(), _ANY)
    return target if needed in flags else "native"


def list_deciding(flags: Collection[str]) -> list[str]:
    """Return those of DECIDING_FLAGS, in their order, that are among these flags of a CPU."""
    return [flag for flag in DECIDING_FLAGS if flag in flags]


def cpu_class(flags: tuple[str, ...]) -> str:
    """Return the key of CLASSES, such as "avx2", for the fastest class of a CPU with these flags; "" for none."""
    return next((flag for flag in CLASSES if flag in flags), "")


def bf16_hardware(flags: tuple[str, ...]) -> str:
    """Return the CPU's flag for native bf16 products: "amx_bf16", "avx512_bf16", or "bf16" of Arm; "" without any."""
    return next((flag for flag in _BF16_FLAGS if flag in flags), "")


def name_missing_bf16(flags: Collection[str]) -> str:
    """Return what a CPU without bf16 has: "neither AMX nor AVX512_BF16", for Arm "no bf16 instructions of Arm"."""
    return "no bf16 instructions of Arm" if "asimd" in flags else "neither AMX nor AVX512_BF16"


@dataclass(frozen=True)
class Precision:
    """The number format of matrix products, and the reason for it."""

    name: str
    reason: str
    """A phrase for the user, which begins with "warning: " if another precision would be as fast or faster."""


def choose_precision(wanted: str, emulate: bool, cpu_flags: tuple[str, ...]) -> Precision:
    """Return the precision of a run. `wanted` is one of PRECISIONS; "auto" gives bf16 if the CPU multiplies it, else
    fp32, with and without `emulate`. Raises CpuftError: "bf16" without `emulate` on a CPU that does not multiply it.
    """
    flag = bf16_hardware(cpu_flags)
    if wanted == "fp32":
        return Precision("fp32", "as you asked")
    if wanted == "int8":
        return Precision("int8", _describe_int8(flag, cpu_flags))
    if flag:
        return Precision("bf16", f"this CPU multiplies bf16 ({flag})")
    missing = name_missing_bf16(cpu_flags)
    if wanted == "auto":
        return Precision("fp32", f"this CPU has {missing}")
    if not emulate:
        raise CpuftError(
            f"this CPU has {missing}, and bf16 would be slower than fp32: "
            "use --precision fp32, or force it with --emulate-bf16"
        )
    return Precision("bf16", f"warning: emulated, this CPU has {missing}: slower than fp32")


def _describe_int8(bf16_flag: str, cpu_flags: tuple[str, ...]) -> str:
    if bf16_flag in ("amx_bf16", "avx512_bf16"):  # not measured on Arm
        return f"warning: bf16, which this CPU multiplies ({bf16_flag}), is as fast or faster"
    flag = next((one for one in ("avx512_vnni", "avx_vnni", "i8mm", "asimddp") if one in cpu_flags), "")
    used = f"this CPU multiplies 8-bit numbers ({flag})" if flag else "torch has no instructions for it on this CPU"
    return f"as you asked; {used}"
