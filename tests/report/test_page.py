"""Pages: what stands in them, and that a browser shows it."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpuft.cli import main
from cpuft.errors import CpuftError, install_command
from cpuft.judge.predictions import write_predictions
from cpuft.record import EvaluationLine, ResumedLine
from cpuft.report.comparison import compare
from cpuft.report.comparison_tables import format_text, format_verdict
from cpuft.report.page import write_page
from cpuft.report.plots import label_runs, phases_of, thin
from tests.conftest import call_cpuft
from tests.judge.test_model_errors import make_reviews
from tests.records import make_record, make_steps, with_rate
from tests.report.page import make_equal_cores, make_runs
from tests.report.test_comparison import write_record


def test_a_page_of_sixteen_runs_is_small_and_quick(tmp_path: Path) -> None:
    runs = make_runs(tuple(range(1, 17)))
    path, seconds = tmp_path / "report.html", []
    for _ in range(2):  # the first call also imports matplotlib, and other programs slow down either of them
        before = time.process_time()
        write_page(runs, path)
        seconds.append(time.process_time() - before)
    assert min(seconds) < 3
    assert path.stat().st_size < 1_000_000


def test_nothing_in_a_page_is_elsewhere(tmp_path: Path) -> None:
    text = write_page(make_runs((1, 2, 4)), tmp_path / "page.html").read_text(encoding="utf-8")
    # Names of XML namespaces lead nowhere.
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)
    assert re.findall(r"https?:|//[a-z]|@import|<script|<link|<img|<iframe| src=", text) == []
    assert {reference[0] for reference in re.findall(r'href="([^"]*)"', text)} == {"#"}
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    identifiers = re.findall(r' id="([^"]*)"', text)
    assert len(identifiers) == len(set(identifiers))
    # All colours are the page's.
    figures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert re.findall(r"#[0-9a-f]{6}\b", figures) == []


def test_names_are_no_markup(tmp_path: Path) -> None:
    name = "<b>$x_1$&"
    runs = [
        dataclasses.replace(
            run,
            header=dataclasses.replace(run.header, model=name, options=run.header.options | {name: name}),
            evaluations=[EvaluationLine(1, {name: 0.5}, 1, 1.0)],
        )
        for run in make_runs((1, 2), ideal=False)
    ]
    text = write_page(runs, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>" not in text
    assert text.count(html.escape(name)) >= 3


def test_the_page_of_a_run_shows_its_errors(capsys: pytest.CaptureFixture[str]) -> None:
    made = make_reviews()
    columns = dict(zip(made.table.column_names, made.table.columns)) | {"text": [["<b>", "a & b"]] * 6}
    for number in (1, 2):
        evaluations = [EvaluationLine(1, made.about.metrics, 6, 2.0)]
        write_record(dataclasses.replace(make_runs((number,))[0], evaluations=evaluations), Path(f"run-{number}"))
        write_predictions(Path(f"run-{number}"), made.about, columns)

    def make_page(*words: str) -> str:
        with pytest.raises(SystemExit):
            main(["report", *words, "--html"])
        return Path(capsys.readouterr().out.removeprefix("page: ").strip()).read_text(encoding="utf-8")

    text = make_page("run-1")
    assert "<p>3 of 6 validation rows are predicted wrongly." in text
    wanted = "row 2: label bad, prediction good, probability 0.970; the label may be wrong"
    assert f"<tr><td>{wanted}</td><td>&lt;b&gt;</td><td>a &amp; b</td></tr>" in text
    assert "<b>" not in text
    assert "<h2>Errors</h2>" not in make_page("run-1", "--no-examples")
    assert "<h2>Errors</h2>" not in make_page("run-1", "run-2")
    write_predictions(Path("run-1"), made.about, {name: columns[name] for name in columns if name != "text"})
    assert "<h2>Errors</h2>" not in make_page("run-1")
    Path("run-1/predictions.parquet").write_text("PAR1")
    assert "the model&#39;s errors are not shown: run-1/predictions.parquet is damaged" in make_page("run-1")
    with pytest.raises(SystemExit):
        main(["report", "run-1", "--no-examples"])
    assert "--no-examples leaves examples out of the HTML page: give --html as well" in capsys.readouterr().err


def test_values_that_are_no_numbers_leave_gaps(tmp_path: Path) -> None:
    assert thin([1.0, 3.0, math.inf, math.nan, 5.0], most=3)[::2] == [2.0, 5.0]
    assert math.isnan(thin([1.0, 3.0, math.inf, math.nan, 5.0], most=3)[1])
    (run,) = make_runs((1,))
    for loss, bytes_sent in ((math.nan, 10**30), (math.inf, 0), (1e308, 0), (-1e308, 0)):
        steps = [dataclasses.replace(line, loss=loss, bytes_sent=bytes_sent) for line in run.steps]
        evaluations = [EvaluationLine(-(10**20), {"error": loss}, 1, 1.0)]
        changed = dataclasses.replace(run, steps=steps, evaluations=evaluations)
        assert write_page([changed], tmp_path / "page.html").exists()


WEAK = " Each update has 64 examples instead of 32 (weak scaling)."


@pytest.mark.parametrize(
    "rates, verdict",
    [
        ([(10.0, 18.0)], "2 ranks on 2 hosts are 1.80 times as fast as 1 rank on 1 host: 90% of 2 times."),
        (
            [(10.0, 18.0), (10.0, 18.2)],
            "2 ranks on 2 hosts are 1.81 ± 0.13 times as fast as 1 rank on 1 host: 90% of 2 times.",
        ),
        (
            [(10.0, 9.0), (10.0, 13.0)],
            "There is no clear difference in speed between 2 ranks on 2 hosts and 1 rank on 1 host.",
        ),
    ],
)
def test_the_verdict(rates: list[tuple[float, float]], verdict: str) -> None:
    records = [with_rate(make_record(np, np), rate) for pair in rates for np, rate in zip((1, 2), pair)]
    assert format_verdict(compare(records)) == verdict + WEAK


def test_the_verdict_says_that_the_ranks_share_cores() -> None:
    one, two = with_rate(make_record(1), 100.0), with_rate(make_record(2, 1), 119.0)
    assert format_verdict(compare([one, two])) == (
        "On the same 16 cores, 2 ranks on 1 host are 1.19 times as fast as 1 rank on 1 host: more ranks, but no more "
        f"hardware.{WEAK}"
    )
    again = [with_rate(make_record(1), 100.0), with_rate(make_record(2, 1), 90.0)]
    assert format_verdict(compare([one, two, *again])) == (
        "There is no clear difference in speed between 2 ranks on 1 host and 1 rank on 1 host on the same 16 cores."
        f"{WEAK}"
    )


def test_verdicts_of_one_run_and_against_the_ideal() -> None:
    alone = with_rate(make_record(2, 1), 18.0)
    assert format_verdict(compare([alone])) == "2 ranks on 1 host: 18.0 samples/s, accuracy 0.7700, f1 0.8400."
    assert format_verdict(compare(make_runs((1, 2)))).endswith(f"and 86% of the ideal.{WEAK}")


def test_a_verdict_claims_nothing_inside_the_ideals_interval() -> None:
    rounds = [make_runs((1, 2)), make_runs((1, 2))]
    ideal = rounds[1][2]
    rounds[1][2] = dataclasses.replace(
        ideal, steps=[dataclasses.replace(line, compute_seconds=[1.2, 1.2]) for line in ideal.steps]
    )
    verdict = format_verdict(compare([run for runs in rounds for run in runs]))
    assert verdict.endswith(f"87% of 2 times, with no clear difference from the ideal.{WEAK}")


def test_ranks_with_equal_cores_of_one_host_stand_for_hosts() -> None:
    comparison = compare(make_equal_cores(1.9, global_batch=32))
    assert format_verdict(comparison) == (
        "2 ranks on 16 cores are 1.90 times as fast as 1 rank on 8 cores: 95% of 2 times. That is about what a second "
        "host of 8 cores would give."
    )
    assert " ".join(format_text(comparison).splitlines()[1:3]) == format_verdict(comparison)
    (note,) = [
        note for note in comparison.notes if note.startswith("each rank has 8 cores of one host, as if it had a")
    ]
    assert note.endswith("which is slower: cpuft estimate runs/np-1 --bandwidth 1gbit shows by how much.")
    assert not [note for note in comparison.notes if "misses" in note]
    one, two = make_equal_cores(1.9)
    few = dataclasses.replace(one.header.ranks[0], cpus=[0, 1])
    uneven = dataclasses.replace(one, header=dataclasses.replace(one.header, ranks=[few]))
    assert format_verdict(compare([uneven, two])).startswith(
        "2 ranks on 1 host are 1.90 times as fast as 1 rank on 1 host"
    )
    four = dataclasses.replace(two.header, world_size=4, ranks=make_record(4, 2).header.ranks)
    apart = format_verdict(compare([one, with_rate(dataclasses.replace(two, header=four), 19.0)]))
    assert apart.startswith("4 ranks on 2 hosts are 1.90 times as fast as 1 rank on 1 host")


def test_what_limits_ranks_of_one_host_is_told() -> None:
    one, two = make_equal_cores(1.5, global_batch=32)
    two = dataclasses.replace(two, steps=make_steps(20, [0.3], 0.4, waited=0.04))
    said = (
        "np 2 misses 25% of a linear speedup: it waits for gradients in 10% of its time. What else is missing is "
        "slower computing: smaller batches, memory or a physical core that the ranks share, or other programs on this "
        "machine."
    )
    comparison = compare([one, two])
    assert said in comparison.notes
    assert format_verdict(comparison).endswith(
        "75% of 2 times. The notes say what limits ranks that share a host; a second host of 8 cores may give more."
    )


def test_without_a_clear_difference_nothing_is_promised_of_a_second_host() -> None:
    verdict = format_verdict(
        compare([*make_equal_cores(1.9, global_batch=32), *make_equal_cores(0.5, global_batch=32)])
    )
    assert verdict == "There is no clear difference in speed between 2 ranks on 16 cores and 1 rank on 8 cores."


def list_headings(page: Path) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", page.read_text(encoding="utf-8"))


def test_a_single_point_is_no_plot(tmp_path: Path) -> None:
    """Of two numbers of ranks one speedup is 1; what was evaluated once stands in the table."""
    runs = make_runs((1, 2), ideal=False)
    page = write_page(runs, tmp_path / "page.html")
    assert "Speed" not in list_headings(page)
    assert "accuracy over examples." in page.read_text(encoding="utf-8")
    once = [dataclasses.replace(run, evaluations=run.evaluations[-1:]) for run in runs]
    text = write_page(once, page).read_text(encoding="utf-8")
    assert "Loss over examples." in text
    assert "accuracy over" not in text
    assert "<td>0.8000</td>" in text
    write_page([dataclasses.replace(run, steps=run.steps[:1]) for run in once], page)
    assert "Loss and metric" not in list_headings(page)
    write_page(make_runs((1, 2, 4), ideal=False), page)
    assert "Speed" in list_headings(page)


def test_options_with_their_defaults_are_folded(tmp_path: Path) -> None:
    runs = make_runs((1, 2), ideal=False)
    options = runs[0].header.options | {"backend": "auto"}
    runs[0] = dataclasses.replace(runs[0], header=dataclasses.replace(runs[0].header, options=options))
    text = write_page(runs, tmp_path / "page.html").read_text(encoding="utf-8")
    shown, folded = text[text.index("<h2>Settings</h2>") :].split("<details>")
    # The second record does not tell the backend.
    differing = [("backend", "auto and not given"), ("ranks", "1 and 2")]
    told = [*differing, ("task", "mrpc"), ("learning rate", "2e-05")]
    assert re.findall("<tr><td>(.*?)</td><td>(.*?)</td></tr>", shown) == told
    assert "<td>epochs</td>" in folded
    assert "<td>torch</td>" in folded


def test_a_page_tells_restarts(tmp_path: Path) -> None:
    (run,) = make_runs((2,), ideal=False)
    line = ResumedLine(12, 3, 1, run.header.ranks[:1], "ccl", "bf16", "", "2026-01-01T00:00:00+00:00", 21.4, "a & b")
    page = write_page([dataclasses.replace(run, resumptions=[line, line])], tmp_path / "page.html")
    assert "was restarted 2 times, on 1 and 1 ranks" in page.read_text(encoding="utf-8")


def test_older_records_and_runs_of_one_size() -> None:
    runs = [make_record(2, options={"backend": name}) for name in ("gloo", "mpi")]
    runs[1] = dataclasses.replace(runs[1], path="runs/other/record.jsonl")
    assert label_runs(runs) == ["np 2, np-2", "np 2, other"]
    phases = {"data": 0.001, "forward": 0.1, "backward": 0.2, "communication": 0.01, "update": 0.02}
    assert phases_of(runs[0]) == [pytest.approx(phases)]


def test_a_page_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    one, two = make_runs((1, 2), ideal=False)
    other = dataclasses.replace(two, header=dataclasses.replace(two.header, task="rte"))
    empty = dataclasses.replace(one, steps=[])
    for runs, said in (([one, other], "not the same job"), ([empty], "runs/np-1 has no steps to draw: leave it out")):
        with pytest.raises(CpuftError, match=said):
            write_page(runs, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_another_file_of_that_name_is_left(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("<html>a thesis</html>")
    with pytest.raises(CpuftError, match=r"report.html exists and is not a page of cpuft: move it away"):
        write_page(make_runs((1, 2)), path)
    assert path.read_text() == "<html>a thesis</html>"
    (tmp_path / "folder").mkdir()
    with pytest.raises(CpuftError, match=r"folder exists and is not a page of cpuft: move it away"):
        write_page(make_runs((1, 2)), tmp_path / "folder")


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(make_record(1), Path("run"))
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        main(["report", "run", "--html"])
    said = capsys.readouterr()
    wanted = f"cpuft: error: a page needs matplotlib and Jinja2: {install_command('plot')}\n"
    assert (ended.value.code, said.out, said.err) == (2, "", wanted)
    assert [path.name for path in Path("run").iterdir()] == ["record.jsonl"]


def test_where_a_page_goes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for run in make_runs((1, 2), steps=20, ideal=False):
        write_record(run, tmp_path / "all" / f"np-{run.header.world_size}")
    assert call_cpuft(capfd, "report", "all", "--html") == (0, "page: all/report.html\n", "")
    for _ in range(2):
        assert call_cpuft(capfd, "report", "all/np-1", "all/np-2", "--html") == (0, "page: report.html\n", "")


MEASURE = """<!doctype html><iframe src="page.html" style="width: WIDTHpx; height: 900px; border: 0"></iframe>
<pre></pre><script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const out = [...page.querySelectorAll("body *")].filter(one => !one.closest(".wide > *")
    && one.getBoundingClientRect().right > root.clientWidth + 0.5).map(one => one.tagName);
  const small = [...page.querySelectorAll(".figures svg")].filter(
    one => one.getBoundingClientRect().height < 50).length;
  const ink = page.defaultView.getComputedStyle(page.querySelector("svg text")).fill;
  const paper = page.defaultView.getComputedStyle(page.body).backgroundColor;
  const clip = [...page.querySelectorAll("svg")].flatMap(svg => [...svg.querySelectorAll("text")].filter(text =>
    text.getBoundingClientRect().right > svg.getBoundingClientRect().right + 2).map(text => text.textContent));
  document.querySelector("pre").textContent = JSON.stringify({ width: root.clientWidth, scroll: root.scrollWidth,
    figures: page.querySelectorAll(".figures svg").length,
    hosts: page.querySelectorAll(".hosts svg").length, out, small, clip, ink, paper });
};
</script>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here: scripts/test installs it for root")
@pytest.mark.parametrize(
    "width, dark, ink, paper",
    [(360, False, "rgb(28, 33, 40)", "rgb(255, 255, 255)"), (1200, True, "rgb(230, 237, 243)", "rgb(13, 17, 23)")],
)
def test_a_browser_shows_it(width: int, dark: bool, ink: str, paper: str, tmp_path: Path) -> None:
    write_page(make_runs((1, 2, 4)), tmp_path / "page.html")
    (tmp_path / "measure.html").write_text(MEASURE.replace("WIDTH", str(width)))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
    ]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,1000", "--timeout=100000"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = ["chromium", *flags, "--dump-dom", f"file://{tmp_path}/measure.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    # Chromium's own line, where the machine is busy.
    own = "Slow network is detected"
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line and own not in line]
    found = re.search(r"<pre>(.*?)</pre>", done.stdout)
    assert found is not None
    shown = json.loads(html.unescape(found[1]))
    assert shown == {
        "width": width,
        "scroll": width,
        "figures": 7,
        "hosts": 7,
        "out": [],
        "small": 0,
        "clip": [],
        "ink": ink,
        "paper": paper,
    }
