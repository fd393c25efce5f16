"""Simulated libibverbs: the functions and tables of ``native.verbs_abi`` over ``sim.verbs_wire``.

    devices = SimulatedVerbs(["sim0", "sim1"])
    VerbsTransport(context, library=devices.library, ports=devices.ports("sim0"), engine=...)

The objects have the layout of the C structures, with functions at the same offsets, so compiled
code posts and polls as it does on a real device.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import itertools
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from miraccl.native import verbs_abi as abi
from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.sim.verbs_wire import Channel, Completion, Pair, Queue, Region, Request, Segments, Wire
from miraccl.topo.hca import Gid, Hca, Port

_I64, _I32, _P = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
MAX_MESSAGE = 1 << 23


class SimulatedVerbs:
    """Devices of one simulated network.

    Args:
        names: Names of the devices, each with one active RoCE port.
        inline: True if work requests can carry their data.
        register_limit: Bytes that may be registered, -1 for any number.
        null_mr: True if the devices have memory regions that drop what is written to them.
        flush: True if writes to a dma-buf become visible with the device's next read only.
        wire: Faults and orders; the default has none.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        wire: Wire | None = None,
        inline: bool = True,
        register_limit: int = -1,
        null_mr: bool = False,
        flush: bool = False,
    ) -> None:
        self.wire = wire or Wire()
        self.names = list(names)
        self.inline, self.register_limit, self.null_mr = inline, register_limit, null_mr
        self.flush = flush
        self.registered = self.registrations = 0
        self._numbers = itertools.count(0x100)
        self._keys = itertools.count(0x1000, 0x11)
        self._objects: dict[int, Any] = {}
        self._buffers: dict[int, Any] = {}
        self._devices = {self._allocate(64, name): name for name in self.names}
        self._callbacks: dict[str, Any] = self._make_callbacks()
        self.library = VerbsLibrary(self._functions(), check_operations=False)

    def close(self) -> None:
        self.wire.close()

    def ports(self, *names: str) -> list[tuple[Hca, Port]]:
        """Return devices as ``topo.hca.select_ports`` does."""
        return [(hca, hca.ports[0]) for hca in map(self._hca, names)]

    def _hca(self, name: str) -> Hca:
        number = self.names.index(name)
        address = ipaddress.IPv6Address(f"::ffff:10.99.0.{number + 1}")
        gid = Gid(index=1, raw=address.packed, type="roce2", netdev=f"eth{number}")
        port = Port(
            number=1,
            state="ACTIVE",
            phys_state="LinkUp",
            link_layer="Ethernet",
            rate="100 Gb/sec (4X EDR)",
            gids=(gid,),
        )
        return Hca(name=name, ports=(port,), firmware="sim")

    # --- objects in memory

    def _allocate(self, nbytes: int, made: Any, *, before: int = 0) -> int:
        """Return the address of a structure, which may have ``before`` bytes in front of it."""
        buffer = ctypes.create_string_buffer(before + nbytes)
        address = ctypes.addressof(buffer) + before
        self._buffers[address], self._objects[address] = buffer, made
        return address

    def _free(self, address: int) -> Any:
        self._buffers.pop(address, None)
        return self._objects.pop(address, None)

    def _object(self, address: int) -> Any:
        return self._objects[address]

    @staticmethod
    def _put(address: int, value: int, kind: Any = ctypes.c_uint32) -> None:
        kind.from_address(address).value = value

    # --- exported functions

    def _functions(self) -> dict[str, Callable[..., Any]]:
        simple: dict[str, Callable[..., Any]] = {
            "ibv_free_device_list": lambda _: self._free(_),
            "ibv_get_device_name": lambda device: self._devices[device].encode(),
            "ibv_alloc_pd": lambda context: self._allocate(64, self._object(context)),
            "ibv_dealloc_pd": lambda pd: self._free(pd) and 0,
            "ibv_query_gid": lambda *_: 0,
            "ibv_ack_async_event": lambda _: None,
            "ibv_create_ah": lambda pd, attributes: self._allocate(64, self._object(pd)),
            "ibv_destroy_ah": lambda handle: self._free(handle) and 0,
        }
        methods: dict[str, Callable[..., Any]] = {
            "ibv_get_device_list": self._get_device_list,
            "ibv_open_device": self._open_device,
            "ibv_close_device": self._close_device,
            "ibv_query_device": self._query_device,
            "ibv_query_port": self._query_port,
            "ibv_create_comp_channel": self._create_channel,
            "ibv_destroy_comp_channel": self._destroy_channel,
            "ibv_create_cq": self._create_cq,
            "ibv_destroy_cq": lambda queue: self._free(queue) and 0,
            "ibv_create_qp": self._create_qp,
            "ibv_modify_qp": self._modify_qp,
            "ibv_destroy_qp": self._destroy_qp,
            "ibv_get_async_event": self._get_async_event,
            "ibv_reg_dmabuf_mr": self._reg_dmabuf_mr,
        }
        return simple | methods | {k: v for k, v in self._callbacks.items() if k in abi.FUNCTIONS}

    def _make_callbacks(self) -> dict[str, Any]:
        """Return the functions that compiled code calls, as C functions."""
        five = ctypes.CFUNCTYPE(_I64, _I64, _I64, _I64, _I64)
        three = ctypes.CFUNCTYPE(_I32, _I64, _I64, _I64)
        return {
            "ibv_reg_mr": five(self._reg_mr),
            "ibv_dereg_mr": ctypes.CFUNCTYPE(_I32, _I64)(self._dereg_mr),
            "ibv_get_cq_event": three(self._get_cq_event),
            "ibv_ack_cq_events": ctypes.CFUNCTYPE(_I32, _I64, _I64)(lambda queue, count: 0),
            "poll_cq": three(self._poll_cq),
            "req_notify_cq": ctypes.CFUNCTYPE(_I32, _I64, _I64)(self._req_notify_cq),
            "post_send": three(self._post_send),
            "post_recv": three(self._post_recv),
            "alloc_null_mr": ctypes.CFUNCTYPE(_I64, _I64)(self._alloc_null_mr),
        }

    def _get_device_list(self, count: int) -> int:
        self._put(count, len(self._devices))
        table = (ctypes.c_uint64 * (len(self._devices) + 1))(*self._devices)
        address = ctypes.addressof(table)
        self._buffers[address] = table
        return address

    def _open_device(self, device: int) -> int:
        name = self._devices[device]
        before = -abi.OP_ALLOC_NULL_MR
        context = self._allocate(abi.CONTEXT_BYTES, name, before=before)
        if self.null_mr:
            self._put(context + abi.CONTEXT_ABI, abi.EXTENDED_ABI, ctypes.c_uint64)
            self._put(context + abi.CONTEXT_SIZE, before + abi.CONTEXT_BYTES, ctypes.c_uint64)
        operations = {
            abi.OP_POLL_CQ: "poll_cq",
            abi.OP_REQ_NOTIFY_CQ: "req_notify_cq",
            abi.OP_POST_SEND: "post_send",
            abi.OP_POST_RECV: "post_recv",
            abi.OP_ALLOC_NULL_MR: "alloc_null_mr",
        }
        for offset, function in operations.items():
            address = ctypes.cast(self._callbacks[function], _P).value or 0
            self._put(context + offset, address, ctypes.c_uint64)
        events = Channel()
        self._put(context + abi.CONTEXT_ASYNC_FD, events.fd)
        with self.wire.lock:
            self.wire.async_events.setdefault(name, []).append(events)
        self._objects[context + 1] = events
        return context

    def _close_device(self, context: int) -> int:
        events, name = self._objects.pop(context + 1), self._free(context)
        with self.wire.lock:
            self.wire.async_events[name].remove(events)
        events.close()
        return 0

    def _query_device(self, context: int, attributes: int) -> int:
        record = abi.DeviceAttr.from_address(attributes)
        record.fw_ver, record.max_qp, record.max_qp_wr = b"sim", 1 << 16, 1 << 14
        record.max_cqe, record.max_mr = 1 << 22, 1 << 20
        return 0

    def _query_port(self, context: int, port: int, attributes: int) -> int:
        record = abi.PortAttr.from_address(attributes)
        record.state, record.active_mtu, record.max_mtu = abi.PORT_ACTIVE, 5, 5
        record.max_msg_sz, record.link_layer = MAX_MESSAGE, abi.LINK_ETHERNET
        return 0

    def _create_channel(self, context: int) -> int:
        channel = Channel()
        address = self._allocate(64, channel)
        self._put(address + abi.CHANNEL_FD, channel.fd)
        return address

    def _destroy_channel(self, channel: int) -> int:
        self._free(channel).close()
        return 0

    def _create_cq(self, context: int, entries: int, _: Any, channel: int, vector: int) -> int:
        queue = Queue(address=0, entries=entries, channel=self._objects.get(channel))
        queue.address = self._allocate(64, queue)
        return queue.address

    def _reg_mr(self, pd: int, address: int, nbytes: int, access: int) -> int:
        with self.wire.lock:
            if 0 <= self.register_limit < self.registered + nbytes:
                ctypes.set_errno(errno.ENOMEM)
                return 0
            self.registered += nbytes
            self.registrations += 1
            key = next(self._keys)
            region = Region(device=self._object(pd), address=address, nbytes=nbytes, access=access)
            self.wire.regions[key] = region
            mr = self._allocate(64, key)
            self._put(mr + abi.MR_LKEY, key)
            self._put(mr + abi.MR_RKEY, key)
            return mr

    def _reg_dmabuf_mr(
        self, pd: int, offset: int, nbytes: int, iova: int, descriptor: int, access: int
    ) -> int:
        """Register part of an anonymous file as if it were a dma-buf; work requests name it by
        ``iova``, which this process need not be able to access.
        """
        try:
            if offset + nbytes > os.fstat(descriptor).st_size:
                raise OSError(errno.EINVAL, "the file is shorter")
            first = offset // mmap.PAGESIZE * mmap.PAGESIZE
            mapped = mmap.mmap(descriptor, offset + nbytes - first, offset=first)
        except OSError:
            ctypes.set_errno(errno.EINVAL)
            return 0
        mr = self._reg_mr(pd, iova, nbytes, access)
        if mr:
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + offset - first
            with self.wire.lock:
                key = self._object(mr)
                self.wire.regions[key] = replace(
                    self.wire.regions[key], mapping=start, posted=self.flush
                )
                self._buffers[mr] = self._buffers[mr], mapped
        return mr

    def _alloc_null_mr(self, pd: int) -> int:
        with self.wire.lock:
            key = next(self._keys)
            self.wire.regions[key] = Region(
                device=self._object(pd),
                address=0,
                nbytes=1 << 62,
                access=abi.ACCESS_LOCAL_WRITE,
                null=True,
            )
            mr = self._allocate(64, key)
            self._put(mr + abi.MR_LKEY, key)
            return mr

    def _dereg_mr(self, mr: int) -> int:
        with self.wire.lock:
            region = self.wire.regions.pop(self._free(mr))
            self.registered -= 0 if region.null else region.nbytes
        return 0

    def _create_qp(self, pd: int, init: int) -> int:
        wanted = abi.QpInit.from_address(init)
        if wanted.cap.inline and not self.inline:
            ctypes.set_errno(errno.EINVAL)
            return 0
        with self.wire.lock:
            pair = Pair(
                number=next(self._numbers),
                device=self._object(pd),
                kind=wanted.qp_type,
                queue=self._object(wanted.send_cq),
                recv_queue=self._object(wanted.recv_cq),
                send_depth=wanted.cap.send_wr,
                recv_depth=wanted.cap.recv_wr,
            )
            self.wire.pairs[pair.number] = pair
            address = self._allocate(64, pair)
            self._put(address + abi.QP_NUMBER, pair.number)
            return address

    def _modify_qp(self, qp: int, attributes: int, mask: int) -> int:
        record, pair = abi.QpAttr.from_address(attributes), self._object(qp)
        with self.wire.lock:
            if mask & abi.ATTR_DEST_QPN:
                pair.peer = record.dest_qp_num
            if mask & abi.ATTR_AV:
                pair.traffic_class = record.ah.grh.traffic_class
            if mask & abi.ATTR_QKEY:
                pair.qkey = record.qkey
            return self.wire.set_state(pair, record.qp_state)

    def _destroy_qp(self, qp: int) -> int:
        self.wire.destroy(self._free(qp))
        return 0

    def _get_async_event(self, context: int, event: int) -> int:
        with self.wire.lock:
            kind = self._objects[context + 1].take()
        if kind is None:
            return -1
        abi.AsyncEvent.from_address(event).kind = kind
        return 0

    # --- operations

    def _get_cq_event(self, channel: int, queue: int, context: int) -> int:
        with self.wire.lock:
            address = self._object(channel).take()
        if address is None:
            return -1
        self._put(queue, address, ctypes.c_uint64)
        return 0

    def _req_notify_cq(self, queue: int, solicited: int) -> int:
        with self.wire.lock:
            record = self._object(queue)
            # An arming for all completions is not weakened by a later one.
            record.solicited_only = bool(solicited) and (record.solicited_only or not record.armed)
            record.armed = True
        return 0

    def _poll_cq(self, queue: int, most: int, wcs: int) -> int:
        with self.wire.lock:
            completions = self._object(queue).completions
            count = min(most & 0xFFFFFFFF, len(completions))
            for i in range(count):
                self._write_completion(wcs + 48 * i, completions.popleft())
            return count

    def _write_completion(self, address: int, completion: Completion) -> None:
        record = abi.Wc.from_address(address)
        record.wr_id, record.status = completion.wr_id, completion.status
        record.opcode, record.vendor_err = completion.opcode, completion.vendor
        record.byte_len, record.imm_data = completion.nbytes, completion.immediate
        record.qp_num, record.wc_flags = completion.qp, completion.flags

    def _post_send(self, qp: int, wr: int, bad: int) -> int:
        pair = self._object(qp)
        while wr:
            record = abi.SendWr.from_address(wr)
            code = self.wire.post_send(pair, self._request(record))
            if code:
                self._put(bad, wr, ctypes.c_uint64)
                return code
            wr = record.next or 0
        return 0

    @staticmethod
    def _segments(record: Any) -> Segments:
        return tuple(
            (sge.addr, sge.length, sge.lkey)
            for sge in (
                abi.Sge.from_address(record.sg_list + 16 * i) for i in range(record.num_sge)
            )
        )

    def _request(self, record: Any) -> Request:
        segments = self._segments(record)
        data = None
        if record.send_flags & abi.SEND_INLINE:
            data = b"".join(ctypes.string_at(address, nbytes) for address, nbytes, _ in segments)
        return Request(
            wr_id=record.wr_id,
            opcode=record.opcode,
            signaled=bool(record.send_flags & abi.SEND_SIGNALED),
            segments=segments,
            remote=record.remote_addr,
            rkey=record.rkey,
            immediate=record.imm_data,
            data=data,
            qkey=record.pad0,
            addend=record.rkey | record.pad0 << 32,
            atomic_rkey=record.pad1[1] & 0xFFFFFFFF,
            solicited=bool(record.send_flags & abi.SEND_SOLICITED),
        )

    def _post_recv(self, qp: int, wr: int, bad: int) -> int:
        record = abi.RecvWr.from_address(wr)
        return self.wire.post_receive(self._object(qp), record.wr_id, self._segments(record))
