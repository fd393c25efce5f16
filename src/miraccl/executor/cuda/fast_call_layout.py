"""Records shared by fast calls and Python.

Offsets are in bytes, except those of a launch record, which count int64 words.
"""

from __future__ import annotations


class RecordLayout:
    """Assigns consecutive offsets to the words of a record."""

    def __init__(self) -> None:
        self.end = 0

    def word(self, count: int = 1) -> int:
        """Return the offset of the next ``count`` words."""
        offset, self.end = self.end, self.end + 8 * count
        return offset


# Launch record (int64 words): address of cuLaunchKernelEx, address of the kernel's argument, then
# the arguments of cuLaunchKernelEx: configuration (CUlaunchConfig), function, parameters.
RECORD_WORDS = 5
RECORD_FUNCTION, RECORD_ARGUMENT, RECORD_CONFIG, RECORD_KERNEL, RECORD_PARAMETERS = range(
    RECORD_WORDS
)
CONFIG_STREAM = 32  # offset of the stream in the configuration
#: Offsets of words: number of blocks in the lower half, number of threads in the upper half.
CONFIG_BLOCKS, CONFIG_THREADS = 0, 8

# Results of a fast call: the call is done, or collected for the end of the group; or Python must
# handle it, and nothing has happened.
DONE, NOT_HANDLED = 0, 1

# ---- groups of all communicators. THREAD owns a group that only fast calls have seen; all others
# are counted in OPEN only.

_groups = RecordLayout()
GROUPS_OPEN = _groups.word()  # number of open groups of all threads, in the lower half
GROUPS_THREAD = _groups.word()  # id of the owning thread; 0: none
GROUPS_DEPTH = _groups.word()  # open blocks of that group
GROUPS_STATE = _groups.word()  # communicator that collects calls; 0: none yet
GROUPS_BATCHES = _groups.word()  # a list, which then contains the communicator's HAND_OVER
GROUPS_BEGIN, GROUPS_END = _groups.word(), _groups.word()  # Python fallbacks of begin and end
GROUPS_NONE = _groups.word()  # the object None
GROUPS_WORDS = _groups.end // 8

# ---- record of a fast call

#: FALLBACK: C function and object of the builtin for calls that are not handled; 0: none.
FAST_STATE, FAST_FALLBACK, FAST_FALLBACK_SELF = 0, 8, 16
FAST_COLLECTS = 24  # 1: collect calls while a group is open
# Collective: number of blocks of ``x`` and ``out``; kind of the third argument; 1 if it works in
# place without ``out``.
FAST_COLLECTIVE, FAST_IN_BLOCKS, FAST_OUT_BLOCKS, FAST_THIRD, FAST_IN_PLACE = 32, 40, 48, 56, 64
#: Third argument; BOTH: the operator, and the root as the sixth.
THIRD_NOTHING, THIRD_OPERATOR, THIRD_ROOT, THIRD_BOTH = 0, 1, 2, 3
# Send or receive.
FAST_RECEIVES = 32
# Message collective: array that only the root passes; 1 if ``x``, ``out`` have a block per rank; 1
# if these are equal; the collective.
FAST_ROOTED, FAST_SPLITS_IN, FAST_SPLITS_OUT, FAST_EVEN, FAST_OP = 32, 40, 48, 56, 64
NOT_ROOTED, ROOTED_OUT, ROOTED_IN = 0, 1, 2
# reduce_scatter_v: the collective for equal counts, and the one for each rank otherwise.
FAST_EQUAL_OP, FAST_PER_RANK_OP = 32, 40
FAST_WORDS = 9

# ---- records in the state of a communicator

NOPS = 5  # numbered operators
NDTYPES = 12  # known DLDataTypes
MAX_RANKS = 8
MAX_FOREIGN_TYPES = 8  # array types read by a protocol
MAX_RETAINED, MAX_RETAINED_BYTES = 16, 1 << 20  # capsules, and the memory they keep alive
NAMES = ("_c_contiguous", "size", "dtype", "data", "ptr", "device_id")
KEYS = ("shape", "typestr", "data", "strides", "stream", "mask")

# View: a DLTensor; its capsule, owned by the view during a call, else 0; 1 if it is read-only; its
# bytes if it has a capsule.
VIEW_OWNER, VIEW_READ_ONLY, VIEW_NBYTES, VIEW_BYTES = 48, 56, 64, 72

# Array type read by a protocol: the type; 1 for DLPack; 1 if arrays are immutable; function that
# creates the capsule of arrays with the sharding type, 0: use the method; keyword names.
FOREIGN_TYPE, FOREIGN_DLPACK, FOREIGN_IMMUTABLE, FOREIGN_EXPORT = 0, 8, 16, 24
FOREIGN_KEYWORDS, FOREIGN_SHARDING, FOREIGN_BYTES = 32, 40, 48

# Message of a call: ``message_kind``, elements, address. Of a cached launch: the location of the
# address in the argument instead.
MESSAGE_KIND, MESSAGE_COUNT, MESSAGE_ADDRESS = 0, 8, 16
MESSAGE_BYTES = 24
MAX_MESSAGES = 64  # of a launch

# Entry of the launch table. MESSAGES: address of the launch's messages, else 0; COUNT is then their
# number and SIGNATURE that of the message collective, 0 for plain messages.
LAUNCH_KEY, LAUNCH_COUNT, LAUNCH_RECORD, LAUNCH_SATURATES = 0, 8, 16, 24
LAUNCH_MESSAGES, LAUNCH_SIGNATURE = 32, 40
LAUNCH_BYTES = 48
TABLE_ENTRIES = 1024  # a power of two
PROBES = 8  # entries in which a launch may be

# ---- state of a communicator

_state = RecordLayout()
STATE_ABORT = _state.word()  # address of a 32-bit word; not 0: there is an error
STATE_TYPE = _state.word()  # PyTorch's tensor type; 0 if tensors cannot be read
# Functions of that type: dltensor_from_py_object_no_sync; current_work_stream, 0: QUERY_STREAM.
STATE_VIEW, STATE_CURRENT = _state.word(), _state.word()
STATE_DEVICE = _state.word()  # DLDevice of this GPU
STATE_STREAM = _state.word()  # stream of the last operation
#: Not 0: there may have been operations outside of the default stream, which is never captured.
STATE_OTHER_STREAMS = _state.word()
STATE_CAPTURED = _state.word()  # not 0: the stream was captured when Python last used it
#: Address of a word that equals OWN if no other communicator used the whole GPU last.
STATE_ORDER, STATE_OWN = _state.word(), _state.word()
STATE_LAST_RECORD = _state.word()  # record of the last operation if it was a fast call, else 0
STATE_NONE, STATE_FALSE = _state.word(), _state.word()  # the objects None and False
STATE_INT_TYPE = _state.word()  # the type int
STATE_RANK, STATE_NRANKS = _state.word(), _state.word()
STATE_GROUPS = _state.word()  # address of the words of groups
STATE_CPU_PLAN = _state.word()  # address of a word that each operation resets to 0
STATE_CLOSED = _state.word()  # word that ABORT points to after the close
#: Number of collected messages, and their stream.
STATE_COLLECTED, STATE_COLLECTED_STREAM = _state.word(), _state.word()
STATE_COLLECTED_ARRAYS = _state.word()  # list of their arrays
STATE_COLLECTED_SIGNATURE = _state.word()  # of the message collective, 0 for plain messages
STATE_HAND_OVER = _state.word()  # object that GROUPS_BATCHES contains while messages are collected
#: Python function that returns the current stream, 0: not needed; and its argument.
STATE_QUERY_STREAM, STATE_ORDINAL = _state.word(), _state.word()
STATE_QUERY_CUPY_STREAM = _state.word()  # the same for CuPy's stream
STATE_OPS = _state.word(NOPS)  # operator objects, by number
STATE_ARRAY_TYPE = _state.word()  # CuPy's array type; 0 if arrays cannot be read
STATE_LIST_TYPE, STATE_TUPLE_TYPE = _state.word(), _state.word()  # the types list and tuple
STATE_RAISE = _state.word()  # Python function that raises the error of a CUDA code
STATE_VIEWS = _state.word(2 * VIEW_BYTES // 8)  # two views: the arrays of a call
STATE_DTYPES = _state.word(NDTYPES)  # known DLDataTypes
STATE_ARRAY_DTYPES = _state.word(2 * NDTYPES)  # NumPy dtype objects, each with its DLDataType
#: Strings: attributes of CuPy's arrays and, from PTR on, of their memory.
STATE_NAMES = _state.word(len(NAMES))
NAME_CONTIGUOUS, NAME_SIZE, NAME_DTYPE, NAME_DATA, NAME_PTR, NAME_DEVICE = (
    STATE_NAMES + 8 * number for number in range(len(NAMES))
)

# Arrays of other types, read by their protocols, which may run arbitrary code.
STATE_BUSY = _state.word()  # not 0 while a protocol runs: fast calls handle nothing
STATE_RESULT = _state.word()  # output of driver functions
STATE_ARGS = _state.word(3)  # arguments of a Python call: an array, a stream, DLPack's version
STATE_DLPACK = _state.word()  # the string "__dlpack__"
STATE_INTERFACE = _state.word()  # the string "__cuda_array_interface__"
STATE_SHARDING = _state.word()  # the string "sharding"
STATE_KEYS = _state.word(len(KEYS))  # strings: keys of the interface
KEY_SHAPE, KEY_TYPESTR, KEY_DATA, KEY_STRIDES, KEY_STREAM, KEY_MASK = (
    STATE_KEYS + 8 * number for number in range(len(KEYS))
)
STATE_TYPESTRS = _state.word()  # dictionary: the interface's typestr -> DLDataType
STATE_DICT_TYPE, STATE_STR_TYPE = _state.word(), _state.word()  # the types dict and str
STATE_TRUE = _state.word()  # the object True
STATE_EXCEPTION = _state.word()  # the type Exception
STATE_POINTER_ATTRIBUTE = _state.word()  # address of cuPointerGetAttribute; 0: none
STATE_IS_CAPTURING = _state.word()  # address of cuStreamIsCapturing; 0: none
#: Addresses of the names of DLPack's capsules.
STATE_CAPSULE_NAME, STATE_VERSIONED_NAME = _state.word(), _state.word()
STATE_RETAINED = _state.word()  # list of capsules whose memory launches may still access
#: Bytes that they keep alive, and the stream of these launches.
STATE_RETAINED_BYTES, STATE_RETAINED_STREAM = _state.word(), _state.word()
STATE_RELEASE = _state.word()  # Python function that has them released after these launches
STATE_VIEW_FOREIGN = _state.word()  # address of ``foreign.view_foreign``
#: List of capsules of collected messages, and the bytes that they keep alive.
STATE_COLLECTED_OWNERS, STATE_COLLECTED_BYTES = _state.word(), _state.word()
#: Records of array types, terminated by a 0.
STATE_FOREIGN_TYPES = _state.word((MAX_FOREIGN_TYPES + 1) * FOREIGN_BYTES // 8)

STATE_SHARES = _state.word(2 * MAX_RANKS)  # elements per rank of ``x``, then of ``out``
STATE_RECORDS = _state.word(MAX_RANKS)  # launch records of a call of several launches
STATE_CODE = _state.word()  # error code of one of these, as an object
STATE_EVENT = _state.word()  # event that orders streams; 0: Python orders them
#: Addresses of cuEventRecord and cuStreamWaitEvent.
STATE_EVENT_RECORD, STATE_STREAM_WAIT = _state.word(), _state.word()
#: Address of cuCtxGetCurrent, 0: do not check; and the expected context.
STATE_GET_CONTEXT, STATE_CONTEXT = _state.word(), _state.word()
STATE_CALL_MESSAGES = _state.word(2 * MAX_RANKS * MESSAGE_BYTES // 8)  # messages of a call
STATE_COLLECTED_MESSAGES = _state.word(MAX_MESSAGES * MESSAGE_BYTES // 8)
STATE_TABLE = _state.word(TABLE_ENTRIES * LAUNCH_BYTES // 8)  # the launch table
STATE_BYTES = _state.end
POINTER_DEVICE_ORDINAL = 9  # cuda.h CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
STREAM_LEGACY = 1  # the legacy default stream, in DLPack and the interface
#: The per-thread default stream; handles up to here name a stream of the current context.
STREAM_PER_THREAD = 2

# ---- records elsewhere

# Template: a launch for messages of given kinds, into whose argument sizes are written. The fields
# of ``WarpQueueRules``, and the location of the signature of a message collective (0: plain
# messages). An entry per message follows: kind; its record in the argument (address, then bytes and
# type); the type there; its queue; the message that it pairs with (a rank's message to itself), or
# -1. Then an entry per peer queue: its record, whose first word holds kind and peer, warp queues
# << 16, first warp << 32; that word without warp queues; its warp queues in the current call.
TEMPLATE_QUEUES, TEMPLATE_GROUP_VECTORS, TEMPLATE_FIRST_VECTORS = 0, 8, 16
TEMPLATE_WARP_QUEUES, TEMPLATE_COPY_WARP_QUEUES, TEMPLATE_BLOCKS = 24, 32, 40
TEMPLATE_BULK_MIN_BYTES, TEMPLATE_SIGNATURE, TEMPLATE_BYTES = 48, 56, 64
TEMPLATE_MESSAGE_KIND, TEMPLATE_MESSAGE_RECORD, TEMPLATE_MESSAGE_TYPE = 0, 8, 16
TEMPLATE_MESSAGE_QUEUE, TEMPLATE_MESSAGE_PARTNER, TEMPLATE_MESSAGE_BYTES = 24, 32, 40
QUEUE_RECORD, QUEUE_HEAD, QUEUE_WARP_QUEUES = range(0, 24, 8)
QUEUE_BYTES = 24

# struct DLTensor of dlpack.h, DLPack 1.3; DLDevice is type and number, 32 bits each.
DL_DATA, DL_DEVICE, DL_NDIM, DL_DTYPE, DL_SHAPE, DL_STRIDES, DL_OFFSET, DL_BYTES = (
    0,
    8,
    16,
    20,
    24,
    32,
    40,
    48,
)
DL_CUDA = 2
# struct DLManagedTensorVersioned: a DLPackVersion, two pointers, flags, the DLTensor
VERSIONED_FLAGS, VERSIONED_TENSOR = 24, 32
DL_READ_ONLY = 1
# struct DLPackExchangeAPI: a DLPackVersion and a pointer, then five functions
API_MAJOR, API_VIEW, API_CURRENT = 0, 40, 48
DL_MAJOR = 1

OB_TYPE = 8  # PyObject.ob_type


def launch_key(collective: int, third: int, dtype: int) -> int:
    """Return the table key of a collective.

    ``third``: operator number, root, or ``pack_op_root``; below 256. ``dtype``: DLDataType as code,
    bits << 8, lanes << 16.
    """
    return collective << 40 | third << 32 | dtype


def pack_op_root(op: int, root: int) -> int:
    """Return an operator and a root as one number."""
    return root * NOPS + op


def message_kind(receives: int, peer: int, dtype: int) -> int:
    """Return a message's direction, peer and type as one number; ``receives`` is 0 or 1."""
    return dtype << 32 | peer << 1 | receives


MESSAGES_KEY = 1 << 62  # ored with a hash; above all keys of collectives
TEMPLATE_KEY = 3 << 61  # ored with a hash of the message kinds


def table_index(hashed: int, probe: int) -> int:
    """Return the index of the ``probe``-th table entry for a hash of key and count."""
    return hashed + probe & TABLE_ENTRIES - 1
