"""ResNet-18 trained whole and on images that are split over ranks: losses and accuracies, which should be equal.

The paper trained ResNet-18 on up to four GPUs to show that a split changes nothing that matters. Here the images are
the 1,797 handwritten digits that scikit-learn ships, enlarged to ``size`` pixels a side; every fourth is kept for the
test. Both sides start from the same weights and see the same mini-batches in the same order. Each rank has its rows of
every image, and batch norms take their statistics over all ranks. The values of a row are losses over the test images,
not times. ``details`` have the accuracy and the loss of each epoch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.ranks import run_ranks, usable
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from torch.distributed.device_mesh import init_device_mesh

from tilewise.distributed import SpatialParallel
from tilewise.frontends.zoo.resnet import Basic, ResNet
from tilewise.machine.torch_state import framework_flags

DEFAULTS = {"ranks": "2", "size": "64", "epochs": "4", "batch": "32", "most": "0", "lr": "0.01"}
QUICK = {"size": "64", "epochs": "1", "batch": "4", "most": "8"}
SEED = 20190315
KEPT = 4
"""One image in so many is for the test."""
CLOSE = 0.01
"""How far accuracies may be apart: sums in another order change single images."""


def run(settings: Settings) -> Result:
    """One row a number of ranks. Raises :class:`NothingToMeasure` without scikit-learn."""
    if importlib.util.find_spec("sklearn") is None:
        raise NothingToMeasure("scikit-learn, which ships the digits, is not installed; the extra demo would do")
    ranks, notes = usable(settings.integers("ranks"), settings.device)
    given = {name: settings.integer(name) for name in ("size", "epochs", "batch", "most")}
    given["lr"] = float(settings.text("lr"))
    settings.say("whole")
    whole = run_ranks(1, settings.device, "spatial_accuracy:trained", given)[0]
    rows, bars = [], []
    for count in ranks:
        settings.say(f"split over {count} ranks")
        split = run_ranks(count, settings.device, "spatial_accuracy:trained", given)[0]
        details = {"ranks": count, "whole": whole, "split": split}
        rows.append(
            Row(
                f"split over {count} ranks", "loss over the test images", Side("whole", whole["loss"]),
                Side(f"{count} ranks", split["loss"]), unit="nats", details=details,
            )
        )  # fmt: skip
        bars.append(
            Bar(
                f"accuracy on {count} ranks, {split['accuracy']:.4f}, beside {whole['accuracy']:.4f} whole: apart",
                abs(split["accuracy"] - whole["accuracy"]), most=CLOSE, applies=not settings.quick,
            )
        )  # fmt: skip
    return Result(rows, bars, notes=notes)


def trained(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank's rows of the images; the test's accuracy and loss, and the loss of each epoch."""
    ranks = dist.get_world_size()
    torch.manual_seed(SEED)
    model = ResNet(Basic, (2, 2, 2, 2), num_classes=10).to(device)
    scores: Callable[[torch.Tensor], Any] = model
    if ranks > 1:
        parallel = SpatialParallel(model, init_device_mesh(device.type, (ranks,), mesh_dim_names=("h",)), dims=("h",))
        scores = lambda x: whole_of(parallel(split(parallel, x)))  # noqa: E731
    images, digits = drawn(given["size"], device)
    test = torch.arange(len(digits), device=device) % KEPT == 0
    if given["most"]:
        images, digits, test = (t[: given["most"]] for t in (images, digits, test))
    with framework_flags(device.type, "ieee", deterministic=True):
        losses = _epochs(model, scores, images[~test], digits[~test], given)
        model.eval()
        with torch.no_grad():
            found = torch.cat([scores(part) for part in images[test].split(given["batch"])])
    right = found.argmax(1) == digits[test]
    return {
        "accuracy": float(right.double().mean()),
        "right": int(right.sum()),
        "images": len(right),
        "loss": float(F.cross_entropy(found.double(), digits[test])),
        "losses": losses,
    }


def _epochs(
    model: torch.nn.Module,
    scores: Callable[[torch.Tensor], Any],
    images: torch.Tensor,
    digits: torch.Tensor,
    given: dict[str, Any],
) -> list[float]:
    """Train for some epochs; the mean loss of each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=given["lr"], momentum=0.9)
    generator = torch.Generator("cpu").manual_seed(SEED)
    losses = []
    for _ in range(given["epochs"]):
        order = torch.randperm(len(digits), generator=generator, device="cpu").to(images.device)
        total = 0.0
        for batch in order.split(given["batch"]):
            optimizer.zero_grad()
            loss = F.cross_entropy(scores(images[batch]), digits[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += float(loss.detach()) * len(batch)
        losses.append(total / len(digits))
    return losses


def drawn(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits as images (1797, 3, ``size``, ``size``) of mean 0, and which they are."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy(digits.images).float()[:, None].to(device) / 16
    images = F.interpolate(x, size=(size, size), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
    return images - images.mean(), torch.from_numpy(digits.target).to(device)


def split(parallel: SpatialParallel, x: torch.Tensor) -> Any:
    """This rank's rows of ``x``, which every rank has."""
    (first, last), *_ = parallel.layout(x.shape).own
    return parallel.shard(x[:, :, first:last].contiguous(), x.shape)


def whole_of(outputs: Any) -> torch.Tensor:
    """The scores, which every rank has whole behind the mean over all pixels."""
    found: torch.Tensor = getattr(outputs, "local", outputs)
    return found
