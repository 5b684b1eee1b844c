"""``explain`` in words: the answer first, then every candidate with the reason why it was not chosen."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text

from tilewise.plan import Config, Error, Measurement, Plan
from tilewise.problems.conv.notation import parse_layer
from tilewise.report.explained import Explained, answer, answer_text, explain_table, why_not
from tilewise.report.values import PassResult
from tilewise.report.words import config_words

ON = {device: parse_layer("mb8ic3ih12oc8oh12kh3ph1", device=device) for device in ("cpu", "cuda:H100")}
TORCHS = Measurement("aten", 4, Config(), 2.0, 2**20, host_ms=0.02, dispersion=0.05)
FFT = Measurement(
    "fft", 4, Config(basis=(16, 16), block=1), 1.0, 3 * 2**20, Error(2e-7, 1e-7), baseline_ms=2.0, host_ms=0.02,
    estimate_ms=1.5, dispersion=0.12,
)  # fmt: skip
LATE = replace(FFT, config=Config(basis=(32, 32), block=1), time_ms=1.25)
LEFT_OUT = [
    Measurement("winograd", 1, Config(tile=n), reason=f"not measured: estimated {n}.5 ms, the best so far takes 1.000",
                estimate_ms=n + 0.5)
    for n in (2, 4, 6)
]  # fmt: skip
OUT = [Measurement(name, 1, Config(), reason="runs on cuda, not cpu") for name in ("cudnn", "polyphase")]


def explained(
    chosen: Measurement | None, *others: Measurement, device: str = "cpu", rigor: str = "measure"
) -> Explained:
    problem, plan = ON[device], None
    if chosen is not None:
        assert chosen.time_ms is not None
        plan = Plan(
            problem.key, chosen.solver, chosen.version, chosen.config, time_ms=chosen.time_ms,
            workspace=chosen.workspace or 0, host_ms=chosen.host_ms,
        )  # fmt: skip
    tried = [*([] if chosen is None else [chosen]), *others]
    return Explained(PassResult(problem, plan, "" if plan else "no plan"), tried, rigor)


def said(one: Explained) -> str:
    return Text.from_markup(answer(one)).plain


def shown(one: Explained, width: int = 200, verbose: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(explain_table(one, verbose=verbose))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_answer_names_what_won_and_by_how_much() -> None:
    text = said(explained(FFT, LATE, TORCHS, *LEFT_OUT, *OUT))
    assert text == (
        "The fastest for fprop is fft (basis 16x16): 1.000 ms, 2.00 times as fast as torch's own choice (2.000 ms), "
        "in 3.0 MiB of workspace. 3 candidates were timed, 3 left out by their estimates, 2 out for the reasons below."
    )


def test_the_answer_says_why_torchs_choice_stays_or_nothing_does() -> None:
    kept = explained(TORCHS, replace(FFT, time_ms=2.5))
    assert said(kept).startswith(
        "Torch's own choice is kept for fprop: 2.000 ms. The fastest other, fft (basis 16x16, block 1), took "
        "2.500 ms: 0.500 ms slower (25%). "
    )
    assert "nothing else was timed" in said(explained(TORCHS))
    over = [
        replace(FFT, time_ms=None, reason=f"needs {n} B of workspace, the limit is 0 B", workspace=n) for n in (9, 5)
    ]
    assert "the least that a candidate needs is 5 B" in said(explained(None, *over))
    assert "Wisdom has no plan for fprop" in said(explained(None, rigor="wisdom_only"))
    assert said(explained(FFT, TORCHS, rigor="estimate")).startswith("By estimate alone fft (basis 16x16, block 1) is")


@pytest.mark.parametrize(
    ("device", "m", "words"),
    [
        ("cpu", replace(FFT, time_ms=3.0), "1.000 ms slower (50%)"),
        ("cpu", replace(FFT, time_ms=9.0), "7.000 ms slower (4.5 times as long)"),
        ("cpu", replace(FFT, time_ms=1.9), "5% faster than torch's: a gain of less than 12% is not sure"),
        ("cpu", replace(FFT, time_ms=1.762), "11% faster than torch's: a gain of less than 12% is not sure"),
        ("cpu", replace(FFT, time_ms=1.985), "less than 1% faster than torch's: a gain of less than 12% is not sure"),
        ("cpu", replace(FFT, time_ms=1.9999), "as fast as torch's, within what single runs vary"),
        ("cpu", replace(FFT, time_ms=2.0001), "as fast as torch's, within what single runs vary"),
        ("cuda:H100", replace(FFT, time_ms=1.95), "2% faster than torch's: a gain of less than 5% is not sure"),
        (
            "cpu",
            replace(FFT, time_ms=1.0),
            "1.000 ms faster when tried alone; when the best were timed in turns, none surely beat torch's",
        ),
        (
            "cuda:H100",
            replace(FFT, time_ms=1.94, host_ms=1.05),
            "torch's is 0.060 ms slower alone, but this needs 1030 us more of the host in a step",
        ),
        ("cpu", replace(FFT, reason="is too far from float64"), "is too far from float64"),
    ],
)
def test_reasons_are_in_words(device: str, m: Measurement, words: str) -> None:
    assert why_not(m, explained(TORCHS, m, device=device)) == words


def test_what_was_faster_alone_than_the_chosen_one_says_so() -> None:
    late = replace(FFT, time_ms=1.2)
    words = "0.200 ms faster when tried alone; when the best were timed in turns, the chosen one won"
    early = replace(LATE, time_ms=1.0)
    assert why_not(early, explained(late, early, TORCHS)) == words
    launched = replace(early, host_ms=1.05)  # fewer ms of the device, but the host is slower than with torch's
    assert why_not(launched, explained(late, launched, TORCHS, device="cuda:H100")) == (
        "the chosen one is 0.200 ms slower alone, but this needs 1030 us more of the host in a step than torch's"
    )
    refused = replace(TORCHS, reason="is left out by --exclude")  # what does not run is nothing to lose to
    assert why_not(launched, explained(late, launched, refused, device="cuda:H100")) == words


def test_an_answer_found_on_a_busy_host_is_doubtful() -> None:
    quiet = explained(replace(FFT, time_ms=1.2), LATE, TORCHS)
    assert quiet.result.plan is not None
    busy = replace(quiet, result=replace(quiet.result, plan=replace(quiet.result.plan, load=0.9)))
    assert "Doubtful" not in said(quiet)
    assert said(busy).replace(
        "Doubtful: other processes kept the host busy while these times were taken. ", ""
    ) == said(quiet)
    assert answer_text(busy) == said(busy)
    early = replace(LATE, time_ms=1.0)
    assert "when the best were timed in turns on a busy host, the chosen one won" in why_not(early, busy)


def test_candidates_stand_by_time_with_all_figures_and_the_lost_in_groups() -> None:
    lines = shown(explained(FFT, TORCHS, LATE, *LEFT_OUT, *OUT)).splitlines()
    assert "estimate ms" in lines[0]
    assert lines[1].split() == ["fft:", "basis", "16x16", "1.500", "1.000", "12%", "3.0", "MiB", "2e-07", "chosen"]
    assert "0.250 ms slower (25%)" in lines[2]
    assert lines[3].split()[:4] == ["aten", "-", "2.000", "5%"]
    assert lines[4].startswith("winograd: tile 2, and 2 other configs")
    assert "not measured: estimated 2.5 ms" in lines[4]
    assert lines[-2:] == ["out", "  cudnn, polyphase: runs on cuda, not cpu"]
    verbose = shown(explained(FFT, TORCHS, LATE, *LEFT_OUT, *OUT), verbose=True).splitlines()
    assert "fft basis=16x16 block=1" in verbose[1]
    assert "2.00x" in verbose[1]
    assert len([line for line in verbose if line.startswith("winograd tile=")]) == 3


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_word_is_broken_however_narrow(width: int) -> None:
    one = explained(FFT, TORCHS, LATE, *LEFT_OUT, *OUT, device="cuda:H100")
    narrow, wide = shown(one, width), shown(one, 400)
    assert max(map(len, narrow.splitlines())) <= width
    words = {word.rstrip(",") for word in narrow.split()}
    assert {word.rstrip(",") for word in wide.split()} - words <= {
        "candidate",
        "not",
        "why",
        "-",
    }  # headings and cells that say nothing


def test_configs_in_words() -> None:
    config = Config(tile=(3, 8), lanes=16, shares=1, team="own", fused=True, packed=False, solver="row_gemm")
    assert config_words(config) == "fused, 16 lanes, no packed, 1 share, computed by row gemm, own threads, tile 3x8"
    assert config_words(Config(sizes=(64, 64, 32))) == "160 = 2x64 + 32"
    assert config_words(Config()) == ""
