"""InfiniBand verbs by the ABI of libibverbs: no headers, no compiler, no bindings to install.

Set-up calls are exported functions of ``libibverbs.so.1``. Posting and polling are inline functions
of ``infiniband/verbs.h`` over the table of pointers in ``struct ibv_context``, whose layout has
been stable since version 1.1 of the library; compiled code reads the pointers at the offsets below
and calls them. Structures and offsets are those of rdma-core's ``libibverbs/verbs.h`` on 64-bit
systems; sizes are checked when this module is imported, pointers when a device is opened.

``VerbsLibrary`` is the set of functions that the transport uses. ``sim.verbs`` has another one with
the same names over a simulated wire.
"""

from __future__ import annotations

import ctypes as c
import functools
import os
from collections.abc import Callable
from typing import Any, Final

from miraccl.errors import MissingDependency, SystemFailure

U8, U16, U32, U64 = c.c_uint8, c.c_uint16, c.c_uint32, c.c_uint64
Int, Pointer = c.c_int, c.c_void_p

# Offsets in ``struct ibv_context``: the device, 32 operations, descriptors.
OP_POLL_CQ: Final = 96
OP_REQ_NOTIFY_CQ: Final = 104
OP_POST_SRQ_RECV: Final = 168
OP_POST_SEND: Final = 208
OP_POST_RECV: Final = 216
CONTEXT_ASYNC_FD: Final = 268
CONTEXT_BYTES: Final = 328
#: ``struct verbs_context`` lies before the context and grows towards lower addresses: the last word
#: of ``ibv_context`` says that it is there, its size stands right before the context.
CONTEXT_ABI: Final = 320
CONTEXT_SIZE: Final = -8
EXTENDED_ABI: Final = (1 << 64) - 1
OP_ALLOC_NULL_MR: Final = -304
#: Offsets in ``ibv_qp``, ``ibv_mr``, ``ibv_comp_channel``.
QP_NUMBER: Final = 52
MR_LKEY, MR_RKEY = 36, 40
CHANNEL_FD: Final = 8

ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_READ = 1, 2, 4
ACCESS_REMOTE_ATOMIC, ACCESS_ON_DEMAND, ACCESS_RELAXED_ORDERING = 8, 64, 1 << 20
QPT_RC, QPT_UC, QPT_UD = 2, 3, 4
QPS_RESET, QPS_INIT, QPS_RTR, QPS_RTS, QPS_ERR = 0, 1, 2, 3, 6
WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM = 0, 1, 2, 3
WR_RDMA_READ, WR_ATOMIC_FETCH_AND_ADD = 4, 6
SEND_FENCE, SEND_SIGNALED, SEND_SOLICITED, SEND_INLINE = 1, 2, 4, 8
WC_SUCCESS, WC_WR_FLUSH_ERR, WC_RETRY_EXC_ERR, WC_RNR_RETRY_EXC_ERR = 0, 5, 12, 13
WC_RECV: Final = 128
WC_RECV_RDMA_WITH_IMM: Final = 129
PORT_ACTIVE: Final = 4
LINK_INFINIBAND, LINK_ETHERNET = 1, 2
EVENT_DEVICE_FATAL, EVENT_PORT_ACTIVE, EVENT_PORT_ERR = 8, 9, 10

# Bits of the mask of ibv_modify_qp.
ATTR_STATE, ATTR_ACCESS, ATTR_PKEY, ATTR_PORT = 1, 1 << 3, 1 << 4, 1 << 5
ATTR_QKEY, ATTR_AV, ATTR_MTU, ATTR_TIMEOUT = 1 << 6, 1 << 7, 1 << 8, 1 << 9
ATTR_RETRY, ATTR_RNR_RETRY, ATTR_RQ_PSN, ATTR_RD_ATOMIC = 1 << 10, 1 << 11, 1 << 12, 1 << 13
ATTR_MIN_RNR, ATTR_SQ_PSN, ATTR_DEST_RD_ATOMIC, ATTR_DEST_QPN = 1 << 15, 1 << 16, 1 << 17, 1 << 20


def _structure(name: str, size: int, **fields: Any) -> Any:
    """Return a ctypes structure, after checking its size against that of the C one."""
    made: Any = type(name, (c.Structure,), {"_fields_": tuple(fields.items())})
    if c.sizeof(made) != size:
        raise ImportError(f"cannot use verbs: {name} has {c.sizeof(made)} bytes instead of {size}")
    return made


Sge = _structure("Sge", 16, addr=U64, length=U32, lkey=U32)
#: ``ibv_send_wr``; the union of RDMA, atomic and UD fields starts at ``remote_addr``.
SendWr = _structure(
    "SendWr",
    128,
    wr_id=U64,
    next=Pointer,
    sg_list=Pointer,
    num_sge=Int,
    opcode=Int,
    send_flags=U32,
    imm_data=U32,
    remote_addr=U64,
    rkey=U32,
    pad0=U32,
    pad1=U64 * 9,
)
RecvWr = _structure("RecvWr", 32, wr_id=U64, next=Pointer, sg_list=Pointer, num_sge=Int, pad=Int)
Wc = _structure(
    "Wc",
    48,
    wr_id=U64,
    status=Int,
    opcode=Int,
    vendor_err=U32,
    byte_len=U32,
    imm_data=U32,
    qp_num=U32,
    src_qp=U32,
    wc_flags=U32,
    pkey_index=U16,
    slid=U16,
    sl=U8,
    dlid_path_bits=U8,
)
QpCap = _structure("QpCap", 20, send_wr=U32, recv_wr=U32, send_sge=U32, recv_sge=U32, inline=U32)
QpInit = _structure(
    "QpInit",
    64,
    qp_context=Pointer,
    send_cq=Pointer,
    recv_cq=Pointer,
    srq=Pointer,
    cap=QpCap,
    qp_type=Int,
    sq_sig_all=Int,
)
Grh = _structure(
    "Grh",
    24,
    dgid=U64 * 2,
    flow_label=U32,
    sgid_index=U8,
    hop_limit=U8,
    traffic_class=U8,
)
Ah = _structure(
    "Ah",
    32,
    grh=Grh,
    dlid=U16,
    sl=U8,
    src_path_bits=U8,
    static_rate=U8,
    is_global=U8,
    port_num=U8,
)
QpAttr = _structure(
    "QpAttr",
    144,
    qp_state=Int,
    cur_qp_state=Int,
    path_mtu=Int,
    path_mig_state=Int,
    qkey=U32,
    rq_psn=U32,
    sq_psn=U32,
    dest_qp_num=U32,
    access=U32,
    cap=QpCap,
    ah=Ah,
    alt_ah=Ah,
    pkey_index=U16,
    alt_pkey_index=U16,
    sqd=U8,
    draining=U8,
    max_rd_atomic=U8,
    max_dest_rd_atomic=U8,
    min_rnr_timer=U8,
    port_num=U8,
    timeout=U8,
    retry_cnt=U8,
    rnr_retry=U8,
    alt_port_num=U8,
    alt_timeout=U8,
    rate_limit=U32,
)
#: The fields of ``ibv_port_attr`` that every version has.
PortAttr = _structure(
    "PortAttr",
    48,
    state=Int,
    max_mtu=Int,
    active_mtu=Int,
    gid_tbl_len=Int,
    port_cap_flags=U32,
    max_msg_sz=U32,
    bad_pkey_cntr=U32,
    qkey_viol_cntr=U32,
    pkey_tbl_len=U16,
    lid=U16,
    sm_lid=U16,
    lmc=U8,
    max_vl_num=U8,
    sm_sl=U8,
    subnet_timeout=U8,
    init_type_reply=U8,
    active_width=U8,
    active_speed=U8,
    phys_state=U8,
    link_layer=U8,
    flags=U8,
)
#: ``ibv_device_attr``; the words behind ``max_sge_rd`` are not used here.
DeviceAttr = _structure(
    "DeviceAttr",
    232,
    fw_ver=c.c_char * 64,
    node_guid=U64,
    sys_image_guid=U64,
    max_mr_size=U64,
    page_size_cap=U64,
    vendor_id=U32,
    vendor_part_id=U32,
    hw_ver=U32,
    max_qp=Int,
    max_qp_wr=Int,
    device_cap_flags=U32,
    max_sge=Int,
    max_sge_rd=Int,
    max_cq=Int,
    max_cqe=Int,
    max_mr=Int,
    max_pd=Int,
    rest=U32 * 22,
)
AsyncEvent = _structure("AsyncEvent", 16, element=U64, kind=Int, pad=Int)

#: Exported functions that the transport needs: name -> result, arguments.
FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "ibv_get_device_list": (Pointer, Pointer),
    "ibv_free_device_list": (None, Pointer),
    "ibv_get_device_name": (c.c_char_p, Pointer),
    "ibv_open_device": (Pointer, Pointer),
    "ibv_close_device": (Int, Pointer),
    "ibv_query_device": (Int, Pointer, Pointer),
    "ibv_query_port": (Int, Pointer, U8, Pointer),
    "ibv_query_gid": (Int, Pointer, U8, Int, Pointer),
    "ibv_alloc_pd": (Pointer, Pointer),
    "ibv_dealloc_pd": (Int, Pointer),
    "ibv_reg_mr": (Pointer, Pointer, Pointer, c.c_size_t, Int),
    "ibv_dereg_mr": (Int, Pointer),
    "ibv_create_comp_channel": (Pointer, Pointer),
    "ibv_destroy_comp_channel": (Int, Pointer),
    "ibv_create_cq": (Pointer, Pointer, Int, Pointer, Pointer, Int),
    "ibv_destroy_cq": (Int, Pointer),
    "ibv_get_cq_event": (Int, Pointer, Pointer, Pointer),
    "ibv_ack_cq_events": (None, Pointer, c.c_uint),
    "ibv_create_qp": (Pointer, Pointer, Pointer),
    "ibv_modify_qp": (Int, Pointer, Pointer, Int),
    "ibv_destroy_qp": (Int, Pointer),
    "ibv_create_ah": (Pointer, Pointer, Pointer),
    "ibv_destroy_ah": (Int, Pointer),
    "ibv_get_async_event": (Int, Pointer, Pointer),
    "ibv_ack_async_event": (None, Pointer),
}

#: Functions of newer versions: registration of dma-buf descriptors (34) with protection domain,
#: offset, length, address for the adapter, descriptor and access.
OPTIONAL_FUNCTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "ibv_reg_dmabuf_mr": (Pointer, Pointer, U64, c.c_size_t, U64, Int, Int),
}

INSTALL_HINT: Final = (
    "install libibverbs (Debian and Ubuntu: apt-get install libibverbs1 ibverbs-providers; "
    "Fedora and RHEL: dnf install libibverbs), or set MIRACCL_NET=tcp"
)


class VerbsLibrary:
    """Functions of libibverbs by name, and their addresses for compiled code.

    Args:
        functions: Callables by the names in ``FUNCTIONS``.
        check_operations: True to check that the operations of an opened device lie in a file of a
            provider.
    """

    def __init__(
        self, functions: dict[str, Callable[..., Any]], *, check_operations: bool = True
    ) -> None:
        self._functions = functions
        self._check_operations = check_operations

    def has(self, name: str) -> bool:
        """Return True if the library has an optional function."""
        return name in self._functions

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function that returns an int or nothing; return its result."""
        return self._functions[name](*arguments)

    def make(self, what: str, name: str, *arguments: Any) -> int:
        """Call a function that returns a pointer; return it as a number.

        Args:
            what: Object that is made, for the error: ``a completion queue``.

        Raises:
            SystemFailure: The function returned NULL.
        """
        c.set_errno(0)
        address = self._functions[name](*arguments)
        if not address:
            code = c.get_errno()
            raise SystemFailure(
                f"cannot make {what}: {name}: {os.strerror(code) if code else 'failed'}",
                hint=_advice(name, code),
            )
        return int(address)

    def do(self, what: str, name: str, *arguments: Any) -> None:
        """Call a function that returns 0 or an errno.

        Raises:
            SystemFailure: It failed.
        """
        code = self._functions[name](*arguments)
        if code:
            code = c.get_errno() if code == -1 else abs(code)
            raise SystemFailure(
                f"cannot {what}: {name}: {os.strerror(code)}", hint=_advice(name, code)
            )

    def address(self, name: str) -> int:
        """Return the address of a function, for compiled code."""
        return c.cast(self._functions[name], c.c_void_p).value or 0  # type: ignore[arg-type]

    def operations(self, context: int) -> dict[int, int]:
        """Return the operations of an opened device: offset in the context -> address.

        Raises:
            SystemFailure: The table is not where this module expects it.
        """
        offsets = (OP_POLL_CQ, OP_REQ_NOTIFY_CQ, OP_POST_SRQ_RECV, OP_POST_SEND, OP_POST_RECV)
        found = {offset: c.c_uint64.from_address(context + offset).value for offset in offsets}
        if self._check_operations:
            for offset, address in found.items():
                file = _file_of(address)
                if "rdmav" not in file and "libibverbs" not in file:
                    raise SystemFailure(
                        f"cannot use verbs: the operation at byte {offset} of ibv_context is in "
                        f"{file or 'no file'}, not in a provider of libibverbs",
                        hint="this version of libibverbs has another ABI; set MIRACCL_NET=tcp",
                    )
        return found

    def null_mr_function(self, context: int) -> int:
        """Return the address of ``ibv_alloc_null_mr`` of an opened device, 0 if it has none.

        It is inline in verbs.h, and reads the table as ``verbs_get_ctx_op`` does.
        """

        def word(offset: int) -> int:
            return int(c.c_uint64.from_address(context + offset).value)

        if word(CONTEXT_ABI) != EXTENDED_ABI:
            return 0
        if word(CONTEXT_SIZE) < CONTEXT_BYTES - OP_ALLOC_NULL_MR:
            return 0
        address = word(OP_ALLOC_NULL_MR)
        if self._check_operations:
            file = _file_of(address)
            if "rdmav" not in file and "libibverbs" not in file:
                return 0
        return address


def _advice(name: str, code: int) -> str | None:
    """Return what a user can do about a failed call."""
    if name == "ibv_reg_mr" and code in (12, 11):
        return "raise the limit of locked memory (ulimit -l unlimited; in containers: memlock)"
    if name == "ibv_open_device":
        return "the device files in /dev/infiniband must be readable and writable"
    if name == "ibv_modify_qp" and code in (22, 110, 113):
        return "the peer's GID is not reachable from this port: check addresses, routes and VLANs"
    return None


class _DlInfo(c.Structure):
    _fields_ = (
        ("fname", c.c_char_p),
        ("fbase", Pointer),
        ("sname", c.c_char_p),
        ("saddr", Pointer),
    )


def _file_of(address: int) -> str:
    """Return the file that contains the code at an address, "" if there is none."""
    info = _DlInfo()
    dladdr = c.CDLL(None).dladdr
    dladdr.argtypes = [Pointer, Pointer]
    if not address or not dladdr(address, c.byref(info)) or not info.fname:
        return ""
    return os.fsdecode(info.fname)


@functools.cache
def load_library() -> VerbsLibrary:
    """Return the system's libibverbs.

    Raises:
        MissingDependency: It is not installed, or lacks a function.
    """
    try:
        library = c.CDLL("libibverbs.so.1", use_errno=True)
    except OSError:
        raise MissingDependency(
            "cannot use verbs: libibverbs.so.1 is not installed", hint=INSTALL_HINT
        ) from None
    functions: dict[str, Callable[..., Any]] = {}
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(library, name, None)
        if function is None:
            raise MissingDependency(
                f"cannot use verbs: libibverbs.so.1 lacks the function {name}", hint=INSTALL_HINT
            )
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    for name, (result, *arguments) in OPTIONAL_FUNCTIONS.items():
        if hasattr(library, name):
            function = functions[name] = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return VerbsLibrary(functions)


def has_data_direct(context: int, name: str) -> bool:
    """Return True if an opened device of mlx5 writes to GPU memory by a data-direct function.

    ``mlx5dv_get_data_direct_sysfs_path`` is of rdma-core 54 (NCCL ``ibvwrap.cc``).
    """
    if not name.startswith("mlx5"):
        return False
    try:
        function = c.CDLL("libmlx5.so.1").mlx5dv_get_data_direct_sysfs_path
    except (OSError, AttributeError):
        return False
    function.restype, function.argtypes = Int, (Pointer, Pointer, c.c_size_t)
    return bool(function(context, c.create_string_buffer(4096), 4096) == 0)


def word32(address: int) -> int:
    """Return the unsigned 32-bit word at an address."""
    return c.c_uint32.from_address(address).value
