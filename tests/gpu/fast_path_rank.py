"""Fast calls of one rank, on arrays in CPU memory, with a driver that records launches."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest

from miraccl.executor.cuda import fast_call_layout
from miraccl.executor.cuda.lower import CommArgs
from miraccl.executor.cuda.message_lowering import P2pMessage, WarpQueueRules, lower_messages
from miraccl.fastpath.cuda.table import CudaFastPath, group_builtins
from miraccl.ops.spec import BARRIER, OPS
from miraccl.runtime import group as groups
from miraccl.types import Collective, DType, RedOp
from tests.gpu.fake_launch import LaunchRecorder

DL_CPU = 1


def torch_with_exchange_api() -> Any:
    """Return PyTorch if compiled code can read its tensors; skip the test or module otherwise."""
    torch = pytest.importorskip(
        "torch",
        reason="PyTorch is not installed (pip install 'miraccl[torch]')",
        exc_type=ImportError,
    )
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(
            f"tensors of PyTorch {torch.__version__} have no interface for compiled code",
            allow_module_level=True,
        )
    return torch


class FastPathRank:
    """Fast calls of one rank, by default the first of two, on CPU tensors, in stream 0."""

    def __init__(self, rank: int = 0, nranks: int = 2) -> None:
        self.abort, self.order, self.cpu_plan = (
            ctypes.c_uint32(0),
            ctypes.c_int64(7),
            ctypes.c_int64(9),
        )
        self.retained: list[tuple[list[Any], int]] = []
        self.handed_over: list[tuple[int, list[tuple[Any, int, bool]]]] = []
        self.signatures: list[int] = []  # of the groups handed over
        address = groups.address()
        groups.install_fast_path(*group_builtins(address))
        abort, order = ctypes.addressof(self.abort), ctypes.addressof(self.order)
        self.fast_path = CudaFastPath(
            rank,
            nranks,
            0,
            abort=abort,
            order=order,
            own=7,
            groups=address,
            hand_over=self.hand_over,
            retain=self.retain,
        )
        self.fast_path._write(fast_call_layout.STATE_DEVICE, DL_CPU)
        self.fast_path.set_cpu_plan_word(ctypes.addressof(self.cpu_plan))
        self.fast_path.detect_array_types()
        self.fast_path.stream = 0
        self.driver = LaunchRecorder()
        self.fast_path.set_driver_functions(*self.driver.function_addresses())
        self.calls = {
            op.name: self.fast_path.fast_call(op, collects=True)
            for op in OPS.values()
            if op is not BARRIER
        }

    def retain(self, objects: list[Any], stream: int) -> None:
        """Record objects that must outlive the work of this stream."""
        self.retained.append((objects, stream))

    def hand_over(self, group: groups.Group) -> None:
        """Record the collected calls that Python must handle."""
        stream, messages, signature = self.fast_path.pop_collected()
        self.handed_over.append((stream, messages))
        self.signatures.append(signature)

    def add_collective(
        self,
        collective: Collective,
        dtype: DType,
        count: int,
        op: Any = RedOp.SUM,
        root: int = 0,
        fills: bool = False,
        number: int | None = None,
    ) -> Any:
        """Enter a launch whose function is ``number``, by default the number of elements."""
        made: Any = types.SimpleNamespace(
            record=self.driver.record(count if number is None else number)
        )
        self.fast_path.add_collective(collective, dtype, count, op, root, made, fills)
        return made

    def add_messages(
        self,
        number: int,
        *messages: tuple[bool, int, int, DType],
        fills: bool = False,
        signature: int = 0,
    ) -> Any:
        """Enter a launch for messages (received, peer, elements, type); its argument holds their
        addresses in reverse order.
        """
        made: Any = types.SimpleNamespace(record=self.driver.record(number, len(messages)))
        argument = ctypes.c_uint64.from_address(
            made.record + 8 * fast_call_layout.RECORD_ARGUMENT
        ).value
        places = [argument + 8 * (len(messages) - 1 - place) for place in range(len(messages))]
        rows = [
            P2pMessage(receives, peer, 0, count * dtype.itemsize, int(dtype))
            for receives, peer, count, dtype in messages
        ]
        self.fast_path.add_messages(rows, places, made, fills, signature)
        return made

    def add_template(
        self,
        number: int,
        messages: list[P2pMessage],
        comm_args: CommArgs,
        rules: WarpQueueRules,
        signature: int = 0,
    ) -> Any:
        """Enter a launch lowered for these messages as a template for other sizes."""
        lowered = lower_messages(messages, comm_args, rules, signature)
        made: Any = types.SimpleNamespace(record=self.driver.record(number, len(lowered.args) // 8))
        argument = ctypes.c_uint64.from_address(
            made.record + 8 * fast_call_layout.RECORD_ARGUMENT
        ).value
        ctypes.memmove(argument, bytes(lowered.args), len(lowered.args))
        self.fast_path.add_template(
            messages, lowered, comm_args.rank, rules, argument, made, signature
        )
        return made

    def all_reduce(self, x: Any, out: Any = None, op: Any = RedOp.SUM, stream: Any = None) -> int:
        return self.calls["all_reduce"](x, out, op, False, stream)

    def broadcast(self, x: Any, root: Any) -> int:
        return self.calls["broadcast"](x, None, root, False, None)

    def reduce(self, x: Any, root: Any, out: Any = None, op: Any = RedOp.SUM) -> int:
        return self.calls["reduce"](x, out, op, False, None, root)

    def all_gather(self, x: Any, out: Any) -> int:
        return self.calls["all_gather"](x, out, None, False, None)

    def reduce_scatter(self, x: Any, out: Any, op: Any) -> int:
        return self.calls["reduce_scatter"](x, out, op, False, None)

    def send(self, x: Any, peer: Any = 1, async_op: Any = False, stream: Any = None) -> int:
        return self.calls["send"](x, peer, async_op, stream)

    def recv(self, x: Any, peer: Any = 1) -> int:
        return self.calls["recv"](x, peer, False, None)

    def sendrecv(self, x: Any, out: Any, dst: Any = 1, src: Any = 1) -> int:
        return self.calls["sendrecv"](x, dst, out, src, False, None)
