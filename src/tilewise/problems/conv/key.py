"""The canonical text of a convolution's problem: how it is written, and how it is read back."""

from __future__ import annotations

import re
from typing import Any

from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.base import LAYOUTS
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.fields import Convolution
from tilewise.problems.conv.passes import ROLES, Pass

__all__ = ["fields_of", "key_of"]

_N = r"(\d{1,18})"
_AXES = r"((?:i[dhw]\d{1,18}k[dhw]\d{1,18}s[dhw]\d{1,18}d[dhw]\d{1,18}p[dhw]-?\d{1,18},-?\d{1,18}){1,3})"
KEY = re.compile(
    rf"conv (fprop|dgrad|wgrad) (\w{{4}})(?:>(\w{{4}}))? (ieee|tf32) g{_N}mb{_N}ic{_N}oc{_N}{_AXES} "
    r"x:(co|ch|vi)(\d{1,2})w:(co|ch|vi)(\d{1,2})y:(co|ch|vi)(\d{1,2})( bias)?( residual)?"
    rf"(?: ({'|'.join(CONV_ACTIVATIONS[1:])})((?::[-+.0-9a-z]{{1,32}}){{0,2}}))?"
    r"( accumulate)?( constant_weight)?( checked_weight)? (cpu|cuda:[^\n]+)"
)
"""The form of a key."""
AXIS = re.compile(r"i[dhw](\d+)k[dhw](\d+)s[dhw](\d+)d[dhw](\d+)p[dhw](-?\d+),(-?\d+)")
"""The form of one axis in a key."""


def key_of(p: Convolution) -> str:
    """Canonical text of ``p``: equal for equal problems, different for different ones."""
    sizes = [f"g{p.groups}mb{p.batch}ic{p.in_channels}oc{p.out_channels}"]
    for name, a in zip(p.space, p.axes, strict=True):
        sizes.append(f"i{name}{a.size}k{name}{a.kernel}s{name}{a.stride}d{name}{a.dilation - 1}")
        sizes.append(f"p{name}{a.before},{a.after}")
    flags = [name for name in ("bias", "residual") if getattr(p, name)]
    flags += [p.activation] * (p.activation != "none")
    flags += [name for name in ("accumulate", "constant_weight", "checked_weight") if getattr(p, name)]
    dtypes = p.dtype if p.dtype == p.out_dtype else f"{p.dtype}>{p.out_dtype}"
    tensors = "".join(
        f"{role}:{layout}{align}"
        for role, layout, align in zip(ROLES, (n[:2] for n in p.layouts), p.alignment, strict=True)
    )
    return " ".join(["conv", p.pass_.value, dtypes, p.precision, "".join(sizes), tensors, *flags, p.device])


def fields_of(text: str) -> dict[str, Any]:
    """The fields of the problem whose key is ``text``, by name. Raises ``ValueError`` for what is no problem's key.

    Different texts may have the same fields: only one of them is the key.
    """
    match = KEY.fullmatch(text)
    if match is None:
        raise ValueError(f"problem {text[:200]!r}: not a problem's key")
    pass_, dtype, out_dtype, precision, groups, batch, into, outof, axes, *rest = match.groups()
    lx, ax, lw, aw, ly, ay, bias, residual, activation, parameters, *rest = rest
    accumulate, constant_weight, checked_weight, device = rest
    layouts = {name[:2]: name for name in LAYOUTS}
    return {
        "pass_": Pass(pass_),
        "batch": int(batch),
        "in_channels": int(into),
        "out_channels": int(outof),
        "axes": tuple(
            Axis(size, kernel, stride, dilation + 1, before, after)
            for size, kernel, stride, dilation, before, after in (map(int, axis) for axis in AXIS.findall(axes))
        ),
        "groups": int(groups),
        "dtype": dtype,
        "out_dtype": out_dtype or "",
        "precision": precision,
        "bias": bool(bias),
        "activation": f"{activation}{parameters}" if activation else "none",
        "residual": bool(residual),
        "accumulate": bool(accumulate),
        "constant_weight": bool(constant_weight),
        "checked_weight": bool(checked_weight),
        "layouts": (layouts[lx], layouts[lw], layouts[ly]),
        "alignment": (int(ax), int(aw), int(ay)),
        "device": device,
    }
