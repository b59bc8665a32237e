from __future__ import annotations

import os

from phalanx.system import kernel
from phalanx.system.page import ControlPage, page_size, prepare


def test_what_one_side_writes_the_other_reads():
    fd = kernel.open_anonymous_file("test")
    prepare(fd, 3)
    assert os.fstat(fd).st_size == page_size(3) == 4 * 64
    agent, worker = ControlPage(fd, 3), ControlPage(fd, 3)
    os.close(fd)
    assert not worker.stop_wanted
    assert worker.aborted_by is None
    agent.ask_to_stop()
    agent.abort(0)
    assert worker.stop_wanted
    assert worker.aborted_by == 0
    worker.note_polling(2)
    worker.note_progress(2, 123, step=7)
    worker.note_progress(2, 124)
    assert [agent.polls_stop(rank) for rank in range(3)] == [False, False, True]
    assert agent.progress(2) == (7, 124)
    assert agent.progress(1) == (0, 0)
    assert [agent.num_signs(rank) for rank in range(3)] == [0, 0, 2]
    worker.note_progress(1, 5)
    agent.clear_line(1)
    assert agent.progress(1) == (0, 0)
    assert agent.progress(2) == (7, 124), "only its own"
    assert agent.aborted_by == 0
    agent.clear()
    assert not worker.stop_wanted
    assert not worker.polls_stop(2)
    agent.close()
    worker.close()
