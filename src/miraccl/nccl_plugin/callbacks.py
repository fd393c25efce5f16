"""Python functions as entries of NCCL's tables: results instead of exceptions, words in memory."""

from __future__ import annotations

from collections.abc import Callable

from miraccl import trace
from miraccl.errors import InvalidUsage, MiracclError
from miraccl.native.nccl_net_abi import Result
from miraccl.transport.fifo import memory_at

log = trace.logger("nccl_plugin")


def store_word(address: int, value: int, nbytes: int = 8) -> None:
    """Write an unsigned number of ``nbytes`` bytes."""
    memory_at(address, nbytes)[:] = value.to_bytes(nbytes, "little")


def guarded(entry: str, function: Callable[..., None]) -> Callable[..., int]:
    """Return ``function`` with results instead of exceptions, which C code cannot catch."""

    def call(*args: int) -> int:
        try:
            function(*args)
        except MiracclError as error:
            log.warning("%s failed: %s", entry, error)
            wrong = isinstance(error, InvalidUsage)
            return Result.INVALID_ARGUMENT if wrong else Result.SYSTEM_ERROR
        except Exception:
            log.exception("%s failed", entry)
            return Result.INTERNAL_ERROR
        return Result.SUCCESS

    return call
