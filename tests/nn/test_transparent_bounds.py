"""How much is planned while enabled, and what arguments and environment variables may say."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn.dividing import Dividing, assert_same
from tests.nn.test_transparent import TORCHS_OWN, planned
from torch import nn

import tilewise
from tilewise.nn.script import recorder
from tilewise.plan import Plan
from tilewise.planner import NoPlanError, Options
from tilewise.problems.conv.problem import ConvProblem, Pass


def test_changing_shapes_are_bounded() -> None:
    planner = Dividing()
    model = nn.Conv2d(2, 2, 3)
    with tilewise.enabled(wait=True, planner=planner) as session, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in (*range(4, 64), *range(4, 64)):
            x = torch.randn(2, 2, size, 5)
            assert_same(model(x), TORCHS_OWN["conv2d"](x, model.weight, model.bias))
        assert not planner.planned
        assert [str(w.message).count("keep changing") for w in told] == [1]
        assert len(session.table.layer(2, (1, 1), (0, 0), (1, 1), 1, (3, 3), False, 0)._entries) <= recorder.MOST_KINDS
        other = nn.Conv2d(2, 2, 3)  # another layer is not affected
        for _ in range(3):
            y = other(torch.randn(2, 2, 9, 9))
        assert planned(y)
    assert "its shapes keep changing" in str(session)


def test_most_plans() -> None:
    planner = Dividing()
    with tilewise.enabled(wait=True, planner=planner, most_plans=4) as session:
        models = [nn.Conv2d(2, 2, k) for k in (1, 2, 3)]
        x = torch.randn(3, 2, 5, 5)
        for model in models:
            model(x)
        with pytest.warns(UserWarning, match="most_plans=4"):
            models[0](x)
        assert [planned(model(x)) for model in models] == [True, True, False]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                assert_same(models[2](x), TORCHS_OWN["conv2d"](x, models[2].weight, models[2].bias))
    assert len(planner.planned) == 4
    assert len(session.report().layers) == 2


def test_records_without_a_repeat_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MOST_RECORDED", 20)
    x = torch.randn(3, 2, 5, 5)
    weights = [torch.randn(2, 2, 1 + i % 4, 1 + i // 5) for i in range(25)]
    with tilewise.enabled(wait=True, planner=Dividing()) as session:
        for w in weights[:20]:
            F.conv2d(x, w, padding=4)
        with pytest.warns(UserWarning, match="none came again"):
            F.conv2d(x, weights[20], padding=4)
        for w in weights:
            F.conv2d(x, w, padding=4)
    assert not session.report().layers


class Refusing(Dividing):
    """Finds no plan for gradients."""

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        if problem.pass_ is not Pass.FPROP:
            raise NoPlanError("nothing keeps the limit")
        return super().plan(problem, options)


def test_what_keeps_no_limit_is_torchs() -> None:
    x, w = torch.randn(3, 2, 5, 5), torch.randn(2, 2, 3, 3, requires_grad=True)
    with tilewise.enabled(wait=True, planner=Refusing(), workspace=0) as session:
        for _ in range(3):
            F.conv2d(x, w).sum().backward()
    (layer,) = session.report().layers
    assert [(one.role, one.replaced, one.reason) for one in layer.passes()] == [
        ("forward", True, ""),
        ("grad_weight", False, "nothing keeps the limit"),
    ]


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("WORKSPACE", "64 MB?", "TILEWISE_WORKSPACE='64 MB\\?'"),
        ("RIGOR", "lazy", "TILEWISE_RIGOR='lazy': one of estimate"),
        ("BATCH_SIZES", "some", "TILEWISE_BATCH_SIZES='some': one of undivided"),
        ("DETERMINISTIC", "yes", "TILEWISE_DETERMINISTIC='yes': 1 or 0 would do"),
        ("STRICT", "2", "TILEWISE_STRICT='2': 1 or 0 would do"),
        ("ERROR_LIMIT", "-1", "TILEWISE_ERROR_LIMIT='-1': a positive number"),
        ("ERROR_LIMIT", "nan", "TILEWISE_ERROR_LIMIT='nan': a positive number"),
        ("MOST_PLANS", "-3", "TILEWISE_MOST_PLANS='-3': a whole number"),
        ("MOST_PLANS", "9" * 5000, "TILEWISE_MOST_PLANS='9{80}': a whole number"),
        ("ENABLE", "maybe", "TILEWISE_ENABLE='maybe': 1 or 0 would do"),
    ],
)
def test_wrong_variables_are_named(name: str, value: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TILEWISE_{name}", value)
    with pytest.raises(ValueError, match=match):
        tilewise._enable_if_asked() if name == "ENABLE" else tilewise.enabled()


@pytest.mark.parametrize(
    ("name", "value"),
    [("rigor", "lazy"), ("workspace", "64 MB?"), ("most_plans", -1), ("most_plans", 1.5), ("strict", 1)],
)
def test_wrong_arguments_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        tilewise.enabled(**{name: value})


def test_variables_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORKSPACE": "8MiB", "RIGOR": "estimate", "DETERMINISTIC": "1", "ERROR_LIMIT": "1e-3",
                        "BATCH_SIZES": "undivided", "STRICT": "0", "MOST_PLANS": "7"}.items():  # fmt: skip
        monkeypatch.setenv(f"TILEWISE_{name}", value)
    plan_table = tilewise.enabled().plan_table
    assert plan_table.options == Options(8 << 20, "undivided", "estimate", True, 1e-3, False)
    assert plan_table.most_plans == 7
    assert tilewise.enabled(workspace=None, rigor="patient").plan_table.options.workspace is None
    monkeypatch.setenv("TILEWISE_ENABLE", "0")
    tilewise._enable_if_asked()
    assert F.conv2d is TORCHS_OWN["conv2d"]
