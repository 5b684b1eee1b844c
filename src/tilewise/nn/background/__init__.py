"""Planning in the background: a program trains on torch's choice, and layers change over as their plans are found.

``tilewise.optimize(model, x, wait=False)`` begins it (:mod:`.begin`). What one model still has to plan is its work
(:mod:`.model`), in a plan table whose problems are planned later (:mod:`.later`). One thread of the process does all
works (:mod:`.service`), in turns: it runs only while the program, between two steps, lends it the baton
(:mod:`.baton`), for as long as it has an allowance (:mod:`.allowance`), with memory that training leaves free
(:mod:`.room`), and never before a backward that is still to come (:mod:`.open_graphs`).

>>> model, images = torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)
>>> model = tilewise.optimize(model, images, wait=False, rigor="estimate")
>>> for _ in range(3):
...     model(images).sum().backward()  # by torch, or by plans that were found between these steps
>>> tilewise.wait(model)
"""

from tilewise.nn.background.begin import wait
from tilewise.nn.background.service import held_off, tick

__all__ = ["held_off", "tick", "wait"]
