"""Creation of a process group, as the deadlock detector sees it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from miraccl import clock
from miraccl.diagnosis.detector import PendingCreation
from miraccl.errors import PeerDied
from miraccl.runtime.core_access import core_access
from miraccl.runtime.loss_notice import NOTICE_FIRST_S
from miraccl.torch.process_group import ProcessGroupMiraccl

#: Seconds between looks for the error of another rank.
LOOK_INTERVAL_S = 1e-3


class GroupCreation(PendingCreation):
    """Creation of a group, as the deadlock detector sees it.

    The default group knows the processes of its ranks, and which of them have left and will not
    join.
    """

    def __init__(self, opts: Any) -> None:
        world = dist.group.WORLD
        self.name, self.usual_s = "world", opts.timeout.total_seconds()
        self._world, self._ranks, tokens, parent = None, [], [], ""
        if isinstance(world, ProcessGroupMiraccl):
            access = core_access(world.communicator)
            state, self._world = access.wait_state, access.session
            self.name, self._ranks, parent = (
                f"group {opts.group_id}",
                list(opts.global_ranks_in_group),
                state.key,
            )
            # with a shorter timeout the application may continue after this group has failed
            if self.usual_s >= state.default_timeout_s:
                tokens = [self._world.tokens[rank] for rank in self._ranks]
            self.usual_s = max(self.usual_s, state.default_timeout_s)
        super().__init__(f"group {opts.group_id} of {parent}", tokens, "new_group", opts.group_rank)

    def look_again(self) -> None:
        """After a failure, raise the more specific error that another rank may have published."""
        deadline = clock.monotonic() + NOTICE_FIRST_S
        while self._world is not None and clock.monotonic() < deadline:
            self.look()
            clock.sleep(LOOK_INTERVAL_S)

    def look(self) -> None:
        super().raise_if_failed()
        gone = self._world.gone() & {*self._ranks} if self._world is not None else ()
        if gone:
            peer = min(gone)
            raise PeerDied(
                f"rank {peer} has left the default group and will not join",
                rank=self._rank,
                peer=peer,
                op="new_group",
            )
