"""Bad input: exit code 2 and one line on stderr that names the argument, the value and what would do."""

from __future__ import annotations

import pytest

LAYER = "mb4ic3ih12oc8oh12kh3ph1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan",), ["NET|LAYER"]),
        (("plan", "alexnot"), ["alexnot", "alexnet", "torchvision:NAME", "module.path:factory"]),
        (("plan", "no.such.module:net"), ["no.such.module:net"]),
        (("plan", "mb4ic3ih12oc8kh"), ["kh", "whole number"]),
        (("plan", "mb4ic3oc8kh3"), ["ih", "missing"]),
        (("plan", "g2mb4ic3ih12oc8kh3"), ["ic3", "g2"]),
        (("plan", "mb4ic3ih2oc8kh3"), ["ih2", "empty"]),
        (("plan", LAYER, "--workspace", "64 MB?"), ["--workspace", "64 MB?", "64MiB"]),
        (("plan", LAYER, "--workspace", "-1"), ["--workspace", "-1"]),
        (("plan", LAYER, "--workspace", "64"), ["--workspace '64'", "64B would do for bytes", "64MiB"]),
        (("plan", LAYER, "--workspace", "64M"), ["--workspace '64M'", "10^6 or 2^20", "64MB", "64MiB"]),
        (("plan", LAYER, "--workspace", "0.5g"), ["--workspace '0.5g'", "10^9 or 2^30", "0.5GB", "0.5GiB"]),
        (("time", LAYER, "--total-workspace", "120"), ["--total-workspace '120'", "120B", "120MiB"]),
        (("plan", "alexnet", "--memory-limit", "16"), ["--memory-limit '16'", "16B", "16MiB"]),
        (("run", "--workspace", "64", "program.py"), ["--workspace '64'", "64B", "64MiB"]),
        (("plan", "nothere.txt"), ["nothere.txt", "No such file"]),
        (("plan", LAYER, "--total-workspace", "64 MB?"), ["--total-workspace", "64 MB?", "64MiB"]),
        (("plan", LAYER, "--total-workspace", "1MiB", "--policy", "wd"), ["--policy", "wd", "paper_wd"]),
        (("time", LAYER, "--policy", "paper_wd"), ["--policy", "paper_wd", "--total-workspace", "120MiB"]),
        (("plan", LAYER, "--batch", "0"), ["--batch", "0"]),
        (("plan", LAYER, "--batch", "many"), ["--batch", "many"]),
        (("plan", LAYER, "--device", "tpu"), ["--device", "tpu", "cpu, cuda"]),
        (("plan", LAYER, "--device", "meta"), ["--device", "meta", "cpu, cuda"]),
        (("plan", LAYER, "--device", "cuda:99"), ["--device", "cuda:99"]),
        (("plan", LAYER, "--rigor", "hard"), ["--rigor", "hard", "patient"]),
        (("plan", LAYER, "--batch-sizes", "some"), ["--batch-sizes", "some", "powers_of_two"]),
        (("plan", LAYER, "--precision", "fp64"), ["--precision", "fp64", "tf32"]),
        (("plan", LAYER, "--dtype", "float64"), ["--dtype", "float64", "bf16"]),
        (("plan", LAYER, "--layout", "nhwc"), ["--layout", "nhwc", "channels_last"]),
        (("plan", LAYER, "--pass", "bprop"), ["--pass", "bprop", "dgrad"]),
        (("plan", LAYER, "--frobnicate"), ["--frobnicate"]),
        (("plan", LAYER, "more"), ["more"]),
        (("time", "alexnot"), ["alexnot", "alexnet"]),
        (("time", LAYER, "--iterations", "0"), ["--iterations", "0"]),
        (("explain", "alexnet"), ["LAYER", "'alexnet' is a network", "'tilewise plan alexnet' lists"]),
        (("explain", "timm:resnet18"), ["'timm:resnet18' is a network", "'tilewise plan timm:resnet18' lists"]),
        (("explain", "net:Net"), ["'net:Net' is a network", "'tilewise plan net:Net' lists"]),
        (("explain", "d1.dw"), ["'d1.dw' is not a layer", "tilewise.summary(model).explain_commands('d1.dw')"]),
        (("explain", "layer1.0.conv2"), ["summary(model).explain_commands('layer1.0.conv2')", "mb256"]),
        (("explain", "3x224x224"), ["'3x224x224' is not a layer", "mb256"]),
        (("explain", LAYER, "--pass", "bprop"), ["--pass", "bprop", "fprop", "forward"]),
        (("explain", "lstm:t8n2i8h8", "--pass", "forward"), ["--pass 'forward'", "inference, training"]),
        (("explain", LAYER, "--solver", "ftt"), ["--solver", "'ftt'", "did you mean 'fft'?", "tilewise info"]),
        (("explain", LAYER, "--solver", "micro_batch"), ["--solver", "'micro_batch'", "cuts problems", "aten"]),
        (("explain", LAYER, "--solver", "fft", "--rigor", "wisdom_only"), ["--solver", "'fft'", "rigor measure"]),
        (("wisdom", "forget"), ["--problem", "--all"]),
        (("wisdom", "forget", "--all", "--solver", "aten"), ["--solver", "--all"]),
        (("wisdom", "import", "no_such_file.json"), ["no_such_file.json", "No such file"]),
        (("wisdom", "export", "no_such_folder/wisdom.json"), ["no_such_folder", "No such file"]),
        (("wisdom", "frob"), ["frob"]),
        (("frobnicate",), ["frobnicate", "plan, time, explain"]),
        (("--frobnicate",), ["--frobnicate"]),
    ],
    ids=" ".join,
)
def test_one_clear_line(run, arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("tilewise: ")
    for word in words:
        assert word in line


def test_a_broken_wisdom_document_is_one_line(run, tmp_path):
    file = tmp_path / "wisdom.json"
    for text in ("not json", "{}", '{"kind": "tilewise wisdom", "format": 99}'):
        file.write_text(text)
        result = run("wisdom", "import", str(file))
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert "wisdom.json" in line


@pytest.mark.parametrize("batch", ["1000000000", "100000000000"])
def test_more_than_memory_holds_is_one_line(run, batch):
    result = run("plan", "mb4ic1000ih100oc1000kh1", "--batch", batch, "--device", "cpu")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "out of memory" in line
    assert "smaller --batch" in line


def test_as_a_process(start):
    process = start("plan", "mb4ic3ih12oc8kh")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err
