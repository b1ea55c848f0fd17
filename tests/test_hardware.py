"""What a CPU multiplies fast."""

from __future__ import annotations

import pytest

from cpuft.errors import CpuftError
from cpuft.hardware import (
    Precision,
    bf16_hardware,
    choose_precision,
    compiler_target,
    cpu_class,
    effective_flags,
    parse_cpuinfo,
)

XEON = """processor\t: 0
cpu family\t: 6
model\t\t: 106
model name\t: Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz
flags\t\t: fpu avx512f avx2
vmx flags\t: vnmi

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
GRAVITON = "processor\t: 0\nFeatures\t: fp asimd bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    "text, name, flags",
    [
        (XEON, "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz (family 6, model 106)", ("fpu", "avx512f", "avx2")),
        (
            XEON.replace("cpu family", "other"),
            "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz",
            ("fpu", "avx512f", "avx2"),
        ),
        (GRAVITON, "aarch64 (implementer 0x41, part 0xd40)", ("fp", "asimd", "bf16")),
        ("", "aarch64", ()),
    ],
)
def test_the_first_processor_is_named_with_its_flags(text: str, name: str, flags: tuple[str, ...]) -> None:
    assert parse_cpuinfo(text, "aarch64") == (name, flags)


@pytest.mark.parametrize(
    "flags, limit, hardware",
    [
        (("avx512f", "amx_bf16", "avx512_bf16"), "", "amx_bf16"),
        (("avx512f", "amx_bf16", "avx512_bf16"), "AVX512_CORE_BF16", "avx512_bf16"),
        (("avx512f", "amx_bf16", "avx512_bf16"), "avx2", ""),
        (("avx512f", "avx512_bf16"), "AVX512_CORE_AMX", "avx512_bf16"),
        (("avx2", "avx512_vnni", "amx_bf16"), "AVX512_CORE_VNNI", ""),
        (("avx2",), "", ""),
    ],
)
def test_bf16_hardware(flags: tuple[str, ...], limit: str, hardware: str) -> None:
    assert bf16_hardware(effective_flags(flags, limit)) == hardware


@pytest.mark.parametrize(
    "limit, name, target",
    [
        ("", "amx_bf16", "native"),
        ("SSE41", "", "x86-64"),
        ("AVX", "", "sandybridge"),
        ("AVX512_CORE_BF16", "avx512_bf16", "cooperlake"),
        ("AVX512_CORE_VNNI", "avx512_vnni", "cascadelake"),
        ("avx2", "avx2", "haswell"),
        ("AVX512_CORE", "avx2", "skylake-avx512"),
    ],
)
def test_classes_of_cpus(limit: str, name: str, target: str) -> None:
    flags = ("sse2", "avx", "avx2", "avx512f", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    assert (cpu_class(effective_flags(flags, limit)), compiler_target(limit, flags)) == (name, target)
    assert [cpu_class(arm) for arm in (("asimd", "bf16"), ("asimd",), ("fp",))] == ["bf16", "asimd", ""]


@pytest.mark.parametrize("limit", ["AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_AMX"])
def test_no_code_is_compiled_that_the_cpu_cannot_run(limit: str) -> None:
    """A limit above what the CPU has limits nothing; its own code would end ranks with SIGILL."""
    assert compiler_target(limit, ("sse2", "avx", "avx2")) == "native"
    assert compiler_target(limit, ("asimd", "bf16")) == "native"


@pytest.mark.parametrize(
    "wanted, flags, name",
    [
        ("auto", ("amx_bf16",), "bf16"),
        ("auto", (), "fp32"),
        ("fp32", ("amx_bf16",), "fp32"),
        ("bf16", ("avx512_bf16",), "bf16"),
        ("int8", ("avx2",), "int8"),
        ("auto", ("avx512_vnni",), "fp32"),
    ],
)
def test_precision(wanted: str, flags: tuple[str, ...], name: str) -> None:
    assert choose_precision(wanted, False, flags).name == name


@pytest.mark.parametrize(
    "flags, reason",
    [
        (("avx512_vnni", "amx_bf16"), "warning: bf16, which this CPU multiplies (amx_bf16), is as fast or faster"),
        (("avx512_vnni",), "as you asked; this CPU multiplies 8-bit numbers (avx512_vnni)"),
        (("avx2",), "as you asked; torch has no instructions for it on this CPU"),
        (("asimd",), "as you asked; torch has no instructions for it on this CPU"),
        (("asimd", "asimddp"), "as you asked; this CPU multiplies 8-bit numbers (asimddp)"),
        (("asimd", "asimddp", "i8mm", "bf16"), "as you asked; this CPU multiplies 8-bit numbers (i8mm)"),
        (("asimd", "asimddp", "i8mm"), "as you asked; this CPU multiplies 8-bit numbers (i8mm)"),
    ],
)
def test_int8_says_what_it_is_worth(flags: tuple[str, ...], reason: str) -> None:
    assert choose_precision("int8", False, flags).reason == reason


def test_bf16_without_hardware_is_refused_unless_insisted_on() -> None:
    with pytest.raises(CpuftError, match="use --precision fp32, or force it with --emulate-bf16"):
        choose_precision("bf16", False, ("avx2",))
    assert choose_precision("bf16", True, ("avx2",)).reason.startswith("warning: emulated")


def test_arm_without_bf16_is_told_in_its_own_words() -> None:
    graviton2 = ("fp", "asimd", "asimdhp", "asimddp")
    assert choose_precision("auto", False, graviton2) == Precision("fp32", "this CPU has no bf16 instructions of Arm")
    with pytest.raises(CpuftError, match=r"^this CPU has no bf16 instructions of Arm, "):
        choose_precision("bf16", False, graviton2)
    assert choose_precision("auto", False, (*graviton2, "i8mm", "bf16")).reason == "this CPU multiplies bf16 (bf16)"
