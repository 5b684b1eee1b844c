"""What :mod:`tools.check_wheel` runs in an environment with an extra: the thing that the extra is for, at its smallest.

Each program runs in an empty folder, by the Python of the new environment, which has the wheel and not the clone.
Where an extra serves the clone (its tests, manual, demo, benchmarks), the program takes the file of the clone and the
package of the wheel. One that ends with an exception has failed.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

START = f"""
import subprocess, sys
from pathlib import Path
root = Path({str(ROOT)!r})
def run(*words):
    subprocess.run([str(word) for word in words], check=True)
def tilewise(*words):
    run(Path(sys.executable).with_name("tilewise"), *words)
"""
"""Before each program: how it runs commands."""

EVERYWHERE = """
import torch, tilewise
assert tilewise.__file__.startswith(__import__("sys").prefix), tilewise.__file__
model = torch.nn.Conv2d(4, 8, 3, padding=1)
images = torch.randn(2, 4, 16, 16)
expected = model(images)
assert tilewise.optimize(model, images, workspace="1MiB", training=False) is model
torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
"""
"""What runs in each environment: the installed package plans a layer, and the result stays."""

BASE = """
tilewise("--version")
tilewise("plan", "alexnet", "--batch", "1", "--rigor", "estimate", "--device", "cpu", "-o", "plan.json")
tilewise("report", "plan.json")
assert "conv1" in Path("plan.html").read_text("utf-8")
"""

COMPILED = """
from tilewise import Options, Planner
from tilewise.device import device_name
from tilewise.notation import parse_layer
problem = parse_layer("mb1ic8ih12oc8kh3ph1", device=device_name("{device}"))
tried = Planner().explain(problem, Options(), every_config_of=("{solver}",))
assert any(m.solver == "{solver}" and m.time_ms for m in tried), tried
"""

CAFFE = r"""
import numpy as np
from PIL import Image
Path("images").mkdir()
draw = np.random.default_rng(0)
for n in range(8):
    Image.fromarray(draw.integers(0, 256, (8, 8), np.uint8)).save(f"images/{n}.png")
Path("list.txt").write_text("".join(f"{n}.png {n % 2}\n" for n in range(8)))
tilewise("caffe", "convert-imageset", "-gray", "images/", "list.txt", "data")
Path("net.prototxt").write_text('''
layer { name: "data" type: "Data" top: "data" top: "label" data_param { source: "data" batch_size: 4 backend: LMDB } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
        convolution_param { num_output: 2 kernel_size: 8 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "conv" bottom: "label" top: "loss" }
''')
Path("solver.prototxt").write_text('net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" max_iter: 2 '
                                   'snapshot_prefix: "net" snapshot_format: HDF5 solver_mode: CPU')
tilewise("caffe", "train", "-solver", "solver.prototxt")
from tilewise.frontends.caffe.files import read_weights
assert "conv" in read_weights("net_iter_2.caffemodel.h5")
"""
"""Images to LMDB, a net of prototxt trained on them, its weights as HDF5: each package of the extra is used."""

DEMO = """
run(sys.executable, root / "examples" / "demo.py", "--batch", 8, "--steps", 2, "--iterations", 1)
"""

REPORT = """
tilewise("advise", "gemm", "8x64:64x64", "--pass", "nn", "--device", "cpu", "--seconds", 2, "--picture", "rates.png")
assert Path("rates.png").read_bytes().startswith(b"\\x89PNG")
"""

DECLARED = """
sys.path.insert(0, str(root))
from benchmarks.harness.detection_operators import declare_detection_operators
declare_detection_operators()
"""

PEERS = (
    DECLARED
    + """
sys.path.insert(0, str(root / "benchmarks"))
import torch
from harness.peers import PEERS, versions
from tilewise.frontends.networks import load_network
assert all(versions().values()), versions()
images = torch.randn(1, 3, 64, 64)
for name in ("torchvision:squeezenet1_1", "timm:mobilenetv3_small_050"):
    network = load_network(name).module.eval()
    with torch.inference_mode():
        expected = network(images)
    for peer in ("onnxruntime", "openvino"):
        torch.testing.assert_close(PEERS[peer](network, images)(), expected, rtol=1e-3, atol=1e-3)
"""
)

TUTORIALS = (
    DECLARED
    + r"""
import re
for page in ("timm", "unet", "monai", "lightning"):
    text = (root / "docs" / "tutorials" / f"{page}.md").read_text("utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert code, page
    exec(compile(code, f"{page}.md", "exec"), {"__name__": "__main__"})
"""
)

DOCS = """
run(sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", "doctrees", root / "docs", "html")
assert "tilewise" in Path("html/index.html").read_text("utf-8")
"""

RELEASE = """
import os
os.environ["PIP_BUILD_CONSTRAINT"] = str(root / "constraints.txt")
run(sys.executable, "-m", "build", "--outdir", "dist", root)
run(sys.executable, "-m", "twine", "check", "--strict", *sorted(Path("dist").iterdir()))
"""

DEV = """
# Not from the clone: there its own modules would be found. That the wheel's types are found shows its py.typed.
run(sys.executable, "-m", "mypy", "--strict", "--cache-dir", "mypy", root / "tests" / "typing" / "public_api.py")
options = ["-q", "-p", "no:cacheprovider", "--rootdir", root, "-c", root / "pyproject.toml"]
run(sys.executable, "-m", "pytest", *options, root / "tests" / "test_plan.py")
"""

NEEDS = {
    "base": BASE,
    "cpu": COMPILED.format(solver="fused_lowering", device="cpu"),
    "gpu": COMPILED.format(solver="implicit_gemm", device="cuda"),
    "caffe": CAFFE,
    "demo": DEMO,
    "report": REPORT,
    "peers": PEERS,
    "tutorials": TUTORIALS,
    "docs": DOCS,
    "release": RELEASE,
    "dev": DEV,
}
"""What runs with each extra, and without any (``base``), beside :data:`EVERYWHERE`."""
