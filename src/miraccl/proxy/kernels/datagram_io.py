"""Kernel source: packets of flows on UDP sockets or unreliable queue pairs.

Sending: packets of equal size on one path become one ``sendmsg`` with UDP_SEGMENT, whose iovecs
point at headers and tags in scratch memory and at payload in the executor's memory.  Receiving: one
``recvmsg`` takes what the kernel has aggregated (UDP_GRO); the tag is checked before anything else
of a packet is looked at.
"""

from __future__ import annotations

import platform

from miraccl.native.intrinsics import (
    call6,
    clock_gettime,
    inline,
    load,
    load8,
    load32,
    load_unaligned,
    memcpy,
    store,
    store8,
    store32,
    store_unaligned,
    syscall,
)
from miraccl.proxy.kernels import aegis, link_layout, queue_layout
from miraccl.proxy.kernels import flow_layout as layout
from miraccl.proxy.kernels.flow_path import path_of, sent_at, shrink
from miraccl.proxy.kernels.flow_receive import KIND_DATA, KIND_HEADED, note_change, receive
from miraccl.proxy.kernels.flow_send import FRAME_BYTES, head_of, next_packet
from miraccl.proxy.kernels.link_io import EINTR, SYS_RECVMSG, SYS_SENDMSG, last_errno
from miraccl.proxy.kernels.packet_queues import (
    SOLICITED,
    append_packet,
    device_at,
    poll_cq,
    post_packets,
    received_bytes,
    received_packet,
    repost,
)
from miraccl.wire.datagram.packets import DATA_BYTES, HEADER_BYTES, TAG_BYTES, VERSION

SYS_PPOLL = 73 if platform.machine() == "aarch64" else 271
MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
POLLOUT = 4
EIO, EAGAIN, EINVAL, EMSGSIZE, ENOBUFS, ECONNREFUSED = 5, 11, 22, 90, 105, 111
#: bits/socket.h, linux/in.h, in6.h: errors that ICMP reports for packets of a socket.
MSG_ERRQUEUE, IP_RECVERR, IPV6_RECVERR = 0x2000, 11, 25
ERRORS_PER_CALL = 64
SOCKADDR_IN_BYTES = 16
#: linux/udp.h, in.h, in6.h, asm-generic/socket.h.
SOL_SOCKET, SOL_IP, SOL_IPV6, SOL_UDP = 1, 0, 41, 17
SCM_TIMESTAMPNS = 35
#: Longest time in a socket's buffer that is believed: the wall clock may be set.
MAX_AGE_NS = 1_000_000_000
UDP_SEGMENT, UDP_GRO, IP_TOS, IPV6_TCLASS, SO_RXQ_OVFL = 103, 104, 1, 67, 40
CMSG_HEADER = 16
ECN_MASK, ECN_CE = 3, 3
#: openssl/evp.h
GET_TAG, SET_TAG = 0x10, 0x11
#: Bytes of one call with UDP_SEGMENT: with headers of at most 62 bytes they stay below the
#: ``gso_max_size`` of 65,536, from which on the kernel cuts them before the interface.
MAX_CALL_BYTES = 65_472
#: Bytes of the packets that are stamped together on queue pairs.
MAX_GROUP_BYTES = 1 << 18
#: Bytes of payload that are worth an iovec.
COPY_BYTES = 256
#: Time to wait for room in the socket's send buffer before packets count as lost.
SEND_WAIT_NS = 2_000_000
#: Calls and bytes per socket, and packets per flow, in one round: many small packets share an
#: acknowledgement, and a few super-packets do not delay it.
RECEIVES_PER_ROUND, RECEIVED_PER_ROUND, PACKETS_PER_ROUND = 32, 200_000, 128
#: Packets that are built between two readings of the clock; a power of two.
PACKETS_PER_CLOCK = 16
#: Polls per device, of 16 packets each, in one round.
POLLS_PER_ROUND = 4


@inline
def now_ns(port: int) -> int:
    """CLOCK_MONOTONIC in ns."""
    clock_gettime(1, port + layout.PORT_TIMEOUT)
    return load(port + layout.PORT_TIMEOUT) * 1000000000 + load(port + layout.PORT_TIMEOUT + 8)


# ---- protection


@inline
def set_nonce(port: int, packet: int) -> int:
    """Return the address of a packet's nonce: its path, three zero bytes, its number."""
    nonce = port + layout.PORT_NONCE
    store32(nonce, load8(packet + 1))
    store_unaligned(nonce + 4, load_unaligned(packet + 8))
    return nonce


@inline
def crypto(port: int, function: int, context: int, a: int, b: int, c: int, d: int) -> int:
    """Call a function of libcrypto; return its int result."""
    address = load(port + layout.PORT_CRYPTO + 8 * function)
    return call6(address, context, a, b, c, d, 0) & 0xFFFFFFFF


@inline
def seal_mac(port: int, context: int, packet: int, group: int, vectors: int, tag: int) -> None:
    """Write the tag over all iovecs of the last packet of a group."""
    crypto(port, 0, context, 0, 0, 0, set_nonce(port, packet))
    first = load(group + layout.GROUP_FIRST + 8 * load(group + layout.GROUP_COUNT))
    for i in range(first, load(group + layout.GROUP_VECTORS)):
        vector = vectors + 16 * i
        size = load(vector + 8)
        if i + 1 == load(group + layout.GROUP_VECTORS):
            size -= TAG_BYTES
        crypto(port, 1, context, 0, port + layout.PORT_INT, load(vector), size)
    crypto(port, 2, context, port + layout.PORT_TAG, port + layout.PORT_INT, 0, 0)
    crypto(port, 6, context, GET_TAG, TAG_BYTES, tag, 0)


@inline
def seal_aegis_mac(port: int, key: int, packet: int, group: int, vectors: int, tag: int) -> None:
    """Write the tag over all iovecs of the last packet of a group."""
    context = port + layout.PORT_AEGIS
    aegis.start(context, key, set_nonce(port, packet))
    first = load(group + layout.GROUP_FIRST + 8 * load(group + layout.GROUP_COUNT))
    last = load(group + layout.GROUP_VECTORS) - 1
    for i in range(first, last + 1):
        vector = vectors + 16 * i
        size = load(vector + 8) - TAG_BYTES if i == last else load(vector + 8)
        aegis.absorb(context, load(vector), size)
    aegis.end_absorbing(context)
    aegis.finish(context, 0, tag)


@inline
def crypt_aegis(port: int, key: int, packet: int, size: int, decrypts: bool, tag: int) -> None:
    """Encrypt or decrypt a contiguous packet in place and write its tag."""
    context, body = port + layout.PORT_AEGIS, packet + HEADER_BYTES
    length = size - HEADER_BYTES - TAG_BYTES
    aegis.start(context, key, set_nonce(port, packet))
    aegis.absorb(context, packet, HEADER_BYTES)
    aegis.end_absorbing(context)
    if decrypts:
        aegis.decrypt(context, body, length)
    else:
        aegis.encrypt(context, body, length)
    aegis.finish(context, length, tag)


@inline
def is_authentic_aegis(port: int, flow: int, packet: int, size: int) -> bool:
    """Check the tag of a received packet, in constant time; decrypt it in place if it is
    encrypted.
    """
    context, key = port + layout.PORT_AEGIS, load(flow + layout.FLOW_OPEN)
    made, tag = port + layout.PORT_TAG, packet + size - TAG_BYTES
    if load(flow + layout.FLOW_PROTECTION) == layout.PROTECT_AEGIS:
        crypt_aegis(port, key, packet, size, True, made)
    else:
        aegis.start(context, key, set_nonce(port, packet))
        aegis.absorb(context, packet, size - TAG_BYTES)
        aegis.end_absorbing(context)
        aegis.finish(context, 0, made)
    differs = load(made) ^ load_unaligned(tag)
    return differs | (load(made + 8) ^ load_unaligned(tag + 8)) == 0


@inline
def seal_aead(port: int, context: int, packet: int, size: int) -> None:
    """Encrypt a contiguous packet in place and append its tag."""
    integer, body = port + layout.PORT_INT, packet + HEADER_BYTES
    crypto(port, 0, context, 0, 0, 0, set_nonce(port, packet))
    crypto(port, 1, context, 0, integer, packet, HEADER_BYTES)
    crypto(port, 1, context, body, integer, body, size - HEADER_BYTES - TAG_BYTES)
    crypto(port, 2, context, port + layout.PORT_TAG, integer, 0, 0)
    crypto(port, 6, context, GET_TAG, TAG_BYTES, packet + size - TAG_BYTES, 0)


@inline
def is_authentic(port: int, flow: int, packet: int, size: int) -> bool:
    """Check the tag of a received packet; decrypt it in place where it is encrypted."""
    mode, context = load(flow + layout.FLOW_PROTECTION), load(flow + layout.FLOW_OPEN)
    if mode == layout.PROTECT_NONE:
        return True
    if mode >= layout.PROTECT_AEGIS_MAC:
        return is_authentic_aegis(port, flow, packet, size)
    integer, tag = port + layout.PORT_INT, packet + size - TAG_BYTES
    clear = size - TAG_BYTES if mode == layout.PROTECT_MAC else HEADER_BYTES
    crypto(port, 3, context, 0, 0, 0, set_nonce(port, packet))
    crypto(port, 4, context, 0, integer, packet, clear)
    if mode == layout.PROTECT_AEAD:
        body = packet + HEADER_BYTES
        crypto(port, 4, context, body, integer, body, size - HEADER_BYTES - TAG_BYTES)
    crypto(port, 6, context, SET_TAG, TAG_BYTES, tag, 0)
    return crypto(port, 5, context, port + layout.PORT_TAG, integer, 0, 0) == 1


# ---- sending


@inline
def group_of(port: int, index: int) -> int:
    """Address of the group of packets of a path."""
    return port + layout.PORT_GROUPS + index * layout.GROUP_BYTES


@inline
def vectors_of(port: int, index: int) -> int:
    """Address of the iovecs of a path's group."""
    return load(port + layout.PORT_VECTORS) + index * layout.VECTORS_PER_PATH * 16


@inline
def add_bytes(group: int, vectors: int, address: int, size: int) -> None:
    """Append bytes to a group, extending the last iovec of this packet if they follow it."""
    count = load(group + layout.GROUP_VECTORS)
    first = load(group + layout.GROUP_FIRST + 8 * load(group + layout.GROUP_COUNT))
    if count > first:
        last = vectors + 16 * (count - 1)
        if load(last) + load(last + 8) == address:
            store(last + 8, load(last + 8) + size)
            return
    store(vectors + 16 * count, address)
    store(vectors + 16 * count + 8, size)
    store(group + layout.GROUP_VECTORS, count + 1)


@inline
def write_segment(flow: int, segment: int, group: int, vectors: int, at: int, copies: bool) -> int:
    """Append a data record to a packet; return the end of its scratch memory."""
    index, frame, offset = load(segment), load(segment + 8), load(segment + 16)
    length, headed = load(segment + 24), load(segment + 32)
    head = head_of(flow, index)
    store8(at, KIND_HEADED if headed != 0 else KIND_DATA)
    store8(at + 1, index)
    store32(at + 2, frame)
    store32(at + 6, offset)
    store8(at + 10, length)
    store8(at + 11, length >> 8)
    used = DATA_BYTES
    if headed != 0:
        memcpy(at + used, head + link_layout.ENTRY_HEADER, FRAME_BYTES)
        used += FRAME_BYTES
    payload = load(head + link_layout.ENTRY_PAYLOAD) + offset
    if copies or length <= COPY_BYTES:
        memcpy(at + used, payload, length)
        add_bytes(group, vectors, at, used + length)
        return at + used + length
    add_bytes(group, vectors, at, used)
    add_bytes(group, vectors, payload, length)
    return at + used


@inline
def build(port: int, flow: int) -> None:
    """Append the packet in ``PORT_OUT`` to the group of its path; send the group if it is full."""
    out = load(port + layout.PORT_OUT)
    index, size = load(out + layout.OUT_PATH), load(out + layout.OUT_SIZE)
    group, vectors = group_of(port, index), vectors_of(port, index)
    path = path_of(flow, index)
    most = MAX_CALL_BYTES if load(path + layout.PATH_PAIR) == 0 else MAX_GROUP_BYTES
    if must_flush(group, size, most) or load(path + layout.PATH_NO_GSO) != 0:
        flush(port, flow, index)
    count = load(group + layout.GROUP_COUNT)
    if count == 0:
        store(group + layout.GROUP_SIZE, size)
    store(group + layout.GROUP_FIRST + 8 * count, load(group + layout.GROUP_VECTORS))
    mode = load(flow + layout.FLOW_PROTECTION)
    packet = load(port + layout.PORT_SCRATCH) + index * layout.SCRATCH_PER_PATH
    packet += load(group + layout.GROUP_SCRATCH)
    store_unaligned(packet, VERSION << 4 | index << 8)
    store32(packet + 4, load(flow + layout.FLOW_PEER_CONNECTION))
    store_unaligned(packet + 8, load(out + layout.OUT_NUMBER))
    control = load(out + layout.OUT_NCONTROL)
    memcpy(packet + HEADER_BYTES, out + layout.OUT_CONTROL, control)
    at = packet + HEADER_BYTES + control
    add_bytes(group, vectors, packet, at - packet)
    copies = mode == layout.PROTECT_AEAD or mode == layout.PROTECT_AEGIS
    for i in range(load(out + layout.OUT_NSEGMENTS)):
        segment = out + layout.OUT_SEGMENTS + i * layout.SEGMENT_BYTES
        at = write_segment(flow, segment, group, vectors, at, copies)
    add_bytes(group, vectors, at, TAG_BYTES)
    context = load(flow + layout.FLOW_SEAL)
    if mode == layout.PROTECT_MAC:
        seal_mac(port, context, packet, group, vectors, at)
    elif mode == layout.PROTECT_AEGIS_MAC:
        seal_aegis_mac(port, context, packet, group, vectors, at)
    elif mode == layout.PROTECT_AEGIS:
        crypt_aegis(port, context, packet, size, False, at)
    elif mode == layout.PROTECT_AEAD:
        seal_aead(port, context, packet, size)
    else:
        store_unaligned(at, 0)
        store_unaligned(at + 8, 0)
    scratch = load(group + layout.GROUP_SCRATCH) + at - packet + TAG_BYTES
    store(group + layout.GROUP_SCRATCH, (scratch + 15) // 16 * 16)
    store(group + layout.GROUP_COUNT, count + 1)
    store(group + layout.GROUP_TOTAL, load(group + layout.GROUP_TOTAL) + size)
    if size < load(group + layout.GROUP_SIZE):
        store(group + layout.GROUP_CLOSED, 1)


@inline
def must_flush(group: int, size: int, most: int) -> bool:
    """Return True if a packet of ``size`` bytes does not fit into the group of ``most`` bytes."""
    count = load(group + layout.GROUP_COUNT)
    if count == 0:
        return False
    if load(group + layout.GROUP_CLOSED) != 0 or size > load(group + layout.GROUP_SIZE):
        return True
    if count >= layout.MAX_GROUP or load(group + layout.GROUP_TOTAL) + size > most:
        return True
    if load(group + layout.GROUP_VECTORS) + 20 > layout.VECTORS_PER_PATH:
        return True
    return load(group + layout.GROUP_SCRATCH) + (size << 1) + 4096 > layout.SCRATCH_PER_PATH


@inline
def stamp(port: int, path: int) -> None:
    """Note that the packets of a group leave now: the groups of other paths went first."""
    now, order = now_ns(port), load(path + layout.PATH_ORDER)
    for position in range(load(path + layout.PATH_STAMPED), order):
        store(sent_at(path, position) + layout.SENT_TIME, now)
    store(path + layout.PATH_STAMPED, order)


@inline
def flush(port: int, flow: int, index: int) -> None:
    """Send the packets of a path's group."""
    group = group_of(port, index)
    count = load(group + layout.GROUP_COUNT)
    if count == 0:
        return
    path = path_of(flow, index)
    stamp(port, path)
    size = load(group + layout.GROUP_SIZE)
    errno = 0
    if load(path + layout.PATH_PAIR) != 0:
        errno = post_group(port, path, index)
    elif count > 1:
        errno = send_vectors(port, path, index, 0, load(group + layout.GROUP_VECTORS), size)
        if errno == EIO or errno == EINVAL:  # this interface refuses UDP_SEGMENT, for good
            store(path + layout.PATH_NO_GSO, 1)
    if load(path + layout.PATH_PAIR) == 0 and (count == 1 or errno == EIO or errno == EINVAL):
        for i in range(count):
            first = load(group + layout.GROUP_FIRST + 8 * i)
            stop = load(group + layout.GROUP_VECTORS)
            if i + 1 < count:
                stop = load(group + layout.GROUP_FIRST + 8 * (i + 1))
            errno = send_vectors(port, path, index, first, stop, 0)
    if errno == 0:
        sent = load(path + layout.PATH_SENT_BYTES) + load(group + layout.GROUP_TOTAL)
        store(path + layout.PATH_SENT_BYTES, sent)
    elif errno == EMSGSIZE:  # the interface carries less than it says
        shrink(path, now_ns(port))
    if errno != 0:  # the packets count as lost
        store(port + layout.PORT_DROPPED, load(port + layout.PORT_DROPPED) + count)
        store(path + layout.PATH_SEND_ERRORS, load(path + layout.PATH_SEND_ERRORS) + 1)
        store(path + layout.PATH_LAST_ERRNO, errno)
    for offset in range(0, layout.GROUP_FIRST, 8):
        store(group + offset, 0)


@inline
def post_group(port: int, path: int, index: int) -> int:
    """Append the packets of a path's group to those that ``post_paths`` posts; return 0 or an
    errno.
    """
    group, vectors = group_of(port, index), vectors_of(port, index)
    count, errno = load(group + layout.GROUP_COUNT), 0
    pair, address = load(path + layout.PATH_PAIR), path + layout.PATH_ADDRESS
    for i in range(count):
        first = load(group + layout.GROUP_FIRST + 8 * i)
        stop = load(group + layout.GROUP_VECTORS)
        if i + 1 < count:
            stop = load(group + layout.GROUP_FIRST + 8 * (i + 1))
        code = append_packet(pair, address, vectors, first, stop)
        if code != 0:
            errno = code
    return errno


@inline
def post_paths(flow: int) -> None:
    """Post what was appended on the queue pairs of a flow; the last packet wakes the peer."""
    for index in range(load(flow + layout.FLOW_NPATHS)):
        pair = load(path_of(flow, index) + layout.PATH_PAIR)
        if pair != 0:
            post_packets(pair, SOLICITED)


@inline
def prepare_send(port: int, path: int, index: int, first: int, stop: int, segment: int) -> None:
    """Describe a call of ``send_vectors`` to the kernel."""
    message = port + layout.PORT_MESSAGE
    store(message, path + layout.PATH_ADDRESS)
    store(message + 8, load(path + layout.PATH_ADDRESS_BYTES))
    store(message + 16, vectors_of(port, index) + 16 * first)
    store(message + 24, stop - first)
    store(message + 32, 0)
    store(message + 40, 0)
    if segment != 0:
        control = port + layout.PORT_CONTROL
        store(control, CMSG_HEADER + 2)
        store32(control + 8, SOL_UDP)
        store32(control + 12, UDP_SEGMENT)
        store(control + 16, segment)
        store(message + 32, control)
        store(message + 40, CMSG_HEADER + 8)


@inline
def send_vectors(port: int, path: int, index: int, first: int, stop: int, segment: int) -> int:
    """Send iovecs as one datagram, or as several of ``segment`` bytes; return 0 or errno."""
    message = port + layout.PORT_MESSAGE
    prepare_send(port, path, index, first, stop, segment)
    sockets = port + layout.PORT_SOCKETS
    fd = load(sockets + load(path + layout.PATH_SOCKET) * layout.SOCKET_BYTES)
    tries = 0
    while True:
        store(port + layout.PORT_SENDS, load(port + layout.PORT_SENDS) + 1)
        if syscall(SYS_SENDMSG, fd, message, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0, 0) >= 0:
            return 0
        errno = last_errno()
        tries += 1
        if tries > 3:
            return errno
        if errno == EAGAIN or errno == ENOBUFS:
            wait_writable(port, fd)
        elif errno == ECONNREFUSED:  # of an earlier packet, perhaps on another path
            read_errors(port, load(path + layout.PATH_SOCKET))
            prepare_send(port, path, index, first, stop, segment)
        elif errno != EINTR:
            return errno


@inline
def wait_writable(port: int, fd: int) -> None:
    """Wait a moment for room in a socket's send buffer."""
    poll, timeout = port + layout.PORT_TAG, port + layout.PORT_TIMEOUT
    store32(poll, fd)
    store32(poll + 4, POLLOUT)
    store(timeout, 0)
    store(timeout + 8, SEND_WAIT_NS)
    syscall(SYS_PPOLL, poll, 1, timeout, 0, 8, 0)


@inline
def send_flow(port: int, flow: int, now: int) -> bool:
    """Send what a flow has to send; return True if there may be more."""
    out, count = load(port + layout.PORT_OUT), 0
    while count < PACKETS_PER_ROUND and next_packet(flow, now, out) != 0:
        build(port, flow)
        count += 1
        # Reading the clock is a system call in User-mode Linux; packets are stamped as they leave.
        if count & (PACKETS_PER_CLOCK - 1) == 0:
            now = now_ns(port)
    if count > 0:
        for index in range(load(flow + layout.FLOW_NPATHS)):
            flush(port, flow, index)
        post_paths(flow)
    return count == PACKETS_PER_ROUND


# ---- receiving


@inline
def flow_of(port: int, connection: int) -> int:
    """Return the flow of a connection number, 0 for a stranger's."""
    table, mask = load(port + layout.PORT_HASH), load(port + layout.PORT_HASH_MASK)
    at = connection & mask
    while load(table + 16 * at + 8) != 0:
        if load(table + 16 * at) == connection:
            return load(table + 16 * at + 8)
        at = (at + 1) & mask
    return 0


@inline
def on_datagram(port: int, packet: int, size: int, marked: int, now: int) -> None:
    """Process one received packet; a stranger's costs one look or one tag check."""
    flow = 0
    if size >= HEADER_BYTES + TAG_BYTES:
        flow = flow_of(port, load_unaligned(packet + 4) & 0xFFFFFFFF)
    if flow == 0 or not is_authentic(port, flow, packet, size):
        store(port + layout.PORT_STRANGERS, load(port + layout.PORT_STRANGERS) + 1)
        return
    link = load(flow + layout.FLOW_LINK)
    if load(link + link_layout.LINK_STATE) > link_layout.STATE_CLOSING:
        return
    index = load8(packet + 1)
    if index < load(flow + layout.FLOW_NPATHS):
        path = path_of(flow, index)
        received = load(path + layout.PATH_RECEIVED_PACKETS) + 1
        store(path + layout.PATH_RECEIVED_PACKETS, received)
        store(path + layout.PATH_RECEIVED_BYTES, load(path + layout.PATH_RECEIVED_BYTES) + size)
    receive(flow, now, packet, size - TAG_BYTES, marked)


@inline
def age_of(port: int, stamp: int) -> int:
    """Return the time since the kernel received a packet, in ns; 0 if the clock was set since."""
    clock_gettime(0, port + layout.PORT_TIMEOUT)  # CLOCK_REALTIME
    seconds = load(port + layout.PORT_TIMEOUT) - load_unaligned(stamp)
    age = seconds * 1000000000
    age += load(port + layout.PORT_TIMEOUT + 8) - load_unaligned(stamp + 8)
    return age if 0 <= age < MAX_AGE_NS else 0


@inline
def read_control(port: int, socket: int) -> tuple[int, int, int]:
    """Return the segment size of a received super-packet (0: one packet), its ECN mark and age.

    The flow is told the time of arrival in the kernel: the time that this thread did not run is not
    the network's delay.
    """
    message = port + layout.PORT_MESSAGE
    at, segment, marked, age = port + layout.PORT_CONTROL, 0, 0, 0
    stop = at + load(message + 40)
    while at + CMSG_HEADER <= stop and load(at) >= CMSG_HEADER:
        level, kind = load32(at + 8), load32(at + 12)
        if level == SOL_UDP and kind == UDP_GRO:
            segment = load32(at + CMSG_HEADER)
        elif (level == SOL_IP and kind == IP_TOS) or (level == SOL_IPV6 and kind == IPV6_TCLASS):
            marked = 1 if load8(at + CMSG_HEADER) & ECN_MASK == ECN_CE else 0
        elif level == SOL_SOCKET and kind == SCM_TIMESTAMPNS:
            age = age_of(port, at + CMSG_HEADER)
        elif level == SOL_SOCKET and kind == SO_RXQ_OVFL:
            store(socket + layout.SOCKET_OVERFLOW, load32(at + CMSG_HEADER) & 0xFFFFFFFF)
        at += (load(at) + 7) // 8 * 8
    return segment, marked, age


@inline
def is_address(path: int, name: int) -> bool:
    """Return True if a socket address is that of the peer's end of a path."""
    address = path + layout.PATH_ADDRESS
    if load(path + layout.PATH_ADDRESS_BYTES) == SOCKADDR_IN_BYTES:
        return load(address) == load(name)
    if load(address) & 0xFFFFFFFF != load(name) & 0xFFFFFFFF:
        return False
    return load(address + 8) == load(name + 8) and load(address + 16) == load(name + 16)


@inline
def on_unreachable(port: int, index: int, errno: int) -> None:
    """Note an ICMP error for packets to an address: a hint, no proof."""
    table, name = load(port + layout.PORT_HASH), port + layout.PORT_NAME
    for i in range(load(port + layout.PORT_HASH_MASK) + 1):
        flow = load(table + 16 * i + 8)
        if flow != 0:
            for k in range(load(flow + layout.FLOW_NPATHS)):
                path = path_of(flow, k)
                if load(path + layout.PATH_SOCKET) == index and is_address(path, name):
                    store(path + layout.PATH_LAST_ERRNO, errno)
                    if errno == EMSGSIZE:
                        shrink(path, now_ns(port))
                    elif load(path + layout.PATH_STATE) == layout.OPEN:
                        store(path + layout.PATH_STATE, layout.SUSPECT)
                        note_change(flow, path, layout.OPEN)


@inline
def read_errors(port: int, index: int) -> None:
    """Read the error queue of a socket: each entry names where a packet was sent."""
    message, control = port + layout.PORT_MESSAGE, port + layout.PORT_CONTROL
    fd = load(port + layout.PORT_SOCKETS + index * layout.SOCKET_BYTES)
    count = 0
    while count < ERRORS_PER_CALL:
        prepare_receive(port, port + layout.PORT_NAME)
        if syscall(SYS_RECVMSG, fd, message, MSG_ERRQUEUE | MSG_DONTWAIT, 0, 0, 0) < 0:
            return
        at, stop = control, control + load(message + 40)
        while at + CMSG_HEADER <= stop and load(at) >= CMSG_HEADER:
            level, kind = load32(at + 8), load32(at + 12)
            if (level == SOL_IP and kind == IP_RECVERR) or (
                level == SOL_IPV6 and kind == IPV6_RECVERR
            ):
                on_unreachable(port, index, load32(at + CMSG_HEADER))
            at += (load(at) + 7) // 8 * 8
        count += 1


@inline
def prepare_receive(port: int, name: int) -> None:
    """Describe the receive buffers to the kernel; ``name``: for an address, or 0."""
    message, vector = port + layout.PORT_MESSAGE, port + layout.PORT_VECTOR
    store(vector, load(port + layout.PORT_BUFFER))
    store(vector + 8, layout.BUFFER_BYTES)
    store(message, name)
    store(message + 8, layout.NAME_BYTES)
    store(message + 16, vector)
    store(message + 24, 1)
    store(message + 32, port + layout.PORT_CONTROL)
    store(message + 40, layout.CONTROL_BYTES)


@inline
def receive_once(port: int, index: int) -> int:
    """Receive in one call and process what came; return its bytes."""
    message, buffer = port + layout.PORT_MESSAGE, load(port + layout.PORT_BUFFER)
    socket = port + layout.PORT_SOCKETS + index * layout.SOCKET_BYTES
    prepare_receive(port, 0)  # a packet names its connection and path
    store(port + layout.PORT_RECEIVES, load(port + layout.PORT_RECEIVES) + 1)
    got = syscall(SYS_RECVMSG, load(socket), message, MSG_DONTWAIT, 0, 0, 0)
    if got < 0:
        if last_errno() == EAGAIN:
            store(socket + layout.SOCKET_READABLE, 0)
        else:
            read_errors(port, index)
        return 0
    segment, marked, age = read_control(port, socket)
    now = now_ns(port) - age
    if segment <= 0:
        segment = max(got, 1)
    at = 0
    while at < got:
        size = min(segment, got - at)
        on_datagram(port, buffer + at, size, marked, now)
        at += size
    return max(got, 1)


@inline
def receive_sockets(port: int) -> bool:
    """Receive from all sockets; return True if anything came."""
    found = False
    for index in range(load(port + layout.PORT_NSOCKETS)):
        socket = port + layout.PORT_SOCKETS + index * layout.SOCKET_BYTES
        calls, nbytes = 0, 0
        while calls < RECEIVES_PER_ROUND and load(socket + layout.SOCKET_READABLE) != 0:
            nbytes += receive_once(port, index)
            calls += 1
            if nbytes > RECEIVED_PER_ROUND:
                calls = RECEIVES_PER_ROUND
        if nbytes != 0:
            found = True
    return found


@inline
def receive_queues(port: int) -> bool:
    """Receive from all queue pairs; return True if anything came."""
    table, found = load(port + layout.PORT_QUEUES), False
    if table == 0:
        return False
    for index in range(load(table + queue_layout.TABLE_COUNT)):
        device = device_at(table, index)
        polls = 0
        while polls < POLLS_PER_ROUND:
            count = poll_cq(device, load(device + queue_layout.DEVICE_RECV_CQ))
            polls = polls + 1 if count == queue_layout.MAX_WC else POLLS_PER_ROUND
            now = now_ns(port) if count > 0 else 0
            for i in range(count):
                found = True
                wc = device + queue_layout.DEVICE_WC + i * queue_layout.WC_BYTES
                packet = received_packet(wc)
                if packet != 0:
                    on_datagram(port, packet, received_bytes(wc), 0, now)
                    repost(wc)
    return found
