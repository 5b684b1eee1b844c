"""Loads kernels by tile registers, as :mod:`tilewise.kernels.cpu.compiling` does others."""

from __future__ import annotations

import functools
from typing import Any

from tilewise.kernels.building.elsewhere import compiled_elsewhere
from tilewise.kernels.cpu.channels_last.told import word_of
from tilewise.kernels.cpu.compiling import LOCK, Made, address_of, words_of
from tilewise.kernels.cpu.tile_registers.told import LANES

__all__ = ["load_fill_filters", "load_split_gradients", "load_split_products"]


@functools.cache
def _worker(name: str) -> int:
    """The address of the worker that the function called ``name`` makes."""

    def make() -> Made:
        from tilewise.kernels.cpu.tile_registers import gradient_worker, worker

        return getattr(gradient_worker if name == "split_gradients" else worker, name)(LANES), 0

    return address_of(words_of("tile_registers", name), make)


@functools.cache
def _called(name: str, of: str | int) -> int:
    """The address of the function called ``name`` that workers call, made for ``of``."""

    def make() -> Made:
        from tilewise.kernels.cpu.tile_registers import finishing, products, splitting

        makers: dict[str, tuple[Any, int]] = {
            "product": (products.product, products.PRODUCT_WORDS),
            "split": (splitting.split, splitting.SPLIT_WORDS),
            "split_planes": (splitting.split_planes, splitting.PLANES_WORDS),
            "filled": (splitting.filled, splitting.FILL_WORDS),
            **{
                name: (getattr(finishing, name), finishing.FINISH_WORDS)
                for name in ("finish", "finish_planes", "scatter_planes")
            },
        }
        maker, words = makers[name]
        return maker(of), words

    return address_of(words_of("tile_registers", name, word_of(str(of))), make)


@functools.cache
def _called_by_gradients(name: str, *of: int) -> int:
    """The address of the function called ``name`` that the worker of gradients calls, made for ``of``."""

    def make() -> Made:
        from tilewise.kernels.cpu.tile_registers import gradients, lines

        makers: dict[str, tuple[Any, int]] = {
            "lines": (lines.lines, lines.LINES_WORDS),
            "pixels": (lines.pixels, lines.LINES_WORDS),
            "paired": (lines.paired, lines.PAIRED_WORDS),
            "repaired": (lines.repaired, lines.REPAIRED_WORDS),
            "gradient": (gradients.gradient, gradients.GRADIENT_WORDS),
            "added": (gradients.added, gradients.ADD_WORDS),
            "turned": (gradients.turned, gradients.WRITE_WORDS),
            "scattered": (gradients.scattered, gradients.WRITE_WORDS),
        }
        maker, words = makers[name]
        return maker(*of), words

    return address_of(words_of("tile_registers", name, *of), make)


@compiled_elsewhere
def load_split_products(parts: int, planes: bool, finish: str, activation: str) -> tuple[int, int, int, int, int]:
    """The addresses of the worker, of what splits numbers, multiplies their ``parts``, finishes sums and splits planes.

    ``finish`` is the name of the function in :mod:`~tilewise.kernels.cpu.tile_registers.finishing`. The last address is
    0 unless images come as ``planes``.
    """
    with LOCK:
        called = (("split", parts), ("product", parts), (finish, activation))
        split, product, complete = (_called(name, of) for name, of in called)
        return _worker("split_products"), split, product, complete, _called("split_planes", parts) if planes else 0


@compiled_elsewhere
def load_fill_filters(parts: int) -> tuple[int, int]:
    """The addresses of the worker that puts filters into tiles, and of what writes their rows."""
    with LOCK:
        return _worker("fill_filters"), _called("filled", parts)


@compiled_elsewhere
def load_split_gradients(
    parts: int, x: tuple[str, tuple[int, ...]], y: tuple[str, tuple[int, ...]], writes: str
) -> tuple[int, ...]:
    """The addresses of the worker of filters' gradients, and of the seven functions that it calls.

    ``x`` and ``y`` say which function of :mod:`~tilewise.kernels.cpu.tile_registers.lines` splits them into ``parts``,
    and what it is made for beside that. Then come the functions that make tiles in two ways, multiply, add sums, and
    write them. ``writes`` is the name of the last one in :mod:`~tilewise.kernels.cpu.tile_registers.gradients`.
    """
    with LOCK:
        split = [_called_by_gradients(name, parts, *of) for name, of in (x, y)]
        others = ("paired",), ("repaired",), ("gradient", parts), ("added",), (writes,)
        return _worker("split_gradients"), *split, *(_called_by_gradients(*each) for each in others)
