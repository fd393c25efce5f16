"""Devices and registered regions in the compiled state of a verbs engine.

Everything here runs on the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from miraccl.errors import SystemFailure
from miraccl.native import verbs_abi as abi
from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.proxy.verbs.kernels import verbs_layout as layout
from miraccl.transport.base import WindowPort
from miraccl.transport.verbs_device import ACCESS_REMOTE, VerbsDevice
from miraccl.transport.verbs_flush import FLUSHABLE
from miraccl.transport.verbs_gpu_memory import GpuRange, register_gpu
from miraccl.transport.verbs_registrations import Registration, RegistrationCache


class EngineDevices:
    """Devices of an engine and the regions that are registered on all of them.

    Args:
        set_word: Writes a word of the engine's state.
    """

    def __init__(self, set_word: Callable[[int, int], None]) -> None:
        self._set = set_word
        self.devices: list[VerbsDevice] = []
        self._regions = RegistrationCache(
            self._register, self._deregister, max_entries=layout.MAX_REGIONS
        )
        self._owned: dict[int, list[Registration]] = {}
        self._gpu_ranges: dict[int, GpuRange] = {}
        self._window: WindowPort | None = None
        self._window_regions: list[Registration] = []
        self._released: deque[tuple[int, int]] = deque()

    def write_functions(self, library: VerbsLibrary) -> None:
        """Write the functions of libibverbs that compiled code calls."""
        for offset, name in (
            (layout.FUNCTION_REG_MR, "ibv_reg_mr"),
            (layout.FUNCTION_DEREG_MR, "ibv_dereg_mr"),
            (layout.FUNCTION_GET_EVENT, "ibv_get_cq_event"),
            (layout.FUNCTION_ACK_EVENTS, "ibv_ack_cq_events"),
        ):
            self._set(offset, library.address(name))

    def add(self, devices: Sequence[VerbsDevice]) -> None:
        self.devices = list(devices)
        for number, device in enumerate(devices):
            start = layout.ENGINE_DEVICES + number * layout.DEVICE_BYTES
            for offset, value in (
                (layout.DEVICE_PD, device.pd),
                (layout.DEVICE_POLL_CQ, device.operations[abi.OP_POLL_CQ]),
                (layout.DEVICE_REQ_NOTIFY, device.operations[abi.OP_REQ_NOTIFY_CQ]),
                (layout.DEVICE_POST_SEND, device.operations[abi.OP_POST_SEND]),
                (layout.DEVICE_POST_RECV, device.operations[abi.OP_POST_RECV]),
                (layout.DEVICE_CHANNEL, device.channel),
                (layout.DEVICE_ACCESS, device.extra_access),
            ):
                self._set(start + offset, value)
        self._set(layout.ENGINE_NDEVICES, len(devices))

    def lost(self) -> Iterator[tuple[int, str]]:
        """Process asynchronous events; yield (number, text) of lost ports and devices."""
        for number, device in enumerate(self.devices):
            while (kind := device.next_event()) >= 0:
                if kind in (abi.EVENT_PORT_ERR, abi.EVENT_DEVICE_FATAL):
                    what = "device" if kind == abi.EVENT_DEVICE_FATAL else "port"
                    yield number, f"the {what} {device.name} is down"

    def add_region(self, address: int, nbytes: int) -> None:
        """Keep a range registered; without room for one more its messages are registered one by
        one.
        """
        region = self._regions.acquire(address, nbytes)
        if region is not None:
            self._owned.setdefault(address, []).append(region)
        self._write_regions()

    def add_gpu_region(self, memory: GpuRange) -> list[int]:
        """Keep a range of GPU memory registered; return its remote key on each device.

        Raises:
            SystemFailure: A device refuses it, or there is no room for one more region.
        """
        self._gpu_ranges[memory.address] = memory
        try:
            self.add_region(memory.address, memory.nbytes)
            region = self._regions.find(memory.address, memory.nbytes)
        finally:
            del self._gpu_ranges[memory.address]
        if region is None:
            raise SystemFailure(
                f"cannot register {memory.nbytes} bytes of GPU memory: {layout.MAX_REGIONS} "
                "ranges are registered"
            )
        return [keys >> 32 & 0xFFFFFFFF for _, _, keys in region.handle]

    def remove_region(self, address: int) -> None:
        for region in self._owned.pop(address, []):
            self._regions.release(region)
            self._regions.invalidate(region.address, region.nbytes)
        self._write_regions()

    def watch_window(self, window: WindowPort) -> None:
        """Name the memory whose payloads are to stay registered."""
        self._window = window
        start = window.region.address
        self._set(layout.ENGINE_WINDOW_END, start + window.region.nbytes)
        self._set(layout.ENGINE_WINDOW, start)

    def hold_block(self, offset: int, nbytes: int) -> bool:
        """Take over a block of the window that is freed, if part of it may be registered.

        The one method for other threads; it may interrupt any other and does not wait.
        """
        if not self._window_regions:
            return False
        self._released.append((offset, nbytes))
        return True

    def keep_payload(self, address: int, nbytes: int) -> None:
        """Keep a payload in the window registered until its block is freed, if there is room."""
        with suppress(SystemFailure):  # of locked memory, for example: messages report it
            region = self._regions.acquire(address, nbytes)
            if region is not None:
                self._window_regions.append(region)
                self._write_regions()

    def end_released(self) -> None:
        """End the registrations of freed blocks, and give the blocks back."""
        while self._released:
            offset, nbytes = self._released.popleft()
            assert self._window is not None
            address = self._window.region.address + offset
            for region in [r for r in self._window_regions if r.touches(address, nbytes)]:
                self._window_regions.remove(region)
                self._regions.release(region)
            self._regions.invalidate(address, nbytes)
            self._write_regions()
            self._window.complete_release(offset, nbytes)

    def clear_regions(self) -> None:
        """End all registrations; blocks are no longer taken over."""
        self._window_regions.clear()
        self.end_released()
        self._regions.clear()
        self._write_regions()

    def _register(self, address: int, nbytes: int) -> list[tuple[VerbsDevice, int, int]]:
        """Register a range on all devices, or on none; return (device, mr, keys) of each."""
        made: list[tuple[VerbsDevice, int, int]] = []
        try:
            for device in self.devices:
                if memory := self._gpu_ranges.get(address):
                    mr, lkey, rkey = register_gpu(device, memory, FLUSHABLE)
                else:
                    mr = device.make_registration(address, nbytes, ACCESS_REMOTE)
                    lkey, rkey = abi.word32(mr + abi.MR_LKEY), abi.word32(mr + abi.MR_RKEY)
                keys = (lkey | rkey << 32) - (1 << 64 if rkey >> 31 else 0)
                made.append((device, mr, keys))
        except BaseException:
            self._deregister(made)
            raise
        return made

    @staticmethod
    def _deregister(made: list[tuple[VerbsDevice, int, int]]) -> None:
        for device, mr, _ in made:
            device.library.call("ibv_dereg_mr", mr)

    def _write_regions(self) -> None:
        """Write the table in which compiled code finds the keys of a payload."""
        valid = [region for region in self._regions if region.valid]
        for number, region in enumerate(valid):
            start = layout.ENGINE_REGIONS + number * layout.REGION_BYTES
            self._set(start + layout.REGION_START, region.address)
            self._set(start + layout.REGION_END, region.end)
            for index, (_, _, keys) in enumerate(region.handle):
                self._set(start + layout.REGION_KEYS + 8 * index, keys)
        self._set(layout.ENGINE_NREGIONS, len(valid))
