"""Layers as text, in the notation of oneDNN's benchdnn: ``mb256ic64ih27oc192oh27kh5ph2``.

An entry is a name and a whole number: ``g`` groups, ``mb`` mini-batch, ``ic`` ``oc`` channels (all groups together),
and per spatial axis ``d``, ``h``, ``w`` the input ``i``, output ``o``, kernel ``k``, stride ``s``, dilation ``d``
(0 is dense) and leading padding ``p``. ``_`` may stand between entries. What the forward pass adds and applies
follows as words, where benchdnn has options: ``+bias``, ``+res`` for a residual, and an activation as in ``+relu`` or
``+leaky_relu:0.1`` (:mod:`tilewise.problems.activations`). ``n"name"`` ends the text. What may be left out follows
benchdnn's driver for convolutions: ``g`` is 1, ``mb`` 2, strides 1, dilations 0; axes given as ``h`` alone are square,
as ``d`` alone cubic; an output left out follows from padding (0 when left out too), padding left out from the output.
Trailing padding is never written: it is the leading padding where that gives the output, as in torch, and else the
least that does.
"""

from __future__ import annotations

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.problems.limits import INT64_MAX
from tilewise.problems.texts.conv import layer_name, looks_like_layer, read_layer, trailing_padding

__all__ = ["format_layer", "layer_name", "looks_like_layer", "parse_layer"]


def parse_layer(
    text: str,
    *,
    pass_: Pass = Pass.FPROP,
    batch: int | None = None,
    layout: str = "contiguous",
    dtype: str = "fp32",
    precision: str = "ieee",
    bias: bool = False,
    device: str = "cpu",
) -> ConvProblem:
    """The problem that one pass of the layer ``text`` is.

    ``batch`` replaces the text's ``mb``, as benchdnn's ``--mb`` does; ``layout`` is that of all three tensors. Words
    such as ``+bias`` are of the forward pass: problems of other passes are without them.

    Raises ``ValueError`` naming the entry at fault, its value and what would do.

    >>> problem = parse_layer("mb8ic64ih56oc128kh3ph1")
    >>> problem.batch, problem.shape("y")
    (8, (8, 128, 56, 56))
    """
    said, forward = read_layer(text, batch), pass_ is Pass.FPROP
    problem = ConvProblem(
        pass_=pass_,
        batch=said.batch,
        in_channels=said.in_channels,
        out_channels=said.out_channels,
        axes=tuple(Axis(a.size, a.kernel, a.stride, a.dilation, a.before, a.after) for a in said.axes),
        groups=said.groups,
        dtype=dtype,
        precision=precision,
        bias=bias or (forward and said.bias),
        residual=forward and said.residual,
        activation=said.activation if forward else "none",
        layouts=(layout, layout, layout),
        device=device,
    )
    largest = max(problem.nbytes(role) for role in ROLES)
    if largest > INT64_MAX:
        raise ValueError(f"layer {text!r}: one of its tensors has {largest} bytes, beyond any memory; smaller would do")
    return problem


def format_layer(problem: ConvProblem, name: str = "") -> str:
    """The text of a problem's layer, as short as benchdnn writes it; :func:`parse_layer` reads it back.

    A residual and an activation are part of it; pass, types, layouts, bias and device are not. Raises ``ValueError``
    for padding that the notation has no text for: negative in front, or a trailing one that is not what the outputs
    need.

    >>> format_layer(parse_layer("mb8ic64ih56iw56oc128oh56ow56kh3kw3ph1pw1"))
    'mb8ic64ih56oc128oh56kh3ph1'
    """
    for axis_name, axis in zip(problem.space, problem.axes, strict=True):
        _check_writable(axis_name, axis)
    names = problem.space
    if len(set(problem.axes)) == 1 and problem.dims > 1:
        names = names[:1]
    axes = dict(zip(names, problem.axes, strict=False))
    words = [f"g{problem.groups}"] if problem.groups > 1 else []
    words += [f"mb{problem.batch}", f"ic{problem.in_channels}"]
    words += [f"i{n}{a.size}" for n, a in axes.items()]
    words += [f"oc{problem.out_channels}"]
    words += [f"o{n}{a.out}" for n, a in axes.items()]
    words += [f"k{n}{a.kernel}" for n, a in axes.items()]
    if any(a.stride > 1 for a in problem.axes):
        words += [f"s{n}{a.stride}" for n, a in axes.items()]
    words += [f"p{n}{a.before}" for n, a in axes.items()]
    if any(a.dilation > 1 for a in problem.axes):
        words += [f"d{n}{a.dilation - 1}" for n, a in axes.items()]
    words += ["+res"] if problem.residual else []
    words += [f"+{problem.activation}"] if problem.activation != "none" else []
    return "".join(words) + (f'n"{name}"' if name else "")


def _check_writable(name: str, axis: Axis) -> None:
    """Raise ``ValueError`` for an axis that the notation cannot write, called ``name`` in it."""
    if axis.before < 0:
        raise ValueError(f"p{name}{axis.before}: benchdnn's notation has no negative leading padding")
    after = trailing_padding(axis.size, axis.reach, axis.stride, axis.before, axis.out)
    if axis.after != after:
        raise ValueError(
            f"trailing padding {axis.after} along {name}: benchdnn's notation derives it from o{name}{axis.out}, "
            f"which gives {after}; the {abs(axis.after - after)} inputs between are read by no output"
        )
