"""A kind of problems that nothing in the package names goes through all of it: see ``tests/outer``.

Its files are laid into a copy of the package, beside the others, as an author would put them there. So no test edits
anything else, also in the processes that are started.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from tests.forked import run_script

import tilewise

HERE = Path(__file__).parent
COMMON = """
    import json, sys
    from pathlib import Path
    import torch
    from tilewise import execute, solvers
    from tilewise.machine.device import environment
    from tilewise.planner import NoPlanError, Options, Planner
    from tilewise.planner.measuring.times import Timer
    from tilewise.problems.kinds import from_key
    from tilewise.problems.operands import make_operands
    from tilewise.problems.outer import OuterProblem, UndeclaredError
    from tilewise.wisdom import Wisdom

    PROBLEM = OuterProblem(8, 96, 128)
    SIZE = PROBLEM.nbytes("z")
    LITTLE = Options(workspace=SIZE // 2, exclude=("outer_torch",))

    def planner(name="w", **more):
        return Planner(Wisdom(Path(name + ".sqlite3")), **more)

    def check(plan, problem=PROBLEM):
        operands = make_operands(problem, 5)
        z, t = execute.bind(plan, problem, *operands)(*operands)
        for got, want in zip((z, t), problem.reference(*operands), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package, by links, that has the kind and its solvers in it."""
    root = tmp_path_factory.mktemp("package")
    copy = root / "tilewise"
    link(Path(tilewise.__file__).parent, copy)
    (copy / "problems" / "outer").mkdir()
    (copy / "problems" / "outer" / "__init__.py").symlink_to(HERE / "outer" / "problem.py")
    (copy / "solvers" / "outer.py").symlink_to(HERE / "outer" / "solvers.py")
    (copy / "nn" / "layers" / "outer.py").symlink_to(HERE / "outer" / "modules.py")
    return root


def link(own: Path, copy: Path) -> None:
    """Make ``copy`` a folder of links to what is in ``own``; folders that get further files are folders of links."""
    copy.mkdir()
    for entry in own.iterdir():
        if entry.name in ("problems", "solvers", "nn", "layers") and own.name in ("tilewise", "nn"):
            link(entry, copy / entry.name)
        elif entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)


def run(package: Path, folder: Path, code: str, *words: str) -> str:
    """What a program prints that has this package, in a process of its own."""
    variables = {**os.environ, "PYTHONPATH": f"{package}:{HERE.parent}", "TILEWISE_CACHE_DIR": str(folder / "cache")}
    script = folder / "script.py"
    script.write_text(textwrap.dedent(COMMON) + textwrap.dedent(code), "utf-8")
    done = run_script(str(script), *words, environment=variables, cwd=folder, has_tilewise=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_planned_measured_checked_and_remembered(package: Path, tmp_path: Path) -> None:
    code = """
        options = Options(exclude=("outer_torch",), batch_sizes="undivided")
        plan = planner().plan(PROBLEM, options)
        assert plan.solver == "outer_scratch" and plan.error.l2 < 1e-6 and plan.time_ms > 0, plan
        assert SIZE <= plan.workspace <= SIZE + 8192, plan.workspace  # what torch's operator allocates is counted
        check(plan)
        again = planner().plan(PROBLEM, Options(rigor="wisdom_only", exclude=("outer_torch",), batch_sizes="undivided"))
        assert again == plan
        known = Wisdom(Path("w.sqlite3")).measurements(environment("cpu").key, PROBLEM.key)
        assert {m.solver for m in known} == {"outer_torch", "outer_scratch"}, known
        assert planner().plan(PROBLEM).solver in ("outer_torch", "outer_scratch", "outer_items")
    """
    run(package, tmp_path, code)


def test_it_is_divided_under_a_limit(package: Path, tmp_path: Path) -> None:
    code = """
        plan = planner().plan(PROBLEM, LITTLE)
        assert plan.solver == "outer_items", plan
        assert plan.workspace <= SIZE // 2
        assert all(child.solver == "outer_scratch" for child in plan.children)
        check(plan)
        front = planner().front(PROBLEM, Options(workspace=SIZE, exclude=("outer_torch",)))
        assert min(one.workspace for one in front) < SIZE // 2, front
        try:
            planner().plan(PROBLEM, Options(workspace=SIZE // 16, exclude=("outer_torch",)))
        except NoPlanError as error:
            assert "outer_scratch" in str(error) and "fft" not in str(error), error
        else:
            raise AssertionError("no item alone fits into this")
    """
    run(package, tmp_path, code)


def test_wrong_results_of_either_are_found(package: Path, tmp_path: Path) -> None:
    code = """
        from tilewise.solvers.outer import OuterScratch
        right = OuterScratch.bind
        for index in (0, 1):
            def wrong(self, p, c, *tensors, **nothing):
                inner = right(self, p, c, *tensors)
                def run(*tensors):
                    results = inner(*tensors)
                    results[index][..., -1] *= 1.001
                    return results
                return run
            OuterScratch.bind = wrong
            log = planner(f"wrong{index}").explain(PROBLEM, Options(exclude=("outer_torch",)))
            assert any("error" in m.reason and m.solver == "outer_scratch" for m in log), log
    """
    run(package, tmp_path, code)


def test_it_is_explained_and_reported(package: Path, tmp_path: Path) -> None:
    code = """
        from rich.console import Console
        from tilewise.planner.schedules.results import Layer, LayerResult, PassResult, summarize
        from tilewise.report import documents, tables
        from tilewise.report.explained import Explained, explain_table
        from tilewise.report.layer_time import time_pass

        log = planner().explain(PROBLEM, LITTLE)
        assert {m.solver for m in log} == {"outer_torch", "outer_scratch", "outer_items"}, log
        plan = planner().plan(PROBLEM, LITTLE)
        result = time_pass(PassResult(PROBLEM, plan), iterations=1)
        assert result.replaced and result.framework_ms > 0 and result.planned_ms > 0
        layers = [LayerResult(Layer(("mine",), (PROBLEM,)), (result,))]
        console = Console(record=True, width=200, file=open("/dev/null", "w"))
        console.print(explain_table(Explained(result, log)), tables.plan_table(layers), tables.time_table(layers))
        text = console.export_text()
        assert PROBLEM.key in text and "outer_items" in text and "forward" in text, text
        document = documents.explain_document({}, Explained(result, log))
        assert document["problem"]["key"] == PROBLEM.key and document["problem"]["pass"] == "forward"
        json.dumps(document)
        assert summarize(layers).replaced == 1

        from tilewise.report import system
        info = system.info_document()
        assert {s["name"] for s in info["solvers"] if s["solves"] == "outer"} == {m.solver for m in log}
        console.print(*system.info_tables(info))
        assert "outer_scratch" in console.export_text()
    """
    run(package, tmp_path, code)


def test_it_is_written_to_a_schedule_and_followed(package: Path, tmp_path: Path) -> None:
    code = """
        from dataclasses import replace
        from tilewise import Schedule
        from tilewise.planner.schedules.follow import follow
        from tilewise.planner.schedules.results import Layer, LayerResult, PassResult

        plan = planner().plan(PROBLEM, LITTLE)
        layers = (LayerResult(Layer(("mine",), (PROBLEM,)), (PassResult(PROBLEM, plan),)),)
        key = environment("cpu").key
        made = Schedule("mine", "cpu", key, LITTLE, 8, "fp32", "ieee", "contiguous", layers)
        made.save("schedule.json")
        read = Schedule.load("schedule.json")
        assert read == made and type(read.layers[0].passes[0].problem) is OuterProblem
        found = follow(read, PROBLEM, LITTLE, planner("other"))
        assert found.plan is not None and found.plan.solver == "outer_items", found
        check(found.plan)
        text = Path("schedule.json").read_text().replace("outer fp32", "inner fp32")
        Path("other.json").write_text(text)
        try:
            Schedule.load("other.json")
        except Exception as error:
            assert "whose first word is one of conv, gemm, lrn, outer" in str(error), error
        else:
            raise AssertionError("a kind that there is not was read")
    """
    run(package, tmp_path, code)


@pytest.mark.slow
def test_it_is_sent_to_workers(package: Path, tmp_path: Path) -> None:
    code = """
        def main():
            problems = [OuterProblem(8, 64, 32 * n) for n in range(1, 6)]
            together = planner(devices=["cpu"])
            plans = together.plan_many(problems, LITTLE)
            assert list(plans) == problems
            for problem, plan in plans.items():
                check(plan, problem)

        if __name__ == "__main__":
            main()
    """
    run(package, tmp_path, code)


@pytest.mark.slow
def test_it_is_sent_to_ranks(package: Path, tmp_path: Path) -> None:
    code = """
        import torch.distributed as dist
        from tilewise.nn.layers.plan_table import PlanTable
        from tilewise.nn.ranks.together import plan_together

        def main(rank):
            dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=2)
            plan_table = PlanTable(LITTLE, "torch", planner(f"rank{rank}"))
            plan_together(plan_table, lambda: [PROBLEM], False)
            plan = plan_table.chosen(PROBLEM, False)
            assert plan.solver == "outer_items", plan
            check(plan)
            dist.destroy_process_group()

        if __name__ == "__main__":
            torch.multiprocessing.spawn(main, nprocs=2)
    """
    run(package, tmp_path, code)


MODULES = """
    import copy, pickle
    import tilewise
    from torch import nn
    from tilewise.nn.layers.kinds import is_planned
    from tilewise.nn.layers.outer import ScaledOuter

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.outer = ScaledOuter(8, 128)
            self.last = nn.LayerNorm(128)

        def forward(self, u):
            z, t = self.outer(u)
            return self.last(z).square().sum() + t.square().sum()

    def stepped(model, u):
        u = u.clone().requires_grad_()
        model.zero_grad()
        loss = model(u)
        loss.backward()
        return [loss.detach(), u.grad, *(p.grad for p in model.parameters())]

    def alike(model, u):
        for got, expected in zip(stepped(model, u), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    torch.manual_seed(0)
    u, net = torch.randn(8, 96), Net()
    want = stepped(net, u)
    limits = {"workspace": SIZE // 2, "exclude": ("outer_torch",)}
"""


def test_modules_of_the_kind_are_planned(package: Path, tmp_path: Path) -> None:
    code = """
        tilewise.optimize(net, u, planner=planner(), **limits)
        assert is_planned(net.outer) and not is_planned(net.last)
        alike(net, u)
        torch.testing.assert_close(net(u[:8].repeat(2, 1)[:8]), want[0], rtol=1e-4, atol=1e-4)
        report = tilewise.nn.report(net)
        (layer,) = report.layers
        ((of_pass,),) = (call.passes for call in layer.calls)
        assert layer.name == "outer" and layer.kind == "ScaledOuter" and layer.replaced, layer
        assert of_pass.plan.solver == "outer_items" and of_pass.role == "forward" and of_pass.torch_ms > 0, of_pass
        assert "outer_items" in str(report) and "8x96" in str(report), str(report)
        for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
            alike(twin, u)
        assert is_planned(copy.deepcopy(net).outer) and not is_planned(pickle.loads(pickle.dumps(net)).outer)
        assert set(net.state_dict()) == {"outer.v", "outer.s", "last.weight", "last.bias"}
        tilewise.restore(net)
        assert not is_planned(net.outer) and "forward" not in vars(net.outer)
        alike(net, u)
    """
    run(package, tmp_path, textwrap.dedent(MODULES) + textwrap.dedent(code))


@pytest.mark.slow
def test_modules_of_the_kind_follow_a_schedule_and_keep_a_steps_limit(package: Path, tmp_path: Path) -> None:
    code = """
        tilewise.optimize(net, u, planner=planner(), **limits)
        tilewise.nn.schedule(net).save("schedule.json")
        tilewise.restore(net)
        tilewise.optimize(net, u, planner=planner("other"), schedule="schedule.json")
        ((of_pass,),) = (call.passes for layer in tilewise.nn.report(net).layers for call in layer.calls)
        assert of_pass.replaced and of_pass.plan.solver == "outer_items" and not of_pass.note, of_pass
        alike(net, u)
        tilewise.restore(net)
        tilewise.optimize(net, u, planner=planner(), memory_limit="64MiB", exclude=("outer_torch",))
        step = tilewise.nn.report(net).facts["step_memory"]
        assert [moment["layer"] for moment in step["moments"]] == ["outer"], step
        assert step["peak"] <= 64 << 20
        alike(net, u)
    """
    run(package, tmp_path, textwrap.dedent(MODULES) + textwrap.dedent(code))


def test_a_class_has_one_kind(package: Path, tmp_path: Path) -> None:
    code = """
        from tilewise.nn.layers.kinds import kind_of, kinds, register
        from tilewise.nn.layers.outer import ScaledOuters
        class Others(ScaledOuters):
            pass
        try:
            register(Others())
        except TypeError as error:
            assert "ScaledOuter has two kinds of modules, ScaledOuters and Others" in str(error), error
        else:
            raise AssertionError("a second kind was taken")
        names = sorted(type(kind).__name__ for kind in kinds())
        assert names == [
            "Bilinears", "Convolutions", "Linears", "LocalResponseNorms", "Poolings", "RecurrentLayers", "ScaledOuters",
        ], names
        assert kind_of(net.last) is None and type(kind_of(nn.LazyConv2d(1, 1))).__name__ == "Convolutions"
    """
    run(package, tmp_path, textwrap.dedent(MODULES) + textwrap.dedent(code))


def test_what_the_contract_does_not_declare_is_asked_for_nowhere(package: Path, tmp_path: Path) -> None:
    """The tests above would pass if the toy let ``getattr(problem, "groups", 1)`` have its default."""
    code = """
        try:
            getattr(PROBLEM, "groups", 1)
        except UndeclaredError:
            pass
        else:
            raise AssertionError("a default was taken")
        assert from_key(PROBLEM.key) == PROBLEM
        assert solvers.get("fft").why_not(PROBLEM) == ["solves convolutions, not outer products"]
    """
    run(package, tmp_path, code)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("from_key('inner fp32 b1 cpu')", "not a problem's key, whose first word is one of conv, gemm, lrn, outer"),
        ("from_key('')", "not a problem's key, whose first word is one of conv, gemm, lrn, outer"),
        (
            "register(Kind(Rest, 'rests', 'none', None)); solvers.baseline(Rest)",
            "Rest: one solver is to be its baseline",
        ),
        ("register(Kind(Twin, 'twins', 'none', None))", "two kinds of problems are called 'outer'"),
        ("register(Kind(Lacks, 'lacking', 'none', None))", "Lacks is no kind of problem yet: it has no "),
        ("planner().plan(Rest(1, 2, 3))", "one solver is to be its baseline, there is none"),
    ],
)
def test_kinds_that_are_not_all_there(package: Path, tmp_path: Path, code: str, says: str) -> None:
    program = f"""
        from tilewise.problems.base import Problem
        from tilewise.problems.kinds import Kind, register
        class Rest(Problem):
            kind, key, device, dtype, out_dtype, precision = "rest", "rest cpu", "cpu", "fp32", "fp32", "ieee"
            operands, results, accumulate, flops, bytes, cut_axes = ("a",), ("b",), False, 1, 1, ()
            def __init__(self, *_): pass
            def from_key(self, text): ...
            def shape(self, role): return (4,)
            def split(self, axis, sizes): ...
            def extent(self, axis): ...
            def reference(self, *operands): return operands[0]
        class Twin(Rest):
            kind = "outer"
        class Lacks(Problem):
            kind = "lacking"
        try:
            {code}
        except Exception as error:
            print(error)
    """
    assert says in run(package, tmp_path, program)
