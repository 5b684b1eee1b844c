"""What does not end in time says where it was."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from tests.forked import ForkedScript

STUCK = """
import threading
lock = threading.Lock()
lock.acquire()
def waits_for_itself():
    print("so far", flush=True)
    lock.acquire()
waits_for_itself()
"""


def test_a_hang_shows_output_and_stacks() -> None:
    begun = ForkedScript("-c", STUCK, environment=os.environ)
    written = Path(begun._files[0].name)
    end = time.monotonic() + 60
    while "so far" not in written.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        begun.finished(timeout=0.5)
    (note,) = caught.value.__notes__
    assert note.startswith("exit status -6\nso far")
    assert "in waits_for_itself" in note
    assert begun.poll() is not None
