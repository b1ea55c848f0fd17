"""Run by scripts/check-fuzz: random calls of collectives, and random input to every parser and option of every verb.

Each input must be accepted, or refused with one line and exit code 2; none may change a file outside of its room. Root;
everything happens in namespaces where nothing but a folder of its own can be written, and nowhere else. Collectives run
on two ranks of each backend, without these namespaces: each call must end as on torch's gloo, or in an exception.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from functools import partial

from tests.fuzz import sandbox

_PARSERS_SHARE = 0.65
_SLOW: dict[tuple[str, ...], float] = {("doctor",): 0.2}
"""Share of the inputs of verbs that examine the machine for seconds; 1 for other verbs."""


def main() -> None:
    """Exit with 1 if there is a fault, and with 2 if this program must not run here."""
    parser = argparse.ArgumentParser(prog="check-fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="random seed of the inputs")
    parser.add_argument("--calls", type=int, default=2000, help="calls of collectives on each backend")
    parser.add_argument(
        "--only", default="", help="only parsers and verbs whose name contains this text, or: collectives BACKEND"
    )
    parser.add_argument(
        "--inside", action="store_true", help="run inside the namespaces that this program makes (refused elsewhere)"
    )
    options = parser.parse_args()
    if not options.inside:
        name, _, backend = options.only.partition(" ")
        is_wrong = bool(name in ("", "collectives") and fuzz_collectives(options.calls, options.seed, backend))
        if name != "collectives":
            words = [sys.executable, "-m", "scripts.benchmarks.check_fuzz", "--inside", *sys.argv[1:]]
            environ = dict(os.environ) | {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
            is_wrong |= bool(subprocess.call(sandbox.enter_command(words), env=environ))
        sys.exit(is_wrong)
    reasons = sandbox.find_reasons_to_refuse()
    if reasons:
        sys.exit(f"check-fuzz: this is not its room ({'; '.join(reasons[:3])}): start scripts/check-fuzz as root")
    sys.exit(run(options.inputs, options.seed, options.only))


def fuzz_collectives(calls: int, seed: int, backend: str) -> int:
    """Run random calls on torch's gloo and on the backends whose name contains `backend`. Returns the faults."""
    # Imported here: the namespaces need no torch.
    from cpuft.comm import BACKENDS
    from tests.fuzz.collectives import draw_call, find_fault, run_calls

    begun, faults = time.monotonic(), 0
    wanted = run_calls("torch", seed, calls)
    for name in (name for name in BACKENDS if backend in name):
        found = run_calls(name, seed, calls)
        kinds = Counter(outcome[0] for outcomes in found for outcome in outcomes)
        _tell(f"collectives on {name}: {dict(kinds.most_common())}", calls, begun)
        for number, outcomes in enumerate(found):
            call = draw_call(seed, number)
            if fault := find_fault(call, wanted[number], outcomes):
                faults += 1
                print(f"\n{name}: {fault}\n  {call}\n  torch {wanted[number]}\n  cpuft {outcomes}")
        print(f"check-fuzz: {calls} calls on {name}, {faults} faults so far")
    return faults


def run(inputs: int, seed: int, only: str) -> int:
    """Fuzz everything whose name contains `only`. Returns 1 if there is a fault."""
    sandbox.prepare()
    os.environ |= {name: str(sandbox.ROOT / folder) for name, folder in sandbox.FOLDERS.items()}
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{sandbox.ROOT}/tmp"
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    before = sandbox.snapshot_far()
    # Imported here: hypothesis takes its folder from the environment.
    from tests.fuzz.parsers import PARSERS
    from tests.fuzz.run import Faults, check_parser, check_verb, fuzz
    from tests.fuzz.verbs import JUNK, draw_case, list_verbs

    faults, outside, begun = Faults(), sandbox.snapshot_near(), time.monotonic()
    parsers = {name: one for name, one in PARSERS.items() if only in name}
    for name, one in parsers.items():
        share = max(1, round(inputs * _PARSERS_SHARE / len(parsers)))
        fuzz(one.texts, partial(check_parser, one), share, seed, faults)
        _tell(name, faults.inputs, begun)
    verbs = [(verb, command) for verb, command in list_verbs() if only in " ".join(verb)]
    weight = sum(_SLOW.get(verb, 1.0) for verb, _ in verbs)
    rest = inputs - faults.inputs
    for verb, command in verbs:
        share = max(1, round(rest * _SLOW.get(verb, 1.0) / weight))
        fuzz(draw_case(verb, command), partial(check_verb, outside=outside), share, seed, faults)
        _tell(" ".join(verb), faults.inputs, begun)
    if not only:
        fuzz(JUNK, partial(check_verb, outside=outside), max(1, inputs - faults.inputs), seed, faults)
    after = sandbox.snapshot_far()
    for name in sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        faults.found[f"changed outside of its room: {name}"] = (1, "", "")
    for kind, (times, said, first) in sorted(faults.found.items()):
        print(f"\n{kind} ({times} times)\n  {said!r}\n  {repr(first)[:2000]}")
    print(f"\ncheck-fuzz: {faults.inputs} inputs, {len(faults.found)} faults, {len(before)} files elsewhere as before")
    return 1 if faults.found else 0


def _tell(name: str, inputs: int, begun: float) -> None:
    print(f"{time.monotonic() - begun:6.0f} s {inputs:6d} inputs, {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
