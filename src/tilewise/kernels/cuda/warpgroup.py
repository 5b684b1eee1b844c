"""The instruction of a warpgroup's matrix units (compute capability 9.0) as a function in C++."""

from __future__ import annotations

__all__ = ["multiply"]


def multiply(name: str, places: int, numbers: str = "f16", held: bool = False) -> str:
    """The C++ function ``name`` for (64 x 16) @ (16 x places), added to ``sums`` where ``add`` says so.

    ``numbers``: ``f16`` or ``bf16``, the operands' type. ``held``: a thread's four words of the first operand are in
    registers; else both are described as in ``matrix_units.cu``. Emulation has a function of its own.
    """
    count, words = places // 2, 4 if held else 1
    names = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    first = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if held else f"%{count}"
    given = "const unsigned (&a)[4]" if held else "Operand a"
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if held else '"l"(a)'
    shape = f"m64n{places}k16.f32.{numbers}.{numbers}"
    transposed = "0" if held else "0, 0"
    kind = {"f16": 1, "bf16": 2}[numbers]
    return f"""using Operand = unsigned long long;
__device__ __forceinline__ void {name}(float (&sums)[{count}], {given}, Operand b, bool add) {{
#ifdef EMULATED
  emulation::multiply<{kind}>(sums, a, b, add);
#else
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + words + 1}, 0; wgmma.mma_async.sync.aligned.{shape} "
               "{{{names}}}, {first}, %{count + words}, p, 1, 1, {transposed}; }}"
               : {sums} : {inputs}, "l"(b), "r"((int)add));
#endif
}}"""
