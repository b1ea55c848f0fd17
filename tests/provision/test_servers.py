import os
import platform
import shutil
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.hosts.registry import FILE_NAME, Entry, format_entry
from cpuft.hosts.ssh_config import Login, Member, format_inside, format_ssh_config
from cpuft.hosts.transport import fingerprint
from cpuft.plans import Plan
from cpuft.provision import servers
from cpuft.provision.options import HostsConfig
from cpuft.provision.servers import (
    ClusterFacts,
    ServerFacts,
    Servers,
    check_server,
    describe_server,
    find_common,
    parse_survey,
    plan_servers,
    plan_servers_down,
)
from cpuft.provision.wheels import Supply, Wheel, make_stamp
from tests.provision.simulated import needs_root

CONFIG = HostsConfig(hosts="a,b", name="lab")
MEMBERS = (Member("a", "a", key="ssh-ed25519 AAAA"), Member("b", "b", key="ssh-ed25519 BBBB"))
WHEELS = (Wheel("/w/pip-26-py3-none-any.whl", "pip-26-py3-none-any.whl", "11"),)
PINS = ("click==8.1.0",)
BARE = ServerFacts("debian 12", "6.1", "3.11.2", free_kb=9 << 20, writable=True)
KEY = "ssh-ed25519 KEY cpuft-lab"
FOLDER = "/opt/cpuft/clusters/lab"
ENTRY = Entry("lab", "hosts", "/h/hostfiles/lab", "/state/lab/ssh_config", "/opt/cpuft/env/bin/python")
TEXTS = format_inside(MEMBERS, FOLDER, "/opt/cpuft/env/bin/python")
SUMS = {name: sha256(text.encode()).hexdigest() for name, text in TEXTS.items()}
DONE = replace(
    BARE,
    stamp=make_stamp(PINS, WHEELS),
    wheels={WHEELS[0].name: "11"},
    sums=SUMS,
    key=KEY,
    authorized=(KEY,),
)
SURVEY = """os debian 12
kernel 6.1
machine x86_64
python 3.11.2
writable yes
free_kb 9437184
stamp
wheel pip-26-py3-none-any.whl 11
sum_ssh_config
authorized ssh-ed25519 OTHER me@here
"""


def make_facts(servers: tuple[ServerFacts, ...], **more: Any) -> ClusterFacts:
    facts = ClusterFacts(tuple(zip(MEMBERS, servers)), {}, ENTRY)
    return replace(facts, supply=Supply(WHEELS), pins=PINS, **more)


def plan_whole(servers: tuple[ServerFacts, ...], **more: Any) -> Plan:
    """Plan a cluster whose files on this machine are complete."""
    here = [step for stage in plan_servers(CONFIG, make_facts(servers)).stages for step in stage if not step.host]
    return plan_servers(CONFIG, make_facts(servers, **({"files": {s.command[-1]: s.stdin for s in here}} | more)))


def why(servers: tuple[ServerFacts, ...]) -> list[str]:
    return [f"{step.host}: {step.why}" for stage in plan_whole(servers).stages for step in stage]


def test_complete_servers_need_no_steps() -> None:
    assert why((DONE, replace(DONE, key="", sums={}))) == []


def test_new_servers_get_everything_but_the_login_that_needs_the_head_hosts_key() -> None:
    install = "install the environment at /opt/cpuft/env"
    tell = "a: configure how the head host reaches the hosts"
    push = "push pip-26-py3-none-any.whl"
    expected = ["a: generate the cluster's own key", f"a: {push}", f"b: {push}", f"a: {install}", f"b: {install}"]
    assert why((BARE, BARE)) == [*expected, tell, tell, tell, tell]


@pytest.mark.parametrize(
    "change, step",
    [
        ({"stamp": ""}, "b: install the environment at /opt/cpuft/env"),
        ({"authorized": ()}, "b: let the head host log in"),
    ],
)
def test_steps_for_one_server_run_only_there(change: dict[str, object], step: str) -> None:
    assert why((DONE, replace(DONE, **change))) == [step]  # type: ignore[arg-type]


def test_every_server_can_replace_a_head_host_that_may_be_lost() -> None:
    tell, other = "b: configure how the head host reaches the hosts", "ssh-ed25519 OTHER cpuft-lab"

    def list_steps(*servers: ServerFacts) -> list[tuple[str, str]]:
        plan = plan_whole(servers, can_lose_head=True)
        return [(f"{step.host}: {step.why}", step.stdin) for stage in plan.stages for step in stage]

    bare = list_steps(DONE, replace(DONE, key="", sums={}))
    assert bare == [("b: generate the cluster's own key", ""), *((tell, text) for text in TEXTS.values())]
    assert list_steps(DONE, replace(DONE, key=other, authorized=())) == [
        ("a: let the head host log in", f"{other}\n"),
        ("b: let the head host log in", f"{KEY}\n{other}\n"),
    ]
    both = (KEY, other)
    assert list_steps(replace(DONE, authorized=both), replace(DONE, key=other, authorized=both)) == []


@pytest.mark.parametrize("wheels", [{}, {WHEELS[0].name: "22"}])
def test_wheels_go_only_to_servers_that_will_install(wheels: dict[str, str]) -> None:
    push, install = "b: push pip-26-py3-none-any.whl", "b: install the environment at /opt/cpuft/env"
    assert why((DONE, replace(DONE, wheels=wheels))) == []  # from an image that had its environment
    assert why((DONE, replace(DONE, wheels=wheels, stamp=""))) == [push, install]


def test_progress_is_that_of_all_files() -> None:
    supply = Supply(tuple(replace(WHEELS[0], name=f"pip-{number}-py3.whl", size=500_000) for number in range(66)))
    facts = replace(make_facts((BARE, BARE)), supply=supply)
    stages = plan_servers(CONFIG, facts).stages
    pushes = [step for stage in stages for step in stage if step.why.startswith("push ")]
    assert len(pushes) == 132
    assert {step.part for step in pushes} == {"push wheels to the hosts, 66 MB in all"}


def test_servers_that_differ_are_refused() -> None:
    assert find_common("Python", {"a": "3.11", "b": "3.11"}, "") == "3.11"
    with pytest.raises(CpuftError, match=r"a has 3\.11, b has none: install one on all of them$"):
        find_common("Python", {"a": "3.11", "b": ""}, "install one on all of them")
    with pytest.raises(CpuftError) as caught:
        find_common("architecture", {"a": "x86_64", "b": "aarch64"}, "make a cluster of each")
    assert str(caught.value) == (
        "servers of one cluster need the same architecture, and a has x86_64, b has aarch64: make a cluster of each"
    )


def test_a_server_is_described_in_one_line() -> None:
    assert describe_server(BARE) == "up, debian 12, x86_64, kernel 6.1, Python 3.11.2, no environment, 9 GB free"


def test_a_survey_is_parsed() -> None:
    assert parse_survey(SURVEY, "a") == replace(
        BARE,
        wheels={WHEELS[0].name: "11"},
        sums={"ssh_config": ""},
        authorized=("ssh-ed25519 OTHER me@here",),
    )


@pytest.mark.parametrize("text", ["", "sh: not found\n", "os \n", "free_kb 5\n"])
def test_other_output_is_no_survey(text: str) -> None:
    with pytest.raises(CpuftError, match="host a could not be examined"):
        parse_survey(text, "a")


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, ""),
        ({"python": ""}, "a: Python is missing"),
        ({"python": "3.9.2"}, "a: Python is 3.9.2"),
        ({"machine": "aarch64"}, ""),
        ({"machine": "riscv64"}, "a: its CPU is riscv64, and cpuft needs x86_64 or aarch64"),
        ({"musl": True}, "a: its C library is musl, and torch needs glibc: use Debian, Ubuntu or another system with"),
        ({"writable": False}, "a: /opt/cpuft cannot be written"),
        ({"free_kb": 1 << 10}, "a: /opt/cpuft has 1 MB of free space"),
    ],
)
def test_problems_of_a_server_are_named(change: dict[str, object], said: str) -> None:
    problem = check_server("a", replace(BARE, **change), CONFIG, True, 1 << 20)  # type: ignore[arg-type]
    assert problem[: len(said)] == said
    assert bool(problem) == bool(said)


def test_a_server_without_pip_needs_a_wheel_of_pip() -> None:
    assert "python3-venv" in check_server("a", BARE, CONFIG, False, 0)


def test_down_has_steps_only_for_servers_that_have_something() -> None:
    plan = plan_servers_down(CONFIG, make_facts((DONE, BARE)))
    assert [step.host for stage in plan.stages for step in stage] == ["a"]
    assert plan_servers_down(CONFIG, make_facts((BARE, BARE))).stages == ()


def survey(prefix: Path) -> ServerFacts:
    """Run the survey on this machine."""
    script = Path(servers.__file__).with_name("servers_survey.sh")
    done = subprocess.run(("sh", script, prefix, "lab"), capture_output=True, text=True, timeout=60, check=True)
    return parse_survey(done.stdout, "a")


@pytest.mark.parametrize(
    "made, problem, marked",
    [
        ((), "", False),
        (("env/bin/python",), "a: PREFIX/env is not cpuft's: move it away, or give another --prefix", False),
        (("wheels/a.whl", "notes"), "a: PREFIX/wheels is not cpuft's: move it away, or give another --prefix", False),
        (("notes",), "", False),
        (("env/stamp",), "", True),
        (("env/bin/python", "install.lock"), "", True),
    ],
)
def test_files_of_others_at_the_prefix_are_found(
    tmp_path: Path, made: tuple[str, ...], problem: str, marked: bool
) -> None:
    for name in made:
        write_text(tmp_path / "cpuft" / name, "")
    found = survey(tmp_path / "cpuft")
    said = check_server("a", replace(BARE, foreign=found.foreign), CONFIG, True, 0)
    assert (said.replace(f"{tmp_path}/cpuft", "PREFIX"), found.marked) == (problem, marked)


@pytest.mark.parametrize(
    "said, is_musl", [("musl libc (aarch64)\\nVersion 1.2.5", True), ("ldd (GNU libc) 2.36", False)]
)
def test_a_system_without_glibc_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_musl: bool
) -> None:
    """musl's ldd prints its version to standard error, and ends with an error."""
    (tmp_path / "ldd").write_text(f'#!/bin/sh\nprintf "{said}" >&2\nexit 1\n')
    (tmp_path / "ldd").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = survey(tmp_path / "cpuft")
    assert (found.musl, found.machine) == (is_musl, platform.machine())


def test_only_the_wheel_of_cpuft_that_was_sent_last_stays(tmp_path: Path) -> None:
    """Among files of one version, pip would choose by their tags: that of a release, even if a checkout's is newer."""
    script = "set -eu\n" + Path(servers.__file__).with_name("servers_receive.sh").read_text(encoding="utf-8")
    names = ("cpuft-1-py3-none-manylinux_2_28_x86_64", "cpuft_kernels-1-py3-none-any", "cpuft-1-py3-none-any")
    sent = [f"{name}.whl" for name in names]
    for name in sent:
        words = ("sh", "-c", script, "receive", f"{tmp_path}/wheels/{name}", sha256(name.encode()).hexdigest())
        subprocess.run(words, input=name, text=True, timeout=60, check=True)
    assert sorted(path.name for path in (tmp_path / "wheels").iterdir()) == sorted(sent[1:])
    assert (tmp_path / "wheels" / sent[2]).read_text() == sent[2]


@needs_root
@pytest.mark.parametrize(
    "owner, mode, foreign",
    [
        (0, 0o755, ""),
        (0, 0o775, ""),
        (0, 0o757, "PREFIX can be written by other users"),
        (65534, 0o755, "PREFIX belongs to another user"),
    ],
)
def test_a_prefix_that_others_can_write_to_is_refused(tmp_path: Path, owner: int, mode: int, foreign: str) -> None:
    write_text(tmp_path / "cpuft" / "env" / "stamp", "")
    os.chown(tmp_path / "cpuft", owner, owner)
    (tmp_path / "cpuft").chmod(mode)
    assert survey(tmp_path / "cpuft").foreign.replace(f"{tmp_path}/cpuft", "PREFIX") == foreign


@pytest.mark.parametrize(
    "change", [{"user": "x\n  ProxyCommand touch /tmp/x"}, {"user": 'x" y'}, {"address": "a\nMatch all"}]
)
def test_a_value_cannot_add_a_line_to_the_ssh_configuration(change: dict[str, Any]) -> None:
    with pytest.raises(CpuftError, match=r"which ssh_config cannot hold: remove it$"):
        format_ssh_config([replace(MEMBERS[0], **change)], "/k", "/known")
    with pytest.raises(CpuftError, match=r"^IdentityFile .* which ssh_config cannot hold"):
        format_ssh_config(MEMBERS, "/k\n  ProxyCommand touch /tmp/x", "/known")
    with pytest.raises(CpuftError, match=r"^ProxyCommand .* which ssh_config cannot hold"):
        format_ssh_config(MEMBERS, "/k", "/known", (("b", Login("b", 22, proxy="nc\nMatch all")),))


def test_a_key_path_with_spaces_is_quoted_in_the_ssh_configuration() -> None:
    lines = format_ssh_config(MEMBERS, "/my keys/k", "/known").splitlines()
    assert [line for line in lines if "IdentityFile" in line] == ['  IdentityFile "/my keys/k"'] * 2


def test_a_key_path_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(CpuftError, match=r"IdentityFile '/\\udcff' contains '\\udcff', which ssh_config cannot hold"):
        format_ssh_config(MEMBERS, "/\udcff", "/known")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"hosts": "a, c"},
            "cluster lab has b, which --hosts leaves out: add b to --hosts, or remove the cluster first with `cpuft ",
        ),
        (
            {"prefix": "/srv/cpuft"},
            "cluster lab was made with --prefix /opt/cpuft: give --prefix /opt/cpuft again, or remove the cluster ",
        ),
        ({"hosts": "c,b,a", "user": "root"}, ""),
    ],
)
def test_hosts_are_not_forgotten(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    """A new record must not leave out hosts or a folder that have something of the cluster; more hosts are fine."""
    environ = {"CPUFT_STATE": str(tmp_path / "state")}
    entry = Entry("lab", "hosts", str(tmp_path / "hostfiles" / "lab"), options={"hosts": "a,b", "prefix": "/opt/cpuft"})
    write_text(tmp_path / "state" / "lab" / FILE_NAME, format_entry(entry))
    cluster = Servers(replace(CONFIG, **change), environ)
    with pytest.raises(CpuftError, match=f"^{said}") if said else nullcontext():
        cluster.check()


def test_hosts_need_ipv4(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=r"^--hosts: fe80::1 is an IPv6 address, and ranks connect over IPv4: write"):
        Servers(replace(CONFIG, hosts="a,fe80::1"), {"CPUFT_STATE": str(tmp_path / "state")})


def test_a_cluster_whose_head_host_cannot_log_in_is_not_made() -> None:
    message = "ssh: connect to host b port 22: No route to host"
    with pytest.raises(CpuftError) as error:
        plan_servers(CONFIG, make_facts((DONE, DONE), refused={"b": message}))
    advice = "see the reason on a with `ssh -v -F /opt/cpuft"
    said = f"no rank can start on b, because the head host a cannot log in there ({message}): {advice}"
    assert str(error.value).startswith(said)


MINE = b'from="10.*" ssh-rsa AAAA m\xfcller@home'
"""A user's line in authorized_keys, which is not UTF-8."""


def run_script(home: Path, step: str) -> "subprocess.Popen[str]":
    """Begin to do what a plan would: `authorize` or `down`, with the cluster's key and a home."""
    config = replace(CONFIG, prefix=str(home.parent / "cpuft"))
    server = DONE if step == "down" else replace(DONE, authorized=())
    facts = make_facts((server,))
    plan = plan_servers_down(config, facts) if step == "down" else plan_servers(config, facts)
    (found,) = (s for stage in plan.stages for s in stage if s.host and ("let" in s.why or step == "down"))
    environ = os.environ | {"HOME": str(home), "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(found.command, env=environ, text=True, stdin=subprocess.PIPE)
    assert process.stdin
    process.stdin.write(found.stdin)
    process.stdin.close()
    return process


def run_scripts(home: Path, *steps: str) -> None:
    """Do the same from two hosts at once, one step after the other."""
    for step in steps:
        assert [process.wait(30) for process in [run_script(home, step) for _ in range(2)]] == [0, 0]


@pytest.mark.parametrize(
    "before", [MINE, MINE + b"\n", b"", b"ssh-ed25519 KEY of cpuft-lab\nssh-ed25519 K cpuft-labs\n# \x00\n"]
)
@pytest.mark.parametrize("form", ["file", "link", "names"])
def test_down_leaves_the_users_own_keys_as_they_were(tmp_path: Path, before: bytes, form: str) -> None:
    """Two hosts share the home. A file without a newline at its end gets one."""
    file, other = tmp_path / "home" / ".ssh" / "authorized_keys", tmp_path / "other"
    file.parent.mkdir(parents=True)
    place = other if form == "link" else file
    place.write_bytes(before)
    place.chmod(0o640)
    if form != "file":
        file.symlink_to(other) if form == "link" else other.hardlink_to(file)
    whole = before + b"\n" * (before == MINE)
    run_scripts(tmp_path / "home", "authorize")
    assert file.read_bytes() == whole + f"{KEY}\n".encode()
    run_scripts(tmp_path / "home", "down")
    assert file.read_bytes() == whole
    assert sorted(path.name for path in file.parent.iterdir()) == ["authorized_keys"]
    assert (place.stat().st_mode & 0o777, file.is_symlink()) == (0o640, form == "link")
    assert form == "file" or other.samefile(file)


@pytest.mark.parametrize("line", [f'from="10.*",restrict {KEY}\n', f"{KEY}\r\n", f"{KEY} \n"])
def test_keys_that_the_user_edited_still_belong_to_their_clusters(tmp_path: Path, line: str) -> None:
    """The user wrote options before the key, or saved the file on Windows."""
    own, other = replace(DONE, authorized=(line.strip(),)), line.replace("cpuft-lab", "cpuft-office")
    file = tmp_path / "home" / ".ssh" / "authorized_keys"
    before = f"# {KEY}\nssh-rsa AAAA me@home ssh-ed25519 AAAA cpuft-lab\n"
    assert why((DONE, own)) == []
    file.parent.mkdir(parents=True)
    file.write_text(before + line, newline="")
    run_scripts(tmp_path / "home", "down")
    assert file.read_text() == before
    (tmp_path / "cpuft").mkdir()
    (tmp_path / "cpuft" / "install.lock").touch()
    file.write_text(line + other, newline="")
    run_scripts(tmp_path / "home", "down")
    assert (file.read_bytes(), (tmp_path / "cpuft" / "install.lock").exists()) == (other.encode(), True)


def test_down_removes_a_file_of_keys_that_cpuft_made(tmp_path: Path) -> None:
    home, file = tmp_path / "home", tmp_path / "home" / ".ssh" / "authorized_keys"
    home.mkdir()
    run_scripts(home, "authorize")
    assert (file.stat().st_mode & 0o777, file.read_text().splitlines()[1:]) == (0o600, [KEY])
    run_scripts(home, "down")
    assert list(home.iterdir()) == []
    (home / ".ssh").mkdir()
    run_scripts(home, "authorize", "down")
    assert list((home / ".ssh").iterdir()) == [], "an empty folder of the user's stays"
    (home / ".ssh").rmdir()
    run_scripts(home, "authorize")
    with file.open("ab") as text:
        text.write(MINE)
    run_scripts(home, "down")
    assert file.read_bytes() == MINE


def test_down_removes_the_key_where_only_the_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "home" / ".ssh" / "authorized_keys"
    file.parent.mkdir(parents=True)
    file.write_bytes(MINE + b"\n")
    run_scripts(tmp_path / "home", "authorize")
    for program in "mktemp", "mv":
        (tmp_path / program).write_text(f"#!/bin/sh\n[ $# = 0 ] && exec {shutil.which(program)}\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_scripts(tmp_path / "home", "down")
    assert file.read_bytes() == MINE + b"\n"
    assert list(tmp_path.glob("tmp.*")) == []


def test_a_lock_that_a_killed_process_left_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "home" / ".ssh" / "authorized_keys.lock").mkdir(parents=True)
    run_scripts(tmp_path / "home", "authorize", "down")
    assert list((tmp_path / "home" / ".ssh").iterdir()) == []


def test_refused_host_keys_are_named_with_their_fingerprints_and_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"a": "ssh-ed25519 AAAA", "b": "ssh-ed25519 BBBB"}
    monkeypatch.setattr("cpuft.provision.servers.scan_host_key", lambda host, config: keys[host.name])
    cluster, asked = Servers(CONFIG, {"CPUFT_STATE": str(tmp_path / "state")}), list[str]()

    def refuse(question: str) -> bool:
        asked.append(question)
        return False

    with pytest.raises(CpuftError) as failure:
        cluster.confirm(refuse)
    shown = [f"{name} (ssh-ed25519 {fingerprint(key)})" for name, key in keys.items()]
    told = str(failure.value)
    assert told.startswith(f"the host key of {', '.join(shown)} is unknown and was not accepted: compare it with what ")
    assert told.endswith(" on the host, then answer yes, or give --accept-host-keys")
    assert asked[0] == f"a shows the host key ssh-ed25519 {fingerprint(keys['a'])}. Is that right?"
    replacing = Servers(replace(CONFIG, accept_host_keys=True), {"CPUFT_STATE": str(tmp_path / "state")})
    replacing.confirm(lambda question: False)
