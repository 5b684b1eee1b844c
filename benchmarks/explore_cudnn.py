"""What cuDNN's graph API offers on this machine and what it costs, as JSON. Needs a GPU and nvidia-cudnn-frontend.

    python benchmarks/explore_cudnn.py [result.json] [--seconds 150]

Sections: the API itself; offers per layer and pass (engines, notes, workspace before and after building, build time,
run time, error, rebuilding from engine and knobs); problems off the common path (groups, alignment, views, 1-D, 3-D,
mixed dtypes); host time of one call by several paths; threads, streams and graph capture. What raises is recorded.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import threading
import time
import traceback
from typing import Any, Callable

import cudnn
import torch

Shape = tuple[int, ...]
PASSES = ("fprop", "dgrad", "wgrad")
MODES = ("A", "B", "FALLBACK")
NUMERIC = tuple(cudnn.numerical_note.__members__)
TYPES = {torch.float32: "FLOAT", torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
KNOBS = {
    1: "SWIZZLE", 2: "TILE_SIZE", 4: "EDGE", 11: "MULTIPLY", 12: "SPLIT_K_BUF", 13: "TILEK", 14: "STAGES",
    15: "REDUCTION_MODE", 17: "SPLIT_K_SLC", 18: "IDX_MODE", 23: "SPECFILT", 24: "KERNEL_CFG", 25: "WORKSPACE",
    27: "TILE_CGA_M", 28: "TILE_CGA_N", 29: "BLOCK_SIZE", 30: "OCCUPANCY", 31: "ARRAY_SIZE_PER_THREAD",
    33: "SPLIT_COLS", 34: "TILE_ROWS", 35: "TILE_COLS", 36: "LOAD_SIZE", 37: "CTA_COUNT", 38: "STREAM_K",
    39: "SPLIT_P_SLC", 40: "TILE_M", 41: "TILE_N", 42: "WARP_SPEC_CFG",
}  # fmt: skip
LAYERS: dict[str, tuple[int, ...]] = {  # batch, in channels, out channels, size, kernel, padding, stride
    "conv2": (256, 64, 192, 27, 5, 2, 1),
    "L3": (128, 128, 128, 32, 9, 0, 1),
    "L1": (128, 3, 96, 128, 11, 0, 1),
    "conv1": (256, 3, 64, 224, 11, 2, 4),
    "conv3": (256, 192, 384, 13, 3, 1, 1),
    "L2": (128, 64, 64, 64, 9, 0, 1),
    "L4": (128, 128, 128, 16, 7, 0, 1),
    "L5": (128, 384, 384, 13, 3, 0, 1),
    "conv4": (256, 384, 384, 13, 3, 1, 1),
    "conv5": (256, 384, 256, 13, 3, 1, 1),
}
DEADLINE = [time.perf_counter() + 150.0]


def left() -> float:
    return DEADLINE[0] - time.perf_counter()


def milliseconds(since: float) -> float:
    return round((time.perf_counter() - since) * 1e3, 3)


def attempt(work: Callable[[], Any]) -> Any:
    """The result, or the exception as text."""
    try:
        return work()
    except Exception as failure:
        return f"{type(failure).__name__}: {str(failure)[:300]}"


class Conv:
    """One pass of one convolution with its tensors; builds graphs for it."""

    def __init__(self, pass_: str, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, options: dict[str, Any]) -> None:
        self.pass_, self.options = pass_, options
        self.tensors = {"x": x, "w": w, "y": y}
        self.a, self.b, self.out = {"fprop": "xwy", "dgrad": "ywx", "wgrad": "xyw"}[pass_]
        self.alignment = {"x": 16, "w": 16, "y": 16}

    def graph(self, handle: int) -> Any:
        def data_type(t: torch.Tensor) -> Any:
            return getattr(cudnn.data_type, TYPES[t.dtype])

        f32 = cudnn.data_type.FLOAT
        g = cudnn.pygraph(handle=handle, io_data_type=f32, intermediate_data_type=f32, compute_data_type=f32)
        operands = []
        for uid, name in ((1, self.a), (2, self.b)):
            t = self.tensors[name]
            made = g.tensor(name=name, dim=list(t.shape), stride=list(t.stride()), data_type=data_type(t), uid=uid)
            made.set_alignment(self.alignment[name])
            operands.append(made)
        names = {"fprop": ("image", "weight"), "dgrad": ("loss", "filter"), "wgrad": ("image", "loss")}[self.pass_]
        call = getattr(g, f"conv_{self.pass_}")
        out = call(**dict(zip(names, operands, strict=True)), **self.options)
        t = self.tensors[self.out]
        out.set_output(True).set_data_type(data_type(t)).set_dim(list(t.shape)).set_stride(list(t.stride()))
        out.set_uid(3)
        out.set_alignment(self.alignment[self.out])
        g.validate()
        g.build_operation_graph()
        return g

    def pointers(self) -> list[int]:
        return [self.tensors[name].data_ptr() for name in (self.a, self.b, self.out)]

    def reference(self) -> torch.Tensor:
        """The result in float64 (batch cut to 2 but for wgrad, so that it is quick)."""
        n = None if self.pass_ == "wgrad" else 2
        x, w, y = (self.tensors[name] for name in "xwy")
        x, w, y = x[:n].double(), w.double(), y[:n].double()
        pad = self.options.get("padding") or self.options["pre_padding"]
        groups = x.shape[1] // w.shape[1]
        rest = (self.options["stride"], pad, self.options["dilation"], False, [0] * len(pad), groups)
        if self.pass_ == "fprop":
            return torch.convolution(x, w, None, *rest)
        mask = [self.pass_ == "dgrad", self.pass_ == "wgrad", False]
        dx, dw, _ = torch.ops.aten.convolution_backward(y, x, w, None, *rest, mask)
        return dx if self.pass_ == "dgrad" else dw

    def error(self, want: torch.Tensor) -> float:
        got = self.tensors[self.out]
        got = got if self.pass_ == "wgrad" else got[:2]
        return ((got.double() - want).norm() / want.norm()).item()


def layer(name: str, pass_: str, dtype: torch.dtype = torch.float32, batch: int | None = None) -> Conv:
    n, c, k, size, r, pad, stride = LAYERS[name]
    n = batch or n
    out = (size + 2 * pad - r) // stride + 1
    made = [torch.randn(s, device="cuda", dtype=dtype) for s in ((n, c, size, size), (k, c, r, r), (n, k, out, out))]
    options = {"padding": [pad] * 2, "stride": [stride] * 2, "dilation": [1, 1]}
    return Conv(pass_, *made, options)


def modes(names: str | tuple[str, ...] = MODES) -> list[Any]:
    return [getattr(cudnn.heur_mode, name) for name in ([names] if isinstance(names, str) else names)]


def query(conv: Conv, handle: int, names: str | tuple[str, ...] = MODES) -> Any:
    g = conv.graph(handle)
    g.create_execution_plans(modes(names))
    return g


def plan_names(g: Any) -> list[str]:
    return [g.get_plan_name_at_index(i) for i in range(g.get_execution_plan_count())]


def unbuilt_sizes(g: Any) -> list[int | str]:
    """Workspace by config without building: a limit of -1 refuses each and says what it needs."""
    g.deselect_workspace_greater_than(-1)
    sizes: list[int | str] = []
    for i in range(g.get_execution_plan_count()):
        text = attempt(lambda i=i: g.build_plan_at_index(i))
        found = re.search(r"Requires (\d+)", str(text))
        sizes.append(int(found.group(1)) if found else str(text))
    return sizes


def notes(conv: Conv, handle: int, count: int) -> list[list[str]]:
    """Numerical notes by config: each note's holders are those it deselects."""
    found: list[list[str]] = [[] for _ in range(count)]
    for name in NUMERIC:
        g = query(conv, handle)
        g.deselect_numeric_notes([cudnn.numerical_note.__members__[name]])
        for i, size in enumerate(unbuilt_sizes(g)[:count]):
            if isinstance(size, str) and "Deselecting" in size:
                found[i].append(name)
    return found


def parse(name: str) -> tuple[int, dict[int, int]]:
    engine, *rest = name.split("_k")
    return int(engine.removeprefix("eng")), {int(k): int(v) for k, v in (item.split("=") for item in rest)}


def rebuild(conv: Conv, handle: int, name: str) -> tuple[Any, float]:
    """A graph with that one plan, from engine and knobs alone; and the milliseconds it took."""
    engine, knobs = parse(name)
    start = time.perf_counter()
    g = conv.graph(handle)
    g.create_execution_plan(engine, {getattr(cudnn.knob_type, KNOBS[k]): v for k, v in knobs.items()})
    g.build_plan_at_index(0)
    return g, milliseconds(start)


def run_time(run: Callable[[], Any], repeat: int = 5) -> float:
    run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeat):
        run()
    end.record()
    end.synchronize()
    return round(begin.elapsed_time(end) / repeat, 4)


def offers(conv: Conv, handle: int, compare: bool, ceiling: int = 3 << 30) -> dict[str, Any]:
    """Everything about every distinct config offered for one pass."""
    found: dict[str, Any] = {}
    start = time.perf_counter()
    conv.graph(handle)
    found["graph_ms"] = milliseconds(start)
    for mode in (*MODES, MODES):
        start = time.perf_counter()
        g = attempt(lambda mode=mode: query(conv, handle, mode))
        label = mode if isinstance(mode, str) else "all"
        found[f"query_ms_{label}"] = milliseconds(start)
        found[f"names_{label}"] = g if isinstance(g, str) else len(plan_names(g))
    names = plan_names(g)
    found["repeat_equal"] = plan_names(query(conv, handle)) == names
    found["behaviour"] = collections.Counter(
        str(note).split(".")[-1] for i in range(len(names)) for note in g.get_behavior_notes_for_plan_at_index(i)
    )
    start = time.perf_counter()
    sizes = unbuilt_sizes(query(conv, handle))
    found["unbuilt_sizes_ms"] = milliseconds(start)
    start = time.perf_counter()
    numeric = notes(conv, handle, len(names))
    found["notes_ms"] = milliseconds(start)
    want = conv.reference() if compare else None
    plans: dict[str, Any] = {}
    for i, name in enumerate(names):
        if name in plans:
            continue
        if left() < 0:
            found["cut"] = f"out of time at {i} of {len(names)}"
            break
        behaviour = [str(note).split(".")[-1] for note in g.get_behavior_notes_for_plan_at_index(i)]
        plans[name] = {"index": i, "unbuilt": sizes[i], "notes": numeric[i], "behaviour": behaviour}
        size = sizes[i]
        if not isinstance(size, int) or size <= ceiling:
            plans[name].update(attempt_plan(conv, handle, g, i, name, want))
    found["plans"] = plans
    return found


def attempt_plan(conv: Conv, handle: int, g: Any, i: int, name: str, want: torch.Tensor | None) -> dict[str, Any]:
    """Build, run and rebuild one config."""
    row: dict[str, Any] = {}
    start = time.perf_counter()
    row["build"] = attempt(lambda: g.build_plan_at_index(i))
    row["build_ms"] = milliseconds(start)
    if row["build"] is not None:
        return row
    del row["build"]
    size = attempt(lambda: g.get_workspace_size_plan_at_index(i))
    row["built"] = size
    workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
    out = conv.tensors[conv.out]
    a, b, c = conv.pointers()
    out.fill_(float("nan"))
    free = torch.cuda.mem_get_info()[0]
    run = lambda: g._execute_plan_at_index({1: a, 2: b, 3: c}, workspace.data_ptr(), i, handle)  # noqa: E731
    row["run_ms"] = attempt(lambda: run_time(run))
    hidden = free - torch.cuda.mem_get_info()[0]
    if hidden:
        row["hidden_bytes"] = hidden
    if want is not None:
        row["error"] = float(f"{conv.error(want):.2e}")
    made = attempt(lambda: rebuild(conv, handle, name))
    if isinstance(made, str):
        row["rebuild"] = made
        return row
    again, row["rebuild_ms"] = made
    kept = out.clone()
    row["rebuild_name_equal"] = again.get_plan_name_at_index(0) == name
    row["rebuild_workspace_equal"] = again.get_workspace_size_plan_at_index(0) == size
    out.fill_(float("nan"))
    row["rebuild_runs"] = attempt(lambda: again._execute_with_ptrs([a, b, c], workspace.data_ptr(), handle))
    row["rebuild_bits_equal"] = bool(torch.equal(out, kept))
    return row


def engines(conv: Conv, handle: int) -> dict[str, Any]:
    """Engines beyond the heuristics' lists: all ids with default knobs, and what their knobs span."""
    g = query(conv, handle)
    listed = {parse(name)[0] for name in plan_names(g)}
    found: dict[str, Any] = {"count": g.get_engine_count(), "listed": sorted(listed)}
    for engine in range(g.get_engine_count()):
        if left() < 0:
            break
        knobs = attempt(lambda engine=engine: str(g.get_knobs_for_engine(engine)))
        if "Error" in knobs[:40]:
            continue
        h = conv.graph(handle)
        made = attempt(lambda engine=engine, h=h: h.create_execution_plan(engine, {}))
        if made is None:
            name = h.get_plan_name_at_index(0)
            built = attempt(lambda h=h: h.build_plan_at_index(0))
            found[str(engine)] = {"knobs": knobs, "default": name, "build": built, "listed": engine in listed}
            if built is None:
                row = attempt_plan(conv, handle, h, 0, name, None)
                found[str(engine)]["ms_bytes"] = [row.get("run_ms"), row.get("built")]
    return found


def api() -> dict[str, Any]:
    documented = ("create_execution_plan", "_execute_with_ptrs", "_execute_with_raw_ptrs", "_execute_plan_at_index")
    return {
        "versions": [cudnn.__version__, cudnn.backend_version(), torch.__version__, torch.version.cuda, sys.version],
        "device": torch.cuda.get_device_name(),
        "cudnn": [n for n in dir(cudnn) if not n.startswith("__")],
        "pygraph": [n for n in dir(cudnn.pygraph) if not n.startswith("__")],
        "tensor": [n for n in dir(cudnn.tensor) if not n.startswith("__")],
        "docs": {n: getattr(getattr(cudnn.pygraph, n, None), "__doc__", None) for n in documented},
        "enums": {
            n: {k: int(v) for k, v in getattr(cudnn, n).__members__.items()}
            for n in ("numerical_note", "behavior_note", "knob_type", "heur_mode")
        },
    }


def batches(handle: int) -> dict[str, Any]:
    """Cold query by batch size, and whether an engine's notes are the same at all of them."""
    found: dict[str, Any] = {}
    seen: dict[str, set[str]] = collections.defaultdict(set)
    for pass_ in PASSES:
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            conv = layer("conv2", pass_, batch=batch)
            start = time.perf_counter()
            g = query(conv, handle)
            took = milliseconds(start)
            names = plan_names(g)
            found[f"{pass_}{batch}"] = [took, len(names), len(set(names))]
            for name, held in zip(names, notes(conv, handle, len(names)), strict=True):
                seen[f"{pass_} {parse(name)[0]}"].add("+".join(held))
    found["notes"] = {key: sorted(value) for key, value in seen.items()}
    return found


def variants() -> dict[str, Conv]:
    """Problems off the common path."""

    def dense(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    plain = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
    one = {"padding": [0, 3], "stride": [1, 1], "dilation": [1, 1]}
    asym = {"pre_padding": [1, 0], "post_padding": [0, 1], "stride": [1, 1], "dilation": [1, 1]}
    crop = {"pre_padding": [-1, -1], "post_padding": [0, 0], "stride": [1, 1], "dilation": [1, 1]}
    cube = {"padding": [1, 1, 1], "stride": [1, 1, 1], "dilation": [1, 1, 1]}
    last = torch.channels_last
    big = dense(8, 40, 20, 20)
    bf, half = torch.bfloat16, torch.float16
    found: dict[str, Conv] = {}
    for pass_ in PASSES:
        made = {
            "groups4": Conv(pass_, dense(8, 32, 16, 16), dense(32, 8, 3, 3), dense(8, 32, 16, 16), plain),
            "depthwise": Conv(pass_, dense(8, 32, 16, 16), dense(32, 1, 3, 3), dense(8, 32, 16, 16), plain),
            "1d_h1": Conv(pass_, dense(8, 32, 1, 64), dense(32, 32, 1, 7), dense(8, 32, 1, 64), one),
            "3d": Conv(pass_, dense(4, 16, 8, 8, 8), dense(16, 16, 3, 3, 3), dense(4, 16, 8, 8, 8), cube),
            "asymmetric": Conv(pass_, dense(8, 32, 16, 16), dense(32, 32, 2, 2), dense(8, 32, 16, 16), asym),
            "crop": Conv(pass_, dense(8, 32, 16, 16), dense(32, 32, 3, 3), dense(8, 32, 13, 13), crop),
            "view": Conv(pass_, big[:, 3:35, 1:17, 2:18], dense(32, 32, 3, 3), big[:, 3:35, 1:17, 2:18].clone(), plain),
            "channels_last": Conv(
                pass_,
                dense(8, 32, 16, 16).to(memory_format=last),
                dense(32, 32, 3, 3).to(memory_format=last),
                dense(8, 32, 16, 16).to(memory_format=last),
                plain,
            ),
            "bf16": Conv(pass_, *(t(bf) for t in _sizes(dense)), plain),
            "fp16": Conv(pass_, *(t(half) for t in _sizes(dense)), plain),
            "bf16_last": Conv(pass_, *(t(bf).to(memory_format=last) for t in _sizes(dense)), plain),
            "bf16_to_fp32": Conv(pass_, *(t(bf) for t in _sizes(dense)), plain),
            "bf16_last_to_fp32": Conv(pass_, *(t(bf).to(memory_format=last) for t in _sizes(dense)), plain),
            "align4": Conv(pass_, *(_shifted(t(torch.float32)) for t in _sizes(dense)), plain),
            "align4_declared": Conv(pass_, *(_shifted(t(torch.float32)) for t in _sizes(dense)), plain),
        }
        made["align4_declared"].alignment = {"x": 4, "w": 4, "y": 4}
        for key in ("bf16_to_fp32", "bf16_last_to_fp32"):
            c = made[key]
            c.tensors[c.out] = c.tensors[c.out].float()
        found.update({f"{key} {pass_}": value for key, value in made.items()})
    return found


def _sizes(dense: Callable[..., torch.Tensor]) -> list[Callable[[torch.dtype], torch.Tensor]]:
    shapes = ((8, 32, 16, 16), (32, 32, 3, 3), (8, 32, 16, 16))
    return [lambda dtype, s=s: dense(*s, dtype=dtype) for s in shapes]


def _shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values one element past an aligned address."""
    flat = torch.empty(t.numel() + 1, device=t.device, dtype=t.dtype)
    moved = flat[1:].view(t.shape)
    return moved.copy_(t)


def brief(conv: Conv, handle: int) -> Any:
    """Offers of one variant: how many ran right, and what went wrong."""
    g = query(conv, handle)
    names = plan_names(g)
    want = None if "pre_padding" in conv.options else conv.reference()
    rows = {}
    compiled = 0
    for i, name in enumerate(names):
        if name in rows or left() < 0:
            continue
        runtime = "RUNTIME_COMPILATION" in str(g.get_behavior_notes_for_plan_at_index(i))
        compiled += runtime
        if runtime and compiled > 2:
            rows[name] = "compiles: left out"
            continue
        row = attempt_plan(conv, handle, g, i, name, want)
        bad = {k: v for k, v in row.items() if k in ("build", "rebuild") or v is False or isinstance(v, str)}
        rows[name] = [row.get("build_ms"), row.get("built"), row.get("run_ms"), row.get("error"), runtime, bad]
    return rows


def host(handle: int) -> dict[str, Any]:
    """Microseconds of host time of one call, by path, on a layer too small to fill the GPU."""
    x, w, y = (torch.randn(s, device="cuda") for s in ((2, 8, 8, 8), (8, 8, 3, 3), (2, 8, 8, 8)))
    conv = Conv("fprop", x, w, y, {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]})
    g = query(conv, handle)
    found: dict[str, Any] = {}
    for i, name in enumerate(plan_names(g)):
        if attempt(lambda i=i: g.build_plan_at_index(i)) is not None:
            continue
        workspace = torch.empty(max(g.get_workspace_size_plan_at_index(i), 1), dtype=torch.uint8, device="cuda")
        a, b, c = conv.pointers()
        p = workspace.data_ptr()
        one, _ = rebuild(conv, handle, name)
        raw = torch.tensor([a, b, c], dtype=torch.int64)
        address = raw.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream
        paths: dict[str, Callable[[], Any]] = {
            "execute_plan_at_index(tensors)": lambda: g.execute_plan_at_index({1: x, 2: w, 3: y}, workspace, i, handle),
            "_execute_plan_at_index(dict)": lambda: g._execute_plan_at_index({1: a, 2: b, 3: c}, p, i, handle),
            "_execute(dict)": lambda: one._execute({1: a, 2: b, 3: c}, p, handle),
            "_execute_with_ptrs": lambda: one._execute_with_ptrs([a, b, c], p, handle),
            "_execute_with_raw_ptrs": lambda: one._execute_with_raw_ptrs(address, 3, p, handle),
            "with data_ptr and stream": lambda: (
                stream(0),
                one._execute_with_ptrs([x.data_ptr(), w.data_ptr(), y.data_ptr()], workspace.data_ptr(), handle),
            ),
            "set_stream": lambda: cudnn.set_stream(handle=handle, stream=stream(0)),
            "F.conv2d": lambda: torch.nn.functional.conv2d(x, w, padding=1),
            "empty lambda": lambda: None,
        }
        found[name] = {key: attempt(lambda run=run: _host_us(run)) for key, run in paths.items()}
        if len(found) == 3:
            break
    return found


def _host_us(run: Callable[[], Any], repeat: int = 300, rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            run()
        times.append((time.perf_counter() - start) / repeat * 1e6)
    return round(sorted(times)[rounds // 2], 2)


def sharing(handle: int) -> dict[str, Any]:
    """One plan under other handles, threads, streams and inside a CUDA graph."""
    conv = layer("conv3", "fprop", batch=8)
    name = plan_names(query(conv, handle))[0]
    g, _ = rebuild(conv, handle, name)
    workspace = torch.empty(max(g.get_workspace_size_plan_at_index(0), 1), dtype=torch.uint8, device="cuda")
    pointers, out = conv.pointers(), conv.tensors[conv.out]
    g._execute_with_ptrs(pointers, workspace.data_ptr(), handle)
    want = out.clone()
    found: dict[str, Any] = {"uids": attempt(g._get_variant_pack_uids_sorted)}

    def other(result: list[Any]) -> None:
        start = time.perf_counter()
        mine = cudnn.create_handle()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.default_stream())
        cudnn.set_stream(handle=mine, stream=side.cuda_stream)
        result.append(milliseconds(start))
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        g._execute_with_ptrs(pointers, workspace.data_ptr(), mine)
        side.synchronize()
        result.append(bool(torch.equal(out, want)))
        cudnn.destroy_handle(mine)

    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(attempt(lambda: other(result))))
    thread.start()
    thread.join()
    found["other thread, handle, stream"] = result

    def captured() -> bool:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            g._execute_with_ptrs(pointers, workspace.data_ptr(), handle)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        return bool(torch.equal(out, want))

    found["captured"] = attempt(captured)

    found["built handle destroyed"] = attempt(lambda: _after_destroy(conv, name, want))
    return found


def _after_destroy(conv: Conv, name: str, want: torch.Tensor) -> bool:
    """Whether a plan outlives the handle it was built under."""
    first, second = cudnn.create_handle(), cudnn.create_handle()
    g, _ = rebuild(conv, first, name)
    cudnn.destroy_handle(first)
    workspace = torch.empty(max(g.get_workspace_size_plan_at_index(0), 1), dtype=torch.uint8, device="cuda")
    cudnn.set_stream(handle=second, stream=torch.cuda.current_stream().cuda_stream)
    conv.tensors[conv.out].fill_(float("nan"))
    g._execute_with_ptrs(conv.pointers(), workspace.data_ptr(), second)
    return bool(torch.equal(conv.tensors[conv.out], want))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", nargs="?")
    parser.add_argument("--seconds", type=float, default=150.0)
    arguments = parser.parse_args()
    DEADLINE[0] = time.perf_counter() + arguments.seconds
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    report: dict[str, Any] = {}

    def section(name: str, work: Callable[[], Any]) -> None:
        start = time.perf_counter()
        if left() < 0:
            report[name] = "out of time"
            return
        try:
            report[name] = work()
        except Exception:
            report[name] = traceback.format_exc()[-1500:]
        torch.cuda.empty_cache()
        print(f"{name}: {milliseconds(start) / 1e3:.1f} s", file=sys.stderr, flush=True)
        if arguments.result:
            with open(arguments.result, "w", encoding="utf-8") as file:
                json.dump(report, file, indent=1, default=str)

    section("api", api)
    start = time.perf_counter()
    handle = cudnn.create_handle()
    report["create_handle_ms"] = milliseconds(start)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    section("host", lambda: host(handle))
    for index, name in enumerate(LAYERS):
        for pass_ in PASSES:
            section(f"{name} {pass_}", lambda name=name, pass_=pass_: offers(layer(name, pass_), handle, True))
        if index == 0:
            section("batches", lambda: batches(handle))
            section("variants", lambda: {k: attempt(lambda c=c: brief(c, handle)) for k, c in variants().items()})
            for pass_ in PASSES:
                section(f"engines conv2 {pass_}", lambda pass_=pass_: engines(layer("conv2", pass_), handle))
    section("sharing", lambda: sharing(handle))
    if not arguments.result:
        print(json.dumps(report, indent=1, default=str))


if __name__ == "__main__":
    main()
