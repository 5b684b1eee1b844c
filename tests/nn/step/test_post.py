"""Messages between ranks: each is there or not, and nobody waits."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from tests.nn.test_ranks import run

from tilewise.nn.ranks.post import why_no_post

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

TCP = """
import os, time
dist.destroy_process_group()
if rank == 0:
    kept = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with open(sys.argv[2] + ".new", "w") as f:
        f.write(str(kept.port))
    os.rename(sys.argv[2] + ".new", sys.argv[2] + ".port")
else:
    while not os.path.exists(sys.argv[2] + ".port"):
        time.sleep(0.01)
    kept = dist.TCPStore("127.0.0.1", int(open(sys.argv[2] + ".port").read()), None, False)
dist.init_process_group("gloo", store=kept, rank=rank, world_size=ranks)
"""


@pytest.mark.parametrize("store", ["", TCP])
def test_messages_are_read_once_they_are_there(store: str, tmp_path: Path) -> None:
    outputs = run(
        store
        + """
import json
from tilewise.nn.ranks.post import Post, why_no_post
assert why_no_post() == ""
post, other = Post("3/0"), Post("3/1")
seen = [post.told(1), post.answers(0), post.silent(0)]
dist.barrier()
if rank:
    post.answer(0, {"from": rank})
dist.barrier()
if rank == 2:
    post.answer(1, "left before it was asked")
dist.barrier()
seen += [post.answers(0), post.silent(0), post.answers(1)]
if rank == 0:
    post.tell(1, {"withheld": ["a"]})
dist.barrier()
seen += [post.told(1), post.told(2), post.answers(1), post.silent(1), other.told(1)]
print(json.dumps(seen))
""",
        tmp_path,
        ranks=3,
    )
    for output in outputs:
        before, after = [None, None, [1, 2]], [[{"from": 1}, {"from": 2}], [], None]
        assert json.loads(output) == [*before, *after, {"withheld": ["a"]}, None, None, [1], None]


def test_a_store_that_nobody_keeps_any_more_is_known_at_once(tmp_path: Path) -> None:
    """Whether a rank has a connection of its own by then or not."""
    begun = time.monotonic()
    outputs = run(
        TCP
        + """
from tilewise.nn.ranks.post import Post, PostLost
post = Post("0/0")
dist.barrier()
if rank == 0:
    os._exit(0)
time.sleep(1.0)
for ask in (lambda: post.told(1), lambda: post.answer(0, 1), lambda: Post("0/1")):
    try:
        ask()
    except PostLost as error:
        print(error)
sys.stdout.flush()
os._exit(0)
""",
        tmp_path,
    )
    lines = outputs[1].splitlines()
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("the ranks' store does not answer, its process may have ended (")
    assert time.monotonic() - begun < 60


def test_one_process_needs_no_post() -> None:
    assert why_no_post() == ""
