"""The networks of a solver, in files and inside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewise.frontends.caffe.errors import CaffeError
from tilewise.frontends.caffe.files import find_beside, read_solver, solver_nets


def nets_of(tmp_path: Path, text: str) -> list[tuple[str, int, int, list[str]]]:
    path = tmp_path / "solver.prototxt"
    path.write_text(text, "utf-8")
    nets = solver_nets(read_solver(path), path)
    return [(net.name, net.state.phase, net.state.level, list(net.state.stage)) for net in (nets.train, *nets.tests)]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.prototxt").write_text('name: "a" state { level: 2 stage: "own" }\n', "utf-8")
    (tmp_path / "b.prototxt").write_text('name: "b"\n', "utf-8")
    (tmp_path / "started").mkdir()
    monkeypatch.chdir(tmp_path / "started")


def test_one_network_for_training_and_each_test(tmp_path: Path) -> None:
    text = 'net: "a.prototxt" test_iter: 5 test_iter: 6 test_interval: 1'
    assert nets_of(tmp_path, text) == [("a", 0, 2, ["own"]), ("a", 1, 2, ["own"]), ("a", 1, 2, ["own"])]
    assert nets_of(tmp_path, 'train_net: "a.prototxt"\n') == [("a", 0, 2, ["own"])]


def test_all_places_of_networks_in_their_order(tmp_path: Path) -> None:
    tests = 'test_net: "b.prototxt" test_net_param { name: "p" } test_iter: 1 test_iter: 2'
    wanted = [("p", 1, 0, []), ("b", 1, 0, [])]
    text = f'train_net: "a.prototxt" {tests} test_interval: 1'
    assert nets_of(tmp_path, text) == [("a", 0, 2, ["own"]), *wanted]
    text = f'train_net_param {{ layers {{ type: RELU }} name: "q" }} {tests} test_interval: 1'
    assert nets_of(tmp_path, text) == [("q", 0, 0, []), *wanted]
    text = f'net_param {{ name: "q" }} {tests} test_iter: 3 test_interval: 1'
    assert nets_of(tmp_path, text) == [("q", 0, 0, []), *wanted, ("q", 1, 0, [])]


def test_states_of_the_solver_come_last(tmp_path: Path) -> None:
    text = (
        'net: "a.prototxt" train_state { level: 3 stage: "more" } test_iter: 1 test_iter: 1 test_interval: 1'
        ' test_state { level: 7 } test_state { stage: "x" }'
    )
    assert nets_of(tmp_path, text) == [("a", 0, 3, ["own", "more"]), ("a", 1, 7, ["own"]), ("a", 1, 2, ["own", "x"])]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base_lr: 1", "none of net, net_param, train_net, train_net_param is given; one would do"),
        ('net: "a.prototxt" net_param { }', "net and net_param of .* is given; one would do"),
        ('train_net: "a.prototxt" test_iter: 1', "1 test_iter for 0 networks to test"),
        ('net: "a.prototxt" test_net: "b.prototxt"', "0 test_iter for 1 networks to test"),
        ('net: "a.prototxt" test_iter: 1', "test_interval = 0 with test_iter; at least 1 would do"),
        (
            'net: "a.prototxt" test_iter: 1 test_interval: 1 test_state { } test_state { }',
            "2 test_state for 1 networks",
        ),
        ('net: "none.prototxt"', r"'none\.prototxt' is no file of the folders .*started"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(CaffeError, match=words):
        nets_of(tmp_path, text)


def test_names_are_looked_for_where_caffe_is_started_and_then_above_the_solver(tmp_path: Path) -> None:
    solver = tmp_path / "examples" / "mnist" / "solver.prototxt"
    solver.parent.mkdir(parents=True)
    name = "examples/mnist/net.prototxt"
    (tmp_path / name).write_text("", "utf-8")
    assert find_beside(name, solver) == tmp_path / name
    assert find_beside("net.prototxt", solver) == tmp_path / name
    nearer = tmp_path / "started" / "net.prototxt"
    nearer.write_text("", "utf-8")
    assert find_beside("net.prototxt", solver) == nearer
    assert find_beside(str(tmp_path / name), solver) == tmp_path / name
