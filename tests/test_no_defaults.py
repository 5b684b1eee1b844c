"""No default type or device of the caller's reaches the library: every tensor is told both, which its syntax shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.factories import defaults_in, python_files

SOURCE = Path(__file__).parent.parent / "src" / "tilewise"
READ_BY_KERNELS = ("kernels", "solvers")
"""Folders whose NumPy arrays kernels read by address."""
FOR_THE_CALLER = (Path("frontends") / "zoo", Path("nn") / "graphs" / "modes.py")
"""Networks that are the caller's own, and made under the caller's defaults as torch's are; what watches the caller's
defaults."""


def test_every_tensor_is_told_its_type_and_device() -> None:
    files = {path.relative_to(SOURCE): path for path in python_files(SOURCE)}
    assert len(files) > 300
    found = []
    for name, path in files.items():
        if not any(map(name.is_relative_to, FOR_THE_CALLER)):
            found += defaults_in(name, path.read_text("utf-8"), name.parts[0] in READ_BY_KERNELS)
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.empty(3)",
        "import torch\ntorch.empty(3, device='meta')",
        "import torch\ntorch.zeros(3, dtype=torch.int64)",
        "import torch\ntorch.ones(3, dtype=None, device='cpu')",
        "import torch\ntorch.full((3,), 2.0, device=x.device)",
        "import torch\ntorch.arange(5, device=x.device)",
        "import torch\ntorch.tensor([1.0], device='cpu')",
        "import torch\ntorch.as_tensor(x)",
        "import torch\ntorch.empty_strided((2,), (1,))",
        "import torch\ntorch.rand(3, generator=g)",
        "import torch\ntorch.empty(3, **where)",
        "import torch\ntorch.fft.rfftfreq(8)",
        "import torch.fft\ntorch.fft.fftfreq(8, device='cpu')",
        "from torch.fft import fftfreq\nfftfreq(8)",
        "from torch import fft\nfft.fftfreq(8)",
        "import torch\ntorch.hann_window(8)",
        "import torch\ntorch.signal.windows.hann(8)",
        "import torch\ntorch.Generator()",
        "import torch\ntorch.Generator().manual_seed(1)",
        "import torch\ntorch.Tensor(3)",
        "from torch import Tensor\nTensor([1.0])",
        "import torch\ntorch.FloatTensor(3)",
        "import torch\ntorch.frombuffer(b'1')",
        "import torch\ntorch.get_default_dtype()",
        "import torch\ntorch.where(x > 0, 1.0, -1.0)",
        "import torch\ntorch.finfo().eps",
        "from torch import nn\nnn.Conv2d(3, 3, 3)",
        "import torch\ntorch.nn.BatchNorm1d(3, device='cpu')",
        "import torch as t\nt.zeros(3)",
        "from torch import zeros as nought\nnought(3)",
        "def late():\n    import torch\n    return torch.zeros(3)",
        "import torch\nmake = torch.empty\nmake(3)",
        "import functools, torch\nfunctools.partial(torch.empty, 3)",
        "import numpy as np\nnp.zeros(3)",
        "import numpy\nnumpy.array([1, 2])",
        "import numpy as np\nnp.full(3, 0.5)",
        "from numpy import arange\narange(3)",
        "import numpy as np\nlist(map(np.asarray, x))",
    ],
)
def test_every_default_is_seen(line: str) -> None:
    assert len(defaults_in(Path("planted.py"), line, numpy=True)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.empty(3, dtype=torch.float32, device='cpu')",
        "import torch\ntorch.Generator(x.device)\ntorch.Generator(device='cpu')",
        "import torch\nx.new_zeros(3)\ntorch.empty_like(x)\ntorch.cat([x])\ntorch.from_numpy(a)",
        "import torch\ntorch.frombuffer(b, dtype=torch.uint8)",
        "import torch\ntorch.where(x > 0, x, 0.0)",
        "import torch\ntorch.finfo(x.dtype)",
        "import torch\ndef f(x: torch.Tensor) -> torch.Tensor: return isinstance(x, torch.Tensor)",
        "from torch import nn\nisinstance(x, nn.Conv2d)\nnn.ReLU()",
        "import numpy as np\nnp.zeros(3, np.int64)\nnp.full(3, 1, np.int64)\nnp.array(x, dtype=np.float32)",
        "import triton.language as tl\ntl.zeros([3], tl.float32)\ntl.arange(0, 4)",
        "def zeros(n): ...\nzeros(3)",
    ],
)
def test_what_is_told_passes(line: str) -> None:
    assert not defaults_in(Path("planted.py"), line, numpy=True)
