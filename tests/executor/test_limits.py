"""Schedules that CPU ranks cannot run although they verify: rejected on all ranks alike."""

from __future__ import annotations

import pytest

from miraccl.errors import InvalidUsage
from miraccl.executor.cpu.limits import check_limits
from miraccl.executor.cpu.lower import lower
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import (
    barrier,
    copy,
    get,
    inp,
    one_channel,
    out,
    put,
    recv,
    scratch,
    send,
    signal,
    wait,
)
from miraccl.schedule.verify import verify
from miraccl.types import Collective
from tests.schedule.helpers import BUILTIN, schedules


def broadcast(sender: list[Step], receiver: list[Step]) -> Schedule:
    return one_channel(
        "mine", Collective.BROADCAST, [[*sender, copy(inp(0), out(0))], receiver], scratch_chunks=1
    )


REFUSED = {
    r"rank 1, step 0 \(wait peers 0\): a message precedes a signal from rank 0": broadcast(
        [send(inp(0), 1), signal([1])],
        [wait([0]), recv(out(0), 0)],
    ),
    r"rank 1, step 0 \(recv .*\): a signal precedes a message from rank 0": broadcast(
        [signal([1]), send(inp(0), 1)],
        [recv(out(0), 0), wait([0])],
    ),
    r"rank 1, step 0 \(barrier\): a message precedes a signal of a barrier from rank 0": broadcast(
        [send(inp(0), 1), barrier()],
        [barrier(), recv(out(0), 0)],
    ),
    r"rank 1, step 0 \(barrier\): a signal precedes a signal of a barrier from rank 0": broadcast(
        [signal([1]), barrier(), send(inp(0), 1)],
        [barrier(), wait([0]), recv(out(0), 0)],
    ),
    r"rank 0, step 8 \(signal peers 1\): gets stuck on CPUs: at most 8 messages": broadcast(
        [*[signal([1])] * 9, *[wait([1])] * 9, barrier()],
        [*[signal([0])] * 9, *[wait([0])] * 9, get(inp(0), out(0), 0), barrier()],
    ),
    r"rank 0, step 8 \(signal peers 1\): gets stuck on CPUs": broadcast(
        [*[signal([1])] * 9, *[wait([1])] * 9, send(inp(0), 1)],
        [*[signal([0])] * 9, *[wait([0])] * 9, recv(out(0), 0)],
    ),
    r"rank 0, step 2 \(put .*\): peers cannot address scratch memory": broadcast(
        [signal([1]), wait([1]), put(inp(0), scratch(0), 1), signal([1])],
        [signal([0]), wait([0]), wait([0]), copy(scratch(0), out(0))],
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cpu_ranks_cannot_run_is_refused_by_all(why: str) -> None:
    verify(REFUSED[why])
    texts = set()
    for rank in range(2):
        with pytest.raises(InvalidUsage, match=why) as caught:
            lower(REFUSED[why], rank)
        texts.add(caught.value.message)
    assert len(texts) == 1


def test_signals_in_the_order_of_the_messages_are_not_refused() -> None:
    schedule = broadcast(
        [send(inp(0), 1), *[signal([1])] * 9, barrier()],
        [recv(out(0), 0), *[wait([0])] * 9, barrier()],
    )
    verify(schedule)
    assert lower(schedule, 1).nsteps == 11


@pytest.mark.parametrize(("name", "collective"), BUILTIN)
def test_what_is_built_in_is_not_refused(name: str, collective: Collective) -> None:
    for schedule in schedules(name, collective, (1, 2, 8, 33)):
        check_limits(schedule)
