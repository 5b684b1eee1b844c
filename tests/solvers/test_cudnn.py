"""The cudnn solver without a GPU: absence is a stated reason, names of engines, strides, bounded caches."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise.plan import Config
from tilewise.problems.base import layout_of
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.solvers import SolverUnavailable
from tilewise.solvers.vendor._api import missing
from tilewise.solvers.vendor._catalogue import Bounded, plain, serves
from tilewise.solvers.vendor._graph import KNOBS, Engine, Traits, canonical_strides, exact_strides
from tilewise.solvers.vendor.cudnn import Cudnn

LAYER = ConvProblem(Pass.FPROP, 4, 8, 16, (Axis(9, 3, 1, 1, 1, 1), Axis(9, 3, 1, 1, 1, 1)), device="cuda:some GPU")

engines = st.builds(
    Engine,
    st.integers(0, 200),
    st.dictionaries(st.integers(0, 60), st.integers(-1, 300), max_size=8).map(
        lambda knobs: tuple(sorted(knobs.items()))
    ),
)


def test_importing_the_solver_does_not_import_cudnn() -> None:
    code = "import sys, tilewise.solvers as s; s.get('cudnn'); sys.exit('cudnn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_is_one_reason() -> None:
    assert Cudnn().why_not(LAYER) == ["there is no CUDA device here"]


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cudnn") is not None, reason="the package is here"
)
def test_without_the_package_there_is_one_reason() -> None:
    assert Cudnn().why_not(LAYER) == ["nvidia-cudnn-frontend is not installed: pip install 'tilewise[gpu]' would do"]


def test_cpu_problems_are_not_for_it() -> None:
    problem = ConvProblem(Pass.FPROP, 1, 1, 1, (Axis(3, 3),))
    assert Cudnn().why_not(problem) == ["runs on cuda, not cpu"]


@pytest.mark.skipif(not missing(), reason="cuDNN is here")
def test_what_cannot_run_raises_with_the_reason() -> None:
    with pytest.raises(SolverUnavailable, match="a is on cpu"):
        Cudnn().bind(LAYER, Config(engine="eng1"), torch.empty(1), torch.empty(1), None)


@given(engines)
def test_engine_names_are_read_back(engine: Engine) -> None:
    assert Engine.parse(engine.name) == engine
    assert Engine.of(Config.from_key(engine.config.key)) == engine


def test_the_order_of_knobs_makes_no_other_engine() -> None:
    assert Engine.parse("eng67_k28=1_k2=9_k13=0") == Engine.parse("eng67_k2=9_k13=0_k28=1")


def test_engines_with_deprecated_knobs_cannot_be_set() -> None:
    assert Engine.parse("eng70_k2=12_k18=0").settable
    assert not Engine.parse("eng28_k2=4_k3=0").settable
    assert 3 not in KNOBS


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(engine=3),
        Config(engine="eng"),
        Config(engine="eng3_k2"),
        Config(engine="eng3_k2=x"),
        Config(engine="eng3; k2=1"),
        Config(engine="eng99999999999999999999"),
        Config(engine="eng3", other=1),
    ],
)
def test_a_config_from_elsewhere_that_names_no_engine_is_refused(config: Config) -> None:
    with pytest.raises(ValueError, match="eng"):
        Engine.of(config)


def test_strides_of_dense_classes_are_those_of_torch() -> None:
    last = ConvProblem(Pass.FPROP, 4, 8, 16, LAYER.axes, layouts=("channels_last",) * 3, device="cuda:some GPU")
    for problem, memory_format in ((LAYER, torch.contiguous_format), (last, torch.channels_last)):
        tensors = {role: torch.empty(problem.shape(role)).to(memory_format=memory_format) for role in ROLES}
        strides = {role: tensor.stride() for role, tensor in tensors.items()}
        assert exact_strides(problem, strides) == canonical_strides(problem) == exact_strides(problem, {})


def test_strides_of_unit_dimensions_do_not_matter() -> None:
    problem = ConvProblem(Pass.FPROP, 1, 1, 1, (Axis(5, 1), Axis(5, 1)), device="cuda:some GPU")
    odd = {"x": (7, 3, 5, 1), "w": (1, 1, 1, 1), "y": (25, 25, 5, 1)}
    assert exact_strides(problem, odd) == canonical_strides(problem)


def test_a_line_gets_a_unit_axis() -> None:
    problem = ConvProblem(Pass.FPROP, 2, 3, 4, (Axis(10, 3),), device="cuda:some GPU")
    x, w, y = canonical_strides(problem)
    assert (x, w, y) == ((30, 10, 10, 1), (9, 3, 3, 1), (32, 8, 8, 1))


def test_a_view_stands_for_rows_with_gaps() -> None:
    problem = ConvProblem(
        Pass.FPROP, 4, 8, 16, LAYER.axes, layouts=("view", "contiguous", "contiguous"), device="cuda:x"
    )
    x = canonical_strides(problem)[0]
    assert layout_of(problem.shape("x"), x) == "view"
    assert x[-1] == 1


def test_what_the_graph_knows_nothing_of_makes_no_other_question() -> None:
    problem = ConvProblem(Pass.FPROP, 4, 8, 16, LAYER.axes, bias=True, accumulate=True, device="cuda:some GPU")
    assert plain(problem) == LAYER
    assert plain(LAYER) is LAYER


@pytest.mark.parametrize(
    ("dtype", "precision", "notes", "may"),
    [
        ("fp32", "ieee", {"FFT"}, True),
        ("fp32", "ieee", {"TENSOR_CORE"}, False),
        ("fp32", "tf32", {"TENSOR_CORE"}, True),
        ("fp32", "tf32", {"TENSOR_CORE", "DOWN_CONVERT_INPUTS"}, False),
        ("bf16", "ieee", {"TENSOR_CORE"}, True),
    ],
)
def test_notes_rule_engines_out(dtype: str, precision: str, notes: set[str], may: bool) -> None:
    problem = ConvProblem(Pass.FPROP, 1, 1, 1, (Axis(3, 3),), dtype=dtype, precision=precision)
    assert serves(problem, Traits(frozenset(notes))) is may


def test_ffts_do_not_serve_uneven_padding() -> None:
    problem = ConvProblem(Pass.DGRAD, 1, 1, 1, (Axis(5, 3, 1, 1, 1, 1), Axis(5, 3, 1, 1, 1, 0)))
    assert not serves(problem, Traits(frozenset({"FFT"})))
    assert serves(problem, Traits(frozenset()))


def test_a_bounded_cache_forgets_what_was_not_used_for_longest() -> None:
    cache: Bounded[int] = Bounded(2)
    cache.put("a", 0)
    cache.put("b", 1)
    assert cache.get("a") == 0
    cache.put("c", 2)
    assert (cache.get("a"), cache.get("b"), cache.get("c"), len(cache)) == (0, None, 2, 2)
    assert cache.find("a", lambda: 9) == 0


def test_threads_share_a_bounded_cache() -> None:
    cache: Bounded[int] = Bounded(8)

    def work() -> None:
        for i in range(2000):
            assert cache.find(i % 16, lambda i=i: i % 16) == i % 16

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cache) == 8
