"""Networks of Caffe's in plain torch: a ``state_dict`` and a Python file that needs torch alone, and back."""

from __future__ import annotations

import os

from tilewise.frontends.caffe.export.module import module_text
from tilewise.frontends.caffe.export.state import (
    load_torch_state,
    read_torch_state,
    torch_state,
    write_torch_state,
)
from tilewise.frontends.caffe.net import Net

__all__ = ["export", "load_torch_state", "module_text", "read_torch_state", "torch_state", "write_torch_state"]


def export(net: Net, output: str | os.PathLike[str]) -> tuple[str, str]:
    """Write a network as ``output`` with ``.py``, its module, and with ``.pth``, its ``state_dict``; return both paths.

    The module needs torch alone and computes what ``net`` does. ``state_dict`` and module have Caffe's names of layers.
    Raises :class:`~tilewise.frontends.caffe.errors.CaffeError` that lists the layers that cannot be written, before
    anything is written, and ``OSError`` where a file cannot be.

    >>> TEXT = '''
    ... layer { name: "data" type: "Input" top: "data" input_param { shape { dim: [1, 3, 8, 8] } } }
    ... layer { name: "score" type: "InnerProduct" bottom: "data" top: "score" inner_product_param { num_output: 4 } }
    ... '''
    >>> from tilewise.frontends.caffe import load
    >>> import tempfile
    >>> paths = export(load(TEXT), tempfile.mkdtemp() + "/net")
    >>> [path.rpartition("/")[2] for path in paths]
    ['net.py', 'net.pth']
    """
    from tilewise.frontends.caffe.errors import CaffeError
    from tilewise.machine.files import replacing

    text = module_text(net)
    module, state = f"{os.fspath(output)}.py", f"{os.fspath(output)}.pth"
    write_torch_state(state, torch_state(net))
    with replacing(module, CaffeError) as partial:
        partial.write_text(text, "utf-8")
    return module, state
