"""Finds the fastest mesh of GPUs for a network, by a model of a step's time and memory.

>>> from tilewise.distributed.mesh import choose_mesh
>>> image = torch.empty(1, 3, 64, 64, device="meta")
>>> choose_mesh(torch.nn.Conv2d(3, 8, 3), image, gpus=2).best.mesh.gpus
2
"""

from tilewise.distributed.mesh.choose import MeshChoice, MeshResult, choose_mesh
from tilewise.distributed.mesh.cost import Cluster, LinkSpeed, MeshMemory, MeshShape, StepCost
from tilewise.distributed.mesh.link_speed import measure_link

__all__ = [
    "Cluster",
    "LinkSpeed",
    "MeshChoice",
    "MeshMemory",
    "MeshResult",
    "MeshShape",
    "StepCost",
    "choose_mesh",
    "measure_link",
]
