"""Which forwards are still to be differentiated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.nn.background.open_graphs import ABANDONED, OpenGraphs


@dataclass
class Outputs:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


def forward(weight: torch.Tensor) -> torch.Tensor:
    return (weight * 2).sin()


def weight() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def test_a_graph_is_open_until_its_backward() -> None:
    graphs, w = OpenGraphs(), weight()
    y = forward(w)
    graphs.add(y)
    loss = y.sum()
    assert graphs.any()
    loss.backward()
    assert not graphs.any()  # though y and loss are still there


def test_graphs_in_containers_and_one_output_of_several() -> None:
    graphs, w = OpenGraphs(), weight()
    for outputs in ({"a": [forward(w)]}, Outputs(forward(w)), Outputs(w.detach(), (forward(w), forward(w)))):
        graphs.add(outputs)
        assert graphs.any()
        used = outputs["a"][0] if isinstance(outputs, dict) else (*outputs.hidden, outputs.logits)[0]
        used.sum().backward()
        assert not graphs.any()


def test_what_is_dropped_or_has_no_graph_is_not_waited_for() -> None:
    graphs, w = OpenGraphs(), weight()
    y = forward(w)
    graphs.add(y)
    assert graphs.any()
    del y
    assert not graphs.any()
    with torch.no_grad():
        graphs.add(forward(w))
    graphs.add(torch.ones(2))
    graphs.add(w)
    assert not graphs.any()


def test_several_forwards_before_one_backward() -> None:
    graphs, w = OpenGraphs(), weight()
    first, second = forward(w), forward(w)
    graphs.add(first)
    graphs.add(second)
    first.sum().backward()
    assert graphs.any()
    second.sum().backward()
    assert not graphs.any()


def test_outputs_kept_for_good_are_given_up() -> None:
    graphs, w = OpenGraphs(), weight()
    kept = forward(w)
    graphs.add(kept)
    for _ in range(ABANDONED + 1):
        assert graphs.any()
        y = forward(w)
        graphs.add(y)
        y.sum().backward()
    assert not graphs.any()
