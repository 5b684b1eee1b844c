"""Planning while enabled in processes of their own: scripts run as they are, workers that load data, several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.nn.test_ranks import run as run_ranks

from tilewise.cli import cli

ROOT = Path(__file__).parents[2]
SCRIPT = '''
import sys, json
import torch
from torch import nn
from torch.nn.functional import conv2d
from torch.utils.data import DataLoader

class LitModel(nn.Module):
    """As a LightningModule is written: layers in __init__, loss in training_step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3))

    def training_step(self, batch):
        return conv2d(self.net(batch), torch.ones(1, 2, 1, 1)).square().mean()

class Blurred(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        blurred = torch.nn.functional.conv2d(torch.randn(1, 9, 9), torch.ones(1, 1, 3, 3))
        assert type(torch.nn.functional.conv2d).__name__ == "builtin_function_or_method"
        return blurred

if __name__ == "__main__":
    model = LitModel()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in DataLoader(Blurred(), batch_size=4, num_workers=1):
        loss = model.training_step(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(json.dumps({"argv": sys.argv, "name": __name__, "path": sys.path[0], "module": LitModel.__module__}))
    sys.exit(3)
'''


def start(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TILEWISE_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment | variables, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_script_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    script = tmp_path / "place" / "train.py"
    script.write_text(SCRIPT, "utf-8")
    words = ["-m", "tilewise", "run", "--report", "--workspace", "none", str(script), "--epochs", "2", "-m"]
    done = start(words, tmp_path, TILEWISE_RIGOR="wisdom_only", TILEWISE_WORKSPACE="1MiB")
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    assert found == {
        "argv": [str(script), "--epochs", "2", "-m"], "name": "__main__", "path": str(script.parent),
        "module": "__main__",
    }  # fmt: skip
    lines = done.stderr.splitlines()
    assert lines[0].split() == ["layer", "input", "pass", "runs", "plan", "ms", "torch", "ms"]
    assert lines[-1] == "step: not compared, rigor='wisdom_only' measures nothing"
    assert {line.split()[0] for line in lines[1:-1]} == {
        "mb4ic1ih7oc2oh5kh3ph0", "mb4ic2ih5oc2oh3kh3ph0", "mb4ic2ih3oc1oh3kh1ph0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run", "nowhere.py"], "tilewise: SCRIPT='nowhere.py': no such file; with -m it may be a module's name"),
        (["run", "--workspace", "much", __file__], "tilewise: --workspace='much': a number of bytes"),
        (["run", "--rigor", "lazy", __file__], "tilewise: Invalid value for '--rigor'"),
    ],
)
def test_bad_input(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words, prog_name="tilewise")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(line)
    assert F.conv2d is torch.conv2d


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ranks_plan_nothing_and_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_ENABLE", "1")  # and so it is enabled by the import
    outputs = run_ranks(
        """
import warnings
warnings.simplefilter("always")
from tilewise.nn.script import session as enabling
session = enabling._of_process
assert torch.nn.functional.conv2d is not torch.conv2d and not torch.cuda.is_initialized()
from tilewise.problems.conv.problem import Pass
with warnings.catch_warnings(record=True) as told:
    for index in range(4):
        sizes = 9 if rank == 0 else 9 + index // 2  # ranks whose shapes differ must not wait for one another
        y = model(torch.randn(2, 3, sizes, 9))
        y.sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
print(len(told), "wisdom" in str(told[0].message), type(y.grad_fn).__name__)
known = session.report().layers[0].calls[0].passes[0]
print("no wisdom" in known.reason, known.replaced)

class Remembering(Dividing):
    def plan(self, problem, options=None):
        assert options.rigor == "wisdom_only"
        return super().plan(problem, options)

with tilewise.enabled(wait=True, planner=Remembering()):
    for index in range(2):
        y = model(x)
print(type(y.grad_fn).__name__)
""",
        tmp_path,
    )
    assert outputs[0] == outputs[1] == "1 True ConvolutionBackward0\nTrue False\nPlannedConvBackward\n"
