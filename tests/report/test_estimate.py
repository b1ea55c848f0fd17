"""The table of hosts to rent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.compressions import count_buckets, count_coding_seconds
from cpuft.errors import CpuftError
from cpuft.instance_types import find_instance, read_instance_types
from cpuft.network_speed import ETHERNET
from cpuft.record import GradientSizes, Measurement, Record, ResumedLine
from cpuft.report import estimate
from cpuft.report.estimate import (
    MESSAGE_BYTES,
    Estimate,
    Network,
    UpdateCosts,
    count_worthwhile_hosts,
    estimate_hosts,
    find_network,
    read_job,
    scale_cores,
)
from tests.records import make_record, make_steps


def test_the_table_of_instances_is_whole() -> None:
    found = read_instance_types()
    assert found["c6i.16xlarge"].cores == 32
    assert (found["c6i.16xlarge"].cpu, found["c7i.8xlarge"].cpu) == ("x86", "amx")
    sizes = {"c8g.4xlarge": 16, "m8g.8xlarge": 32, "r8g.48xlarge": 192, "c4a-highcpu-72": 72, "Standard_D64pls_v6": 64}
    assert {name: (found[name].cores, found[name].cpu) for name in sizes} == {
        name: (cores, "arm")
        for name, cores in sizes.items()  # a core of Arm is one vCPU
    }
    assert {one.cpu for one in found.values()} == {"amx", "x86", "arm"}
    assert all(one.cores > 0 < one.gbits_per_second < 1e4 for one in found.values())
    assert all(0 < one.dollars_per_hour < 1e3 and one.dated.isdecimal() for one in found.values())


def test_an_unknown_name_is_answered_with_the_next_ones() -> None:
    with pytest.raises(CpuftError, match=r"--instance c6i.16xlrage is not a known type of instance: .*c6i.16xlarge"):
        find_instance("c6i.16xlrage")


SIZES = GradientSizes(10_000_000, 384, 800_000, {"1": 500.0, "2": 800.0, "4": 1280.0})
WITHOUT_ROWS = replace(SIZES, embedding_row=0)
JOB = UpdateCosts(1.0, 2.0, 0.1, 0.01, 32, 3200, 1, ("none",), SIZES)
FREE = Network(1e15, 0.0, 0.0, cpu_seconds_per_message=0.0)
GIGABIT = Network(1e9, 1e-4)


def make_measurement(
    seconds: float, nbytes: int, ranks: int = 2, backend: str = "gloo", busy: float = 0.5
) -> Measurement:
    return Measurement(backend, "all_reduce", "float32", nbytes, ranks, (seconds,), (busy,))


def recorded(steps: int = 20, factors: int = 1_000_000, **changes: Any) -> Record:
    record = make_record(gradient_sizes=GradientSizes(10_993_538, 384, factors, {"1": 700.0}), examples=3668, **changes)
    return replace(record, steps=[replace(record.steps[0], step=n + 1) for n in range(steps)])


def test_a_link_that_costs_nothing_adds_nothing() -> None:
    found = estimate_hosts(JOB, FREE, 8)
    assert found.step_seconds == pytest.approx(JOB.step_seconds, rel=1e-6)
    assert found.efficiency == pytest.approx(1.0, rel=1e-6)
    assert found.samples_per_second == pytest.approx(8 * 32 / 3.1, rel=1e-6)
    assert found.train_seconds == pytest.approx(3200 * 3.1 / 8 / 32, rel=1e-6)


def test_a_slow_link_is_waited_for() -> None:
    # 40 MB by a ring of four: 60 MB at 2.5 MB/s and frames' headers; backward hides at most its 2 seconds.
    slow = Network(20e6, 0.0, 0.0)
    whole = 1.5 * (40e6 + 1280 * 384 * 4) / (2.5e6 * ETHERNET * estimate.RING_EFFICIENCY)
    found = estimate_hosts(JOB, slow, 4)
    assert found.step_seconds == pytest.approx(1.1 + whole, rel=0.06)
    assert found.waited_seconds > 0.8 * whole


def test_weights_of_an_optimizer_that_is_shared_out_are_waited_for() -> None:
    # Half an all-reduce of four: three quarters of 60 MB at 12.5 MB/s, while half of the gradients' bytes hide as ever.
    network, shared = Network(100e6, 0.0, 0.0, measured=True), replace(JOB, gathered=60e6)
    assert estimate_hosts(shared, network, 1).step_seconds == JOB.step_seconds
    half = replace(JOB, sizes=replace(SIZES, parameters=5_000_000))
    more = estimate_hosts(shared, network, 4).waited_seconds - estimate_hosts(half, network, 4).waited_seconds
    # Half as many buckets leave a little more of backward behind which nothing hides.
    assert more == pytest.approx(0.75 * 60e6 / 12.5e6, abs=0.25)


@pytest.mark.parametrize(
    ("options", "precision", "layer"),
    [({}, "bf16", 2), ({"fast_path": False}, "bf16", 4), ({}, "fp32", 4)],
)
def test_weights_travel_as_ranks_compute_with_them(options: dict[str, Any], precision: str, layer: int) -> None:
    whole = recorded(options=options, precision=precision, parameters=22_713_986)
    shared = recorded(options={**options, "shard": "optimizer"}, precision=precision, parameters=22_713_986)
    words = 22_713_986 - 10_993_538
    assert (read_job(whole).gathered, read_job(shared).gathered) == (0, layer * 10_993_538 + 4 * words)
    assert "int8" in read_job(whole).levels
    assert "int8" not in read_job(shared).levels


def test_small_messages_are_sent_in_fewer_buckets() -> None:
    assert [count_buckets("int8", numbers, 64) for numbers in (0, 8 * 2**20, 8 * 2**20 + 1, 10**8)] == [8, 8, 9, 96]
    assert [count_buckets("powersgd", 10**8, ranks) for ranks in (2, 31, 32)] == [3, 3, 1]


def test_one_host_is_what_was_recorded() -> None:
    assert estimate_hosts(JOB, GIGABIT, 1).step_seconds == JOB.step_seconds


def test_money_is_of_all_hosts_and_all_rows() -> None:
    found = estimate_hosts(JOB, GIGABIT, 4, price=2.0)
    assert found.price == pytest.approx(4 * 2.0 * found.train_seconds / 3600)


@given(
    st.floats(1e6, 1e11),
    st.floats(0, 0.1),
    st.floats(0, 1e-8),
    st.integers(2, 256),
)
def test_it_lies_within_its_bar_and_below_the_ideal(rate: float, latency: float, cpu: float, hosts: int) -> None:
    found = estimate_hosts(JOB, Network(rate, latency, cpu), hosts)
    assert found.least <= found.samples_per_second <= found.most
    assert 0 < found.efficiency <= 1 + 1e-9
    assert found.step_seconds == pytest.approx(JOB.step_seconds + found.waited_seconds + found.taken_seconds)


@pytest.mark.parametrize(("hosts", "words"), [(1, 500.0), (2, 800.0), (3, 1053.1), (4, 1280.0), (8, 2048.0)])
def test_words_between_two_counts_follow_a_power(hosts: int, words: float) -> None:
    assert SIZES.count_tokens(hosts) == pytest.approx(words, rel=1e-3)


def test_a_link_is_found_again_in_its_all_reduces() -> None:
    true = Network(1e9, 2e-4, 0.0, measured=True)
    rows = [make_measurement(true.all_reduce_seconds(n, 4), n, 4) for n in (1024, 32768, 2**20, 25 * 2**20)]
    slower = [make_measurement(2 * row.median_seconds, row.nbytes, 4, "mpi") for row in rows]
    found = find_network([*slower, *rows, make_measurement(0.0, 512, 4)], "none")
    assert found.bits_per_second == pytest.approx(1e9)
    assert found.latency_seconds == pytest.approx(2e-4)
    largest = rows[-1]
    assert found.cpu_seconds_per_byte == pytest.approx(0.5 * largest.median_seconds / (1.5 * largest.nbytes))


def test_a_record_becomes_a_job() -> None:
    job = read_job(recorded())
    assert job.step_seconds == pytest.approx(0.321)
    assert (job.samples, job.rows, job.cores) == (32, 3 * 3668, 16)
    assert job.sent_numbers(1, "none") == (10_993_538, 700 * 384)
    assert job.levels == ("bf16", "int8", "powersgd")
    assert read_job(recorded(precision="fp32")).levels == ("none", "bf16", "int8", "powersgd")
    assert read_job(recorded(), "none").levels == ("none",)
    assert read_job(recorded(), "powersgd").levels == ("powersgd",)
    assert read_job(recorded(factors=0)).levels == ("bf16", "int8")
    assert read_job(recorded(options={"grad_compression": "fp16"})).levels == ("fp16",)


@pytest.mark.parametrize("flags, share", [(["avx2"], 1.0), (["avx2", "avx512f"], 0.8)])
def test_coding_takes_less_time_on_cpus_with_avx512(flags: list[str], share: float) -> None:
    record = recorded()
    assert read_job(replace(record, header=replace(record.header, cpu_flags=flags))).coding_share == share


@pytest.mark.parametrize(("bits", "sent_as"), [(1e15, "none"), (3e8, "bf16"), (5e7, "int8"), (1e6, "int8")])
def test_gradients_are_foretold_to_be_sent_as_a_launch_would(bits: float, sent_as: str) -> None:
    job = replace(JOB, levels=("none", "bf16", "int8"))
    found = estimate_hosts(job, Network(bits, 1e-5, 0.0), 4)
    alone = [
        estimate_hosts(replace(JOB, levels=(way,)), Network(bits, 1e-5, 0.0), 4).step_seconds for way in job.levels
    ]
    assert found.sent_as == sent_as
    assert min(alone) <= found.step_seconds <= 1.02 * min(alone)


def test_factors_are_fewer_than_what_they_stand_for() -> None:
    layers, words = JOB.sent_bytes(4, "powersgd")
    # Half of the numbers have 4 bits, like those of embedding rows. If all gradients are sent whole, all have 8 bits.
    assert layers == (132 + 260) / 2 / 256 * 800_000
    assert words == 132 / 260 * JOB.sent_bytes(4, "int8")[1]
    whole = replace(JOB, sizes=replace(SIZES, factors=SIZES.parameters))
    assert whole.sent_bytes(4, "powersgd")[0] == JOB.sent_bytes(4, "int8")[0]
    assert JOB.sent_bytes(4, "bf16") == (2 * 10_000_000, 2 * 1280 * 384)


def test_blocks_take_compute() -> None:
    numbers = sum(JOB.sent_numbers(4, "int8"))
    assert estimate_hosts(replace(JOB, levels=("int8",)), FREE, 4).taken_seconds == pytest.approx(3.5e-9 * numbers)
    faster = replace(JOB, levels=("int8",), coding_share=0.4)
    assert estimate_hosts(faster, FREE, 4).taken_seconds == pytest.approx(1.4e-9 * numbers)


@pytest.mark.parametrize("ranks_per_host, own", [(1, 500), (2, 800)])
def test_with_error_feedback_a_host_sends_its_own_rows_and_receives_the_means_of_all(
    ranks_per_host: int, own: int
) -> None:
    job = replace(JOB, ranks_per_host=ranks_per_host)
    for level in ("int8", "powersgd"):
        assert job.sent_numbers(4 // ranks_per_host, level)[1] == (own + 1280) / 2 * 384
    assert job.sent_numbers(4 // ranks_per_host, "bf16")[1] == 1280 * 384


def test_a_control_group_allows_less_than_the_cores_there_are() -> None:
    assert read_job(recorded(cpu_quota=0.5)).cores == 0.5
    assert read_job(recorded(cpu_quota=64.0)).cores == 16


def test_more_cores_of_the_same_kind_are_as_much_faster() -> None:
    assert scale_cores(JOB, 4).step_seconds == pytest.approx(JOB.step_seconds / 4)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (recorded(3), "runs/np-1 has 3 steps: run 4 or more"),
        (recorded(ranks=2, world_size=2), "runs/np-2 ran on 2 ranks: an estimate needs a run with --np 1"),
        (
            replace(recorded(), resumptions=[ResumedLine(9, 0, 4, [], "ccl", "bf16", "", "")]),
            "runs/np-1 ran on 4 ranks: an estimate needs a run with --np 1",
        ),
        (recorded(options={"sync_every": 8}), "runs/np-1 ran with --sync-every 8: an estimate needs a run without"),
        (make_record(), "runs/np-1 has 1 step: run 4 or more"),
        (replace(recorded(), header=make_record().header), "does not hold the sizes of its gradients"),
        (replace(recorded(), header=replace(recorded().header, ranks=[])), "lacks the times, examples or cores"),
        (replace(recorded(), steps=make_steps(9, [0.0], samples=0)), "lacks the times, examples or cores"),
        (recorded(options={"grad_compression": "late"}), "the bytes that late sends are not known"),
        (
            recorded(options={"grad_compression": "powersgd"}, factors=0),
            "the bytes that powersgd sends are not known",
        ),
    ],
)
def test_a_record_without_what_is_needed(record: Record, said: str) -> None:
    with pytest.raises(CpuftError, match=said):
        read_job(record)


def test_the_fewest_steps_that_the_message_names_suffice() -> None:
    assert read_job(recorded(4)).step_seconds > 0


def test_a_link_file_without_all_reduces() -> None:
    with pytest.raises(CpuftError, match="--link holds no all-reduces of float32 in two sizes"):
        find_network([make_measurement(1.0, 1024)], "none")


def test_hosts_are_worth_it_as_long_as_the_last_bring_half() -> None:
    def on(hosts: int, rate: float) -> Estimate:
        return replace(estimate_hosts(JOB, FREE, hosts), samples_per_second=rate)

    found = [on(1, 10), on(2, 19), on(4, 30), on(8, 45), on(16, 100)]
    assert count_worthwhile_hosts(found) == 4


def test_coding_of_powersgd_depends_on_the_factors() -> None:
    assert count_coding_seconds("powersgd", 1e6, 5e4, 0.0) == pytest.approx(1e6 * 2.5e-9 + 5e4 * 46e-9)
    # Gradients that factors would not make smaller are sent whole, as int8 blocks, and so are embedding rows.
    for row_numbers in (0.0, 1e5):
        seconds = [count_coding_seconds(name, 1e6, 1e6, row_numbers) for name in ("int8", "powersgd")]
        assert seconds == pytest.approx([3.5e-9 * (1e6 + row_numbers)] * 2)
    assert count_coding_seconds("bf16", 1e6, 5e4, 1e5) == 0.0


PAYLOAD = Network(1e9, 0.0, 0.0, measured=True, cpu_seconds_per_message=0.0)
"""A network whose rate is that of payload, without anything else that takes time."""


def test_a_message_has_headers_unless_they_are_in_a_measured_latency() -> None:
    wire, payload = Network(20e6, 1e-3, 0.0), Network(20e6, 1e-3, 0.0, measured=True)
    assert payload.all_reduce_seconds(64_000, 64) == pytest.approx(126 * (1e-3 + 1000 / 2.5e6))
    expected = 126 * (1e-3 + (1000 + MESSAGE_BYTES) / wire.bytes_per_second)
    assert wire.all_reduce_seconds(64_000, 64) == pytest.approx(expected)
    job = replace(JOB, sizes=WITHOUT_ROWS, levels=("none",), backward_seconds=0.0, ready=())
    for network in (wire, payload):
        buckets = count_buckets("none", job.sizes.parameters, 64)
        gradients = buckets * network.all_reduce_seconds(job.sent_bytes(64, "none")[0] / buckets, 64)
        assert estimate_hosts(job, network, 64).waited_seconds == pytest.approx(gradients)


def test_late_rows_are_hidden_by_computing_if_their_messages_are_shorter() -> None:
    job, link = (
        replace(JOB, levels=("powersgd",), sizes=replace(SIZES, factors=0)),
        replace(PAYLOAD, bits_per_second=16e6),
    )
    rows = link.all_reduce_seconds(job.sent_bytes(4, "powersgd")[1], 4)
    assert 0.1 < rows < 1
    assert estimate_hosts(job, link, 4).waited_seconds < 1e-3
    # The messages of the rows take 4.1 s, of which the 3.1 s that a step computes hide a part.
    slower = replace(link, bits_per_second=16e6 * rows / 4.1)
    assert estimate_hosts(job, slower, 4).waited_seconds == pytest.approx(4.1 - 3.1, rel=1e-3)
    # Ranks of one host average their rows on the host first, and wait for the mean.
    assert estimate_hosts(replace(job, ranks_per_host=2), link, 2).waited_seconds > 0.1


def test_a_host_with_several_ranks_sends_blocks_once() -> None:
    network = replace(PAYLOAD, bits_per_second=100e6)
    two = scale_cores(replace(JOB, backward_seconds=0.0, sizes=WITHOUT_ROWS), 2, ranks_per_host=2)
    assert (two.cores, two.step_seconds) == (1.0, 1.1)
    for level, members in (("bf16", 8), ("int8", 4), ("powersgd", 4)):
        job = replace(two, levels=(level,))
        whole = job.sent_bytes(4, level)[0]
        sent = 2 * (members - 1) / members * whole
        waited = estimate_hosts(job, network, 4).waited_seconds
        assert waited == pytest.approx(sent / network.bytes_per_second, rel=1e-4), level
    # Twice as many ranks train on twice as many examples, and the tokens of all ranks are sent.
    free, alone = estimate_hosts(replace(two, levels=("int8",)), FREE, 4), estimate_hosts(JOB, FREE, 4)
    samples = 2 * alone.samples_per_second * alone.step_seconds
    assert free.samples_per_second * free.step_seconds == pytest.approx(samples, rel=1e-12)
    assert two.sent_numbers(2, "none")[1] == 0.0
    assert replace(JOB, ranks_per_host=2).sent_numbers(2, "none") == JOB.sent_numbers(4, "none")


def test_ranks_of_a_host_take_computing_time_to_add_up_their_gradients() -> None:
    # Of ten buckets, the last one is waited for, which takes nothing from computing.
    network, hidden = replace(FREE, cpu_seconds_per_byte=1e-9), 0.9
    one, two = (
        estimate_hosts(replace(JOB, levels=("int8",), sizes=WITHOUT_ROWS, ranks_per_host=n), network, 4) for n in (1, 2)
    )
    assert two.taken_seconds - one.taken_seconds == pytest.approx(hidden * 1e-9 * 8 * 10_000_000, rel=1e-3)
    one, two = (estimate_hosts(replace(JOB, sizes=WITHOUT_ROWS, ranks_per_host=n), network, 4) for n in (1, 2))
    assert two.taken_seconds - one.taken_seconds == pytest.approx(hidden * 1e-9 * 0.25 * 40e6, rel=1e-3)
