"""The cudnn solver on a GPU, against float64: passes, dimensions, dtypes, layouts, alignment, rebuilding, threads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers import SolverUnavailable
from tilewise.solvers.vendor import _api as api
from tilewise.solvers.vendor._cudnn import CudnnRun
from tilewise.solvers.vendor._graph import Engine
from tilewise.solvers.vendor.cudnn import Cudnn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and bool(api.missing()), reason=f"cuDNN: {api.missing()}"),
]
PASSES = tuple(Pass)
SAME = Axis(14, 3, 1, 1, 1, 1)
LIMITS = {"fp32": 1e-5, "bf16": 8e-3, "fp16": 1e-3}


@pytest.fixture(scope="module")
def solver() -> Cudnn:
    return Cudnn()


def layer(pass_: Pass, axes: tuple[Axis, ...] = (SAME, SAME), **changes: object) -> ConvProblem:
    problem = ConvProblem(pass_, 4, 16, 24, axes, device=device_name("cuda"))
    return replace(problem, **changes)  # type: ignore[arg-type]


def scratch(size: int) -> torch.Tensor | None:
    """Workspace full of NaN, so that reading what was not written shows."""
    if not size:
        return None
    return torch.full((-(-size // 4),), torch.nan, device="cuda").view(torch.uint8)


def computed(solver: Cudnn, p: ConvProblem, c: Config) -> tuple[float, torch.Tensor]:
    """Relative L2 error of one config on random operands, and its result, written over NaN."""
    a, b = make_operands(p)
    out = make_result(p)
    run = solver.bind(p, c, a, b, out)
    assert run(a, b, out, scratch(solver.workspace(p, c))) is out
    want = p.reference(a, b)
    return ((out.double() - want).norm() / want.norm()).item(), out


def cheap(solver: Cudnn, p: ConvProblem, most: int = 8) -> list[Config]:
    """Configs that compile nothing; the first few."""
    return [offer.config for offer in solver.details(p) if not offer.compiles][:most]


PROBLEMS = {
    "2d": {},
    "1d": {"axes": (Axis(50, 7, 1, 1, 3, 3),)},
    "3d": {"axes": (Axis(6, 3, 1, 1, 1, 1), SAME, SAME)},
    "stride": {"axes": (Axis(15, 3, 2, 1, 1, 1), Axis(16, 3, 3, 1, 0, 2))},
    "dilation": {"axes": (Axis(17, 3, 1, 2, 2, 2), Axis(17, 3, 1, 3, 3, 3))},
    "asymmetric": {"axes": (Axis(14, 2, 1, 1, 1, 0), Axis(14, 4, 1, 1, 0, 3))},
    "groups": {"groups": 4},
    "depthwise": {"groups": 16, "out_channels": 16},
    "multiplier": {"groups": 16, "out_channels": 48},
    "pointwise": {"axes": (Axis(14, 1), Axis(14, 1))},
    "one image": {"batch": 1},
    "channels_last": {"layouts": ("channels_last",) * 3},
    "views": {"layouts": ("view", "contiguous", "view"), "alignment": (4, 16, 4)},
    "unaligned": {"alignment": (4, 4, 4)},
    "odd channels": {"in_channels": 5, "out_channels": 7},
    "tf32": {"precision": "tf32"},
}


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_fp32_is_right(solver: Cudnn, name: str, pass_: Pass) -> None:
    p = layer(pass_, **PROBLEMS[name])  # type: ignore[arg-type]
    if p.pass_ is Pass.WGRAD and any(axis.before != axis.after for axis in p.axes):
        assert "trailing padding" in solver.why_not(p)[0]
        return
    assert solver.why_not(p) == []
    configs = cheap(solver, p, 16)
    errors = {config: computed(solver, p, config)[0] for config in configs}
    assert sum(error < (5e-3 if p.precision == "tf32" else 1e-5) for error in errors.values()) >= 2
    wrong = {str(config): error for config, error in errors.items() if not error < 5e-3}
    assert not wrong


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits_are_right(solver: Cudnn, dtype: str, layout: str, pass_: Pass) -> None:
    p = layer(pass_, dtype=dtype, out_dtype=dtype, layouts=(layout,) * 3)
    for config in cheap(solver, p, 6):
        error, _ = computed(solver, p, config)
        assert error < LIMITS[dtype], config


@pytest.mark.parametrize("pass_", PASSES)
def test_bf16_sums_in_fp32(solver: Cudnn, pass_: Pass) -> None:
    p = layer(pass_, dtype="bf16", out_dtype="fp32")
    reasons = solver.why_not(p)
    if reasons:
        pytest.skip(reasons[0])
    error, out = computed(solver, p, next(iter(solver.configs(p))))
    assert out.dtype is torch.float32
    assert error < 1e-5


@pytest.mark.parametrize("pass_", PASSES)
def test_every_engine_of_a_problem_runs_or_says_its_name(solver: Cudnn, pass_: Pass) -> None:
    p = layer(pass_, (Axis(13, 5, 1, 1, 2, 2),) * 2)
    for offer in solver.details(p):
        if offer.compiles:
            continue
        try:
            error, _ = computed(solver, p, offer.config)
        except SolverUnavailable as failure:
            assert str(offer.config["engine"]) in str(failure)  # noqa: PT017
            continue
        assert error < 1e-2


@pytest.mark.parametrize("pass_", PASSES)
def test_offers_are_distinct_and_hold_what_building_needs(solver: Cudnn, pass_: Pass) -> None:
    p = layer(pass_)
    offers = list(solver.offers(p, 0))
    assert len({config for config, _ in offers}) == len(offers)
    a, b = make_operands(p)
    for config, workspace in offers[:6]:
        solver.bind(p, config, a, b, make_result(p))
        assert solver.workspace(p, config) == workspace


def test_a_family_offers_smaller_batches_what_the_whole_has(solver: Cudnn) -> None:
    whole, part = layer(Pass.FPROP, batch=32), layer(Pass.FPROP, batch=16)
    numbers = [{Engine.of(c).number for c in solver.configs(p)} for p in (whole, part)]
    fresh = {Engine.of(c).number for c in Cudnn().configs(part)}
    assert numbers[0] == numbers[1] == fresh
    for config in cheap(solver, part):
        assert computed(solver, part, config)[0] < 5e-5


def test_ieee_offers_no_tensor_cores(solver: Cudnn) -> None:
    notes = [offer.notes for offer in solver.details(layer(Pass.FPROP))]
    assert notes
    assert not any("TENSOR_CORE" in held for held in notes)
    tf32 = [offer.notes for offer in solver.details(layer(Pass.FPROP, precision="tf32"))]
    assert any("TENSOR_CORE" in held for held in tf32)
    assert not any("DOWN_CONVERT_INPUTS" in held for held in tf32)


@pytest.mark.parametrize("pass_", PASSES)
def test_deterministic_configs_repeat_their_bits(solver: Cudnn, pass_: Pass) -> None:
    p = layer(pass_, batch=16)
    for config in cheap(solver, p, 20):
        if solver.is_deterministic(p, config):
            assert torch.equal(computed(solver, p, config)[1], computed(solver, p, config)[1]), config


def test_a_view_is_written_and_nothing_around_it(solver: Cudnn) -> None:
    p = layer(Pass.FPROP, layouts=("contiguous", "contiguous", "view"), alignment=(16, 16, 4))
    a, b = make_operands(p)
    around = torch.full((4, 24, 20, 30), 7.0, device="cuda")
    out = around[:, :, 3:17, 5:19]
    want = p.reference(a, b)
    for config in cheap(solver, p):
        around.fill_(7.0)
        out.fill_(torch.nan)
        run = solver.bind(p, config, a, b, out)
        run(a, b, out, scratch(solver.workspace(p, config)))
        assert (out.double() - want).norm() < 5e-5 * want.norm(), config
        out.fill_(7.0)
        assert (around == 7.0).all(), config


def test_misaligned_addresses_raise(solver: Cudnn) -> None:
    p = layer(Pass.FPROP)
    a, b = make_operands(p)
    out = make_result(p)
    config = next(iter(solver.configs(p)))
    run = solver.bind(p, config, a, b, out)
    assert isinstance(run, CudnnRun)
    space = scratch(solver.workspace(p, config))
    with pytest.raises(SolverUnavailable, match=str(config["engine"])):
        run.run_pointers(a.data_ptr() + 4, b.data_ptr(), out.data_ptr(), 0 if space is None else space.data_ptr())


def test_addresses_do_for_parts(solver: Cudnn) -> None:
    whole, part = layer(Pass.FPROP, batch=8), layer(Pass.FPROP, batch=2)
    a, b = make_operands(whole)
    out = make_result(whole)
    config = next(iter(solver.configs(part)))
    run = solver.bind(part, config, a[:2], b, out[:2])
    assert isinstance(run, CudnnRun)
    space = scratch(solver.workspace(part, config))
    for i in range(0, 8, 2):
        pointer = 0 if space is None else space.data_ptr()
        run.run_pointers(a[i:].data_ptr(), b.data_ptr(), out[i:].data_ptr(), pointer)
    want = whole.reference(a, b)
    assert (out.double() - want).norm() < 1e-5 * want.norm()


def test_another_process_rebuilds_the_same_plans_from_their_names(solver: Cudnn) -> None:
    p = layer(Pass.DGRAD)
    wanted = {}
    for config in cheap(solver, p, 12):
        if solver.is_deterministic(p, config):
            wanted[config.key] = [solver.workspace(p, config), computed(solver, p, config)[1].double().sum().item()]
    code = f"""
import json
import torch
from tilewise.problems.conv.axis import Axis
from tilewise.plan import Config
from tilewise.problems.operands import make_operands, make_result
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.vendor.cudnn import Cudnn
p = {p!r}
solver, found = Cudnn(), {{}}
a, b = make_operands(p)
for key in {list(wanted)!r}:
    config, out = Config.from_key(key), make_result(p)
    run = solver.bind(p, config, a, b, out)
    size = solver.workspace(p, config)
    run(a, b, out, torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"))
    found[key] = [size, out.double().sum().item()]
print(json.dumps(found))
"""
    code = code.replace("<Pass.DGRAD: 'dgrad'>", "Pass.DGRAD")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == wanted


@pytest.mark.parametrize("engine", ["eng9999", "eng0_k24=99", "eng28_k3=77"])
def test_an_engine_that_cudnn_does_not_have_is_named(solver: Cudnn, engine: str) -> None:
    p = layer(Pass.FPROP)
    a, b = make_operands(p)
    with pytest.raises(SolverUnavailable, match=engine):
        solver.bind(p, Config(engine=engine), a, b, make_result(p))


def test_crops_have_a_reason(solver: Cudnn) -> None:
    assert solver.why_not(layer(Pass.FPROP, (Axis(14, 3, 1, 1, -1, 0), SAME))) == ["cuDNN takes no negative padding"]


def test_a_filter_with_gaps_has_a_reason(solver: Cudnn) -> None:
    p = layer(Pass.FPROP, layouts=("contiguous", "view", "contiguous"))
    assert solver.why_not(p) == ["cuDNN takes no filter with gaps between its elements"]


def test_an_absent_gpu_has_a_reason(solver: Cudnn) -> None:
    reasons = solver.why_not(replace(layer(Pass.FPROP), device="cuda:NVIDIA Imaginary 9000"))
    assert len(reasons) == 1
    assert "Imaginary" in reasons[0]


def test_threads_and_streams_share_a_plan(solver: Cudnn) -> None:
    p = layer(Pass.FPROP, batch=32)
    a, b = make_operands(p)
    want = p.reference(a, b)
    config = cheap(solver, p)[0]
    run = solver.bind(p, config, a, b, make_result(p))
    size = solver.workspace(p, config)
    failures: list[str] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(20):
                out = make_result(p)
                run(a, b, out, scratch(size))
                error = ((out.double() - want).norm() / want.norm()).item()
                if not error < 1e-5:
                    failures.append(f"error {error}")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_handles_of_ended_threads_are_used_again() -> None:
    values: list[int] = []

    def work() -> None:
        values.append(api.handle(0).value)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(set(values)) == 1
    assert api.handle(0).value not in values


def test_a_cuda_graph_records_and_replays_it(solver: Cudnn) -> None:
    p = layer(Pass.WGRAD)
    a, b = make_operands(p)
    want = p.reference(a, b)
    for config in cheap(solver, p):
        out = make_result(p)
        space = scratch(solver.workspace(p, config))
        run = solver.bind(p, config, a, b, out)
        run(a, b, out, space)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(a, b, out, space)
        out.fill_(torch.nan)
        graph.replay()
        assert (out.double() - want).norm() < 5e-5 * want.norm(), config


def test_a_call_allocates_nothing(solver: Cudnn) -> None:
    p = layer(Pass.FPROP)
    a, b = make_operands(p)
    out = make_result(p)
    config = cheap(solver, p)[0]
    run = solver.bind(p, config, a, b, out)
    space = scratch(solver.workspace(p, config))
    run(a, b, out, space)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(a, b, out, space)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
