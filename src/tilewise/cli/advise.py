"""``tilewise advise``: which neighbouring sizes of a layer or product give the most samples a second, and why."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tilewise.cli.given.early import check_asked, check_target
from tilewise.cli.helped import Helped, HelpedGroup
from tilewise.cli.program import NO_PLAN, BadInput, bad_input
from tilewise.cli.settings import BATCH_OF_LAYER, MEASURING, OPS, PASSES, ROLES, TASKS, Asked, planning_options
from tilewise.problems.texts.recurrent import CELLS

if TYPE_CHECKING:
    from tilewise.advice import Advice, Sweep
    from tilewise.cli.target import Target

__all__ = ["command"]

Function = TypeVar("Function", bound=Callable[..., Any])
SIZE_SHARE, BATCH_SHARE, SECONDS = 0.10, 0.25, 30.0
PICTURES = (".png", ".svg", ".pdf")
STEPS, LEAST_STEPS = 128, 4
"""Most and fewest time steps of a recurrent layer where ``--time`` does not say how many."""
CALL_FLOPS = {"cpu": 8e9, "cuda": 2e13}
"""Steps are so many that a call takes about so many operations: fractions of a second, as each point is run often."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How far and how long is searched, and what is made of the result."""

    within: float
    batch_within: float
    seconds: float
    picture: str | None
    as_json: bool

    def check(self) -> None:
        """Raise :class:`BadInput` where the picture could not be drawn, before anything is measured."""
        if self.picture is None:
            return
        path = Path(self.picture)
        if path.suffix not in PICTURES:
            raise BadInput(f"--picture {self.picture!r}: a name that ends in {', '.join(PICTURES)} would do")
        if not path.absolute().parent.is_dir():
            raise BadInput(f"--picture {self.picture!r}: lies in no folder that there is")
        if importlib.util.find_spec("matplotlib") is None:
            raise BadInput("--picture: matplotlib draws it, and is not installed: pip install 'tilewise[report]'")


def wanted_options(function: Function) -> Function:
    """Add the options of all that is advised on; the command receives them as ``wanted``, and when it ``begun``."""

    @functools.wraps(function)
    def wrapped(**values: Any) -> Any:
        begun = time.monotonic()  # before torch is imported: the time limit is that of the command
        wanted = Wanted(**{name: values.pop(name) for name in Wanted.__dataclass_fields__})
        wanted.check()
        return function(wanted=wanted, begun=begun, **values)

    share = click.FloatRange(0, 1, max_open=True)
    options = [
        click.option("--within", type=share, default=SIZE_SHARE, show_default=True, metavar="SHARE",
                     help="How far sizes of the layer may be from what is asked."),
        click.option("--batch-within", type=share, default=BATCH_SHARE, show_default=True, metavar="SHARE",
                     help="How far the mini-batch may be from what is asked."),
        click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=SECONDS, show_default=True,
                     metavar="N", help="Stop measuring after so long, and say what was found."),
        click.option("--picture", metavar="FILE", help=f"Draw TFLOP/s against mini-batch ({', '.join(PICTURES)})."),
        click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/advise)."),
    ]  # fmt: skip
    result: Any = wrapped
    for option in reversed(options):
        result = option(result)
    decorated: Function = result
    return decorated


@click.group("advise", cls=HelpedGroup, short_help="Say which sizes near those of a layer are the fastest.")
def command() -> None:
    """Say which sizes near those of a layer give the most samples a second, and why.

    Points are measured within --seconds; all measurements are remembered. Ctrl-C shows what was measured until then.
    """


RNN_EXAMPLES = (
    ("tilewise advise rnn --hidden 1760 --batch 64", "Hidden units near 1760 and mini-batches near 64."),
    ("tilewise advise rnn lstm:t99n16i64h64 --seconds 10", "A layer given as text, for ten seconds."),
)
GEMM_EXAMPLES = (
    ("tilewise advise gemm 64x1760:1760x1760", "Rows, columns and depth near these."),
    ("tilewise advise gemm 64x1760:1760x1760 --pass nt --picture rates.png", "A layer's forward alone, drawn."),
)
CONV_EXAMPLES = (
    ("tilewise advise conv mb32ic64ih28oc64kh3ph1", "Channels, image and mini-batch near these."),
    ("tilewise advise conv mb32ic64ih28oc64kh3ph1 --within 0.2 --json", "Look further, and print a document."),
)


@command.command("rnn", cls=Helped, examples=RNN_EXAMPLES)
@click.argument("text", metavar="[RNN]", required=False)
@click.option("--hidden", type=click.IntRange(min=1), metavar="N", help="Hidden units.")
@click.option("--cell", type=click.Choice(CELLS), help="The cell.  [default: lstm]")
@click.option("--time", "steps", type=click.IntRange(min=1), metavar="N",
              help="Time steps; their number hardly matters.  [default: 4 to 128, fewer for large layers]")  # fmt: skip
@click.option("--inputs", type=click.IntRange(min=1), metavar="N", help="Numbers of the input.  [default: hidden]")
@click.option("--layers", type=click.IntRange(min=1, max=9999), metavar="N", help="Layers.  [default: 1]")
@click.option("--directions", type=click.IntRange(1, 2), metavar="N", help="1, or 2 for both.  [default: 1]")
@click.option("--pass", "task", type=click.Choice(TASKS), default=TASKS[1], show_default=True, help="What is computed.")
@wanted_options
@planning_options(batch="the text's n", without=("layout",), rigors=MEASURING)
@click.pass_context
def rnn(
    ctx: click.Context, /, text: str | None, task: str, wanted: Wanted, begun: float, settings: Asked, **sizes: Any
) -> None:
    """Advise on hidden units and mini-batch of a recurrent layer.

    The layer is given by --hidden and --batch, or as text such as lstm:t99n16i64h64. Samples are sequences. An input as
    wide as the state stays so.
    """
    check_asked(settings)
    if text is not None:
        check_target(text, settings, (task,), "rnn")
    text, settings = layer_text(text, task, settings, sizes)

    from tilewise.advice import recurrent_layer
    from tilewise.cli.target import recurrent_target

    target = recurrent_target(text, settings, (task,))
    problem: Any = target.layers[0].problems[0]
    sweep = recurrent_layer(problem, size_share=wanted.within, batch_share=wanted.batch_within)
    show_advice(ctx, target, sweep, settings, wanted, begun)


@command.command("gemm", cls=Helped, examples=GEMM_EXAMPLES)
@click.argument("text", metavar="MxK:KxN")
@click.option("--pass", "ops", type=click.Choice(OPS), multiple=True,
              help="How the operands are stored; may be repeated.  [default: nn, nt and tn]")  # fmt: skip
@wanted_options
@planning_options(without=("layout", "batch"), rigors=MEASURING)
@click.pass_context
def gemm(ctx: click.Context, text: str, ops: tuple[str, ...], wanted: Wanted, begun: float, settings: Asked) -> None:
    """Advise on the sizes of a matrix product such as 64x1760:1760x1760.

    Rows (M) are the mini-batch and the samples, columns (N) and depth (K) widths of layers.
    """
    check_asked(settings)
    check_target(text, settings, ops, "gemm")

    from tilewise.advice import product
    from tilewise.cli.target import product_target

    target = product_target(text, settings, ops)
    problems: Any = target.layers[0].problems
    sweep = product(problems, size_share=wanted.within, batch_share=wanted.batch_within)
    show_advice(ctx, target, sweep, settings, wanted, begun)


@command.command("conv", cls=Helped, examples=CONV_EXAMPLES)
@click.argument("text", metavar="LAYER")
@click.option("--pass", "passes", type=click.Choice((*PASSES, *ROLES)), multiple=True,
              help="Which passes are computed; may be repeated.  [default: all three]")  # fmt: skip
@wanted_options
@planning_options(batch=BATCH_OF_LAYER, rigors=MEASURING)
@click.pass_context
def conv(ctx: click.Context, text: str, passes: tuple[str, ...], wanted: Wanted, begun: float, settings: Asked) -> None:
    """Advise on channels, image and mini-batch of a layer such as mb32ic64ih28oc64kh3ph1.

    Samples are images.
    """
    check_asked(settings)
    check_target(text, settings, passes, "conv")

    from tilewise.advice import convolution
    from tilewise.cli.target import layer_target

    target = layer_target(text, settings, passes)
    problems: Any = target.layers[0].problems
    sweep = convolution(problems, size_share=wanted.within, batch_share=wanted.batch_within)
    show_advice(ctx, target, sweep, settings, wanted, begun)


def layer_text(text: str | None, task: str, settings: Asked, sizes: dict[str, Any]) -> tuple[str, Asked]:
    """The recurrent layer as text, and the settings that go with it. Raises :class:`BadInput`."""
    given = [name for name, value in sizes.items() if value is not None]
    if text is not None:
        for name in given:
            raise BadInput(f"--{'time' if name == 'steps' else name}: the text {text!r} has it; leave one of them out")
        return text, settings
    for name, value in (("hidden", sizes["hidden"]), ("batch", settings.batch)):
        if value is None:
            raise BadInput(f"--{name}: missing; --hidden 1760 --batch 64, or text such as lstm:t99n16i64h64, would do")
    from tilewise.problems.recurrent.notation import format_recurrent
    from tilewise.problems.recurrent.problem import RecurrentProblem

    hidden: int = sizes["hidden"]
    with bad_input():
        one_step = RecurrentProblem(
            sizes["cell"] or "lstm",
            1,
            settings.batch or 1,
            sizes["inputs"] or hidden,
            hidden,
            layers=sizes["layers"] or 1,
            directions=sizes["directions"] or 1,
            task=task,
        )
        most = CALL_FLOPS[settings.torch_device().type] / one_step.flops
    usual = next((steps for steps in (STEPS, 64, 32, 16, 8) if steps <= most), LEAST_STEPS)
    return format_recurrent(replace(one_step, time=sizes["steps"] or usual)), replace(settings, batch=None)


def show_advice(
    ctx: click.Context, target: Target, sweep: Sweep, settings: Asked, wanted: Wanted, begun: float
) -> None:
    """Measure, print and draw what is advised on ``target``. Exits with 1 where what was asked has no plan."""
    from tilewise.advice import NoAdviceError, advise
    from tilewise.advice.search import Clock
    from tilewise.planner import Planner
    from tilewise.report.progress import time_bar

    options, clock = settings.options(), Clock(wanted.seconds, begun)
    head = _head(target, settings)
    written = functools.partial(_write, head=head, wanted=wanted)
    kept: list[Advice] = []
    try:
        with time_bar("measuring", clock.left()) as tell:
            advice = advise(sweep, Planner(), options, seconds=wanted.seconds, clock=clock, tell=tell, keep=kept.append)
    except NoAdviceError as error:
        raise click.ClickException(f"--seconds {wanted.seconds:g}: {error}") from error
    except KeyboardInterrupt:
        for each in kept:
            written(each)
        raise
    written(advice)
    if advice.asked.ms is None:
        ctx.exit(NO_PLAN)


def _head(target: Target, settings: Asked) -> dict[str, Any]:
    """What every planning document says first."""
    from tilewise.cli.planning import head

    return head(target, settings, settings.options())


def _write(advice: Advice, head: dict[str, Any], wanted: Wanted) -> None:
    """Print ``advice`` and draw its picture."""
    from tilewise.report.advice import advice_table, advice_text, advise_document
    from tilewise.report.console import show, show_json
    from tilewise.report.tables import heading

    if wanted.as_json:
        show_json(advise_document(head, advice))
    else:
        show(heading(head), advice_table(advice), "", advice_text(advice))
    if wanted.picture is not None:
        from tilewise.report.picture import draw_advice

        try:
            draw_advice(advice, head, wanted.picture)
        except OSError as error:
            raise BadInput(f"--picture {wanted.picture!r}: cannot be written: {error.strerror}") from error
        click.echo(f"picture written to {wanted.picture}", err=True)
