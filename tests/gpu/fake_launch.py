"""Fake driver that records launches, for compiled code that calls it by address."""

from __future__ import annotations

import ctypes
from typing import Any

from miraccl.executor.cuda import fast_call_layout, launch

INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
#: of every launch: grid, block, bytes of shared memory
SHAPE: tuple[int, ...] = (528, 1, 2, 256, 3, 4, 48)


class LaunchRecorder:
    """Fake cuLaunchKernelEx.

    ``seen``: a row per launch: function, extra, ``SHAPE``, stream, words of the argument.
    ``ordinals``: GPU by address, None: unknown memory; default GPU 0. ``capturing``: captured
    streams.
    """

    def __init__(self, codes: tuple[int, ...] = ()) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.ordinals: dict[int, int | None] = {}
        self.capturing: set[int] = set()
        self._codes = codes
        self._attribute = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
        )(self._asked_attribute)
        self._capturing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)(
            self._asked_capturing
        )
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._launched)
        self._arguments: dict[int, Any] = {}
        self._keep: list[Any] = []

    def _asked_attribute(self, out: int, kind: int, address: int) -> int:
        assert kind == fast_call_layout.POINTER_DEVICE_ORDINAL
        ordinal = self.ordinals.get(address, 0)
        if ordinal is None:
            return INVALID_VALUE
        ctypes.c_int32.from_address(out).value = ordinal
        return 0

    def _asked_capturing(self, stream: int, out: int) -> int:
        ctypes.c_int32.from_address(out).value = int(stream in self.capturing)
        return 0

    def function_addresses(self) -> tuple[int, int]:
        """Return the addresses of cuPointerGetAttribute and cuStreamIsCapturing."""
        first, second = (
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (self._attribute, self._capturing)
        )
        return first or 0, second or 0

    def _launched(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        said = launch._LaunchConfig.from_address(config)
        argument = self._arguments[parameters]  # as if the address of the argument stood there
        shape = (*said.grid, *said.block, said.shared_bytes, said.stream or 0)
        attribute = said.attributes[0]
        assert (said.nattributes, attribute.id, attribute.value[0], ctypes.sizeof(attribute)) == (
            1,
            6,
            1,
            72,
        )
        self.seen.append((function, extra or 0, *shape, *argument[:-1]))
        return self._codes[len(self.seen) - 1] if len(self.seen) <= len(self._codes) else 0

    def record(self, function: int, words: int = 2) -> int:
        """Return the launch record of ``function`` with an argument of ``words`` words."""
        argument = (ctypes.c_uint64 * (words + 1))()
        config = launch._LaunchConfig(
            (528, 1, 2), (256, 3, 4), 48, None, ctypes.pointer(launch._LaunchAttribute(6, (1,))), 1
        )
        assert (ctypes.sizeof(config), launch._LaunchConfig.stream.offset) == (
            56,
            fast_call_layout.CONFIG_STREAM,
        )
        address = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self._arguments[ctypes.addressof(argument)] = argument
        record = (ctypes.c_uint64 * fast_call_layout.RECORD_WORDS)(
            address,
            ctypes.addressof(argument),
            ctypes.addressof(config),
            function,
            ctypes.addressof(argument),
        )
        self._keep += [config, record]
        return ctypes.addressof(record)
