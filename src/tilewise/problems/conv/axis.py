"""One spatial axis of a convolution, and how it is cut into axes of smaller convolutions.

Along an axis with ``size`` inputs, a kernel of ``kernel`` taps, stride ``s``, dilation ``d`` and padding
``(before, after)``, output ``j`` reads the inputs ``j*s - before + r*d`` for ``r < kernel``. Padding is signed:
a negative value crops. Signs matter because a tile of an input gradient may need less than its neighbours
reach, which only a crop can say.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One spatial axis: ``size`` inputs, ``kernel`` taps; lengths are in elements.

    Raises ``ValueError`` naming the field when a size is not positive or no output is left.

    >>> from tilewise.axis import Axis
    >>> Axis(size=224, kernel=7, stride=2, before=3, after=3).out
    112
    """

    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        for name in ("size", "kernel", "stride", "dilation"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value}: an axis needs a positive {name}")
        if self.size + min(self.before, 0) + min(self.after, 0) < 1:
            raise ValueError(f"padding=({self.before}, {self.after}) crops away all {self.size} inputs")
        if self.size + self.before + self.after < self.reach:
            raise ValueError(
                f"kernel={self.kernel} with dilation={self.dilation} reaches over {self.reach} inputs, but size="
                f"{self.size} with padding=({self.before}, {self.after}) has "
                f"{self.size + self.before + self.after}: the output would be empty"
            )

    @property
    def reach(self) -> int:
        """Inputs from the first to the last tap of one output."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def out(self) -> int:
        """The number of outputs along the axis."""
        return (self.size + self.before + self.after - self.reach) // self.stride + 1

    @property
    def side_by_side(self) -> bool:
        """Whether windows without dilation follow each other with no overlap and no gap, or there is one alone."""
        return (self.kernel == self.stride or self.out == 1) and (self.kernel == 1 or self.dilation == 1)

    def reading(self, start: int, stop: int) -> tuple[int, int, Axis] | None:
        """Inputs ``[i0, i1)`` that outputs ``[start, stop)`` read, and the axis of that smaller convolution.

        ``None`` when those outputs read padding alone. Serves FPROP and WGRAD over outputs, and DGRAD that
        scatters outputs (the halo reduction of Jin et al. 2018, section 2).
        """
        first = start * self.stride - self.before
        last = (stop - 1) * self.stride - self.before + self.reach
        i0, i1 = max(first, 0), min(last, self.size)
        if i0 >= i1:
            return None
        return i0, i1, Axis(i1 - i0, self.kernel, self.stride, self.dilation, i0 - first, last - i1)

    def writing(self, start: int, stop: int) -> tuple[int, int, Axis] | None:
        """Outputs ``[o0, o1)`` that read inputs ``[start, stop)``, and the axis of that smaller convolution.

        ``None`` when no output reads them. Serves DGRAD that gathers ``dy`` with its halo.
        """
        o0 = max(-(-(start + self.before - self.reach + 1) // self.stride), 0)
        o1 = min((stop - 1 + self.before) // self.stride + 1, self.out)
        if o0 >= o1:
            return None
        before = self.before + start - o0 * self.stride
        after = (o1 - o0 - 1) * self.stride + self.reach - (stop - start) - before
        if stop - start + min(before, 0) + min(after, 0) < 1:
            # The taps step over these inputs (dilation): no output reads them after all.
            return None
        return o0, o1, Axis(stop - start, self.kernel, self.stride, self.dilation, before, after)

    def trimmed(self) -> tuple[int, int, Axis] | None:
        """Taps ``[r0, r1)`` that meet an input in some output, and the axis of the convolution by those alone.

        ``None`` where every tap meets padding. The outputs are the same ones; a thin strip of a halo is met by few of
        the taps, and multiplies no zeros with the others.
        """
        last = (self.out - 1) * self.stride
        r0 = max(-(-(self.before - last) // self.dilation), 0)
        r1 = min((self.size - 1 + self.before) // self.dilation + 1, self.kernel)
        if r0 >= r1:
            return None
        before = self.before - r0 * self.dilation
        after = self.after - (self.kernel - r1) * self.dilation
        if self.size + min(before, 0) + min(after, 0) < 1:
            return None
        return r0, r1, Axis(self.size, r1 - r0, self.stride, self.dilation, before, after)
