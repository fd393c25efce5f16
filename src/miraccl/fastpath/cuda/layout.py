"""Records shared by fast calls and Python.

Offsets are in bytes, except those of a launch record, which are in words; all words are int64.
"""

from __future__ import annotations


class RecordLayout:
    """Assigns consecutive offsets to the words of a record."""

    def __init__(self) -> None:
        self.end = 0

    def word(self, count: int = 1) -> int:
        """Return the offset of the next ``count`` words."""
        place, self.end = self.end, self.end + 8 * count
        return place


# a launch's block, in words: address of cuLaunchKernelEx, address of the kernel's argument, then what cuLaunchKernelEx takes:
# configuration (CUlaunchConfig), function, parameters
RECORD_WORDS = 5
RECORD_FUNCTION, RECORD_ARGUMENT, RECORD_CONFIG, RECORD_KERNEL, RECORD_PARAMETERS = range(
    RECORD_WORDS
)
CONFIG_STREAM = 32  # from the beginning of the configuration to the stream
CONFIG_BLOCKS, CONFIG_THREADS = (
    0,
    8,
)  # to words whose lower half is the number of blocks, whose upper half that of threads

# what a door says: it has done the call, or noted it for the end of the group; Python is to do it, nothing has happened
DONE, NOT_HANDLED = 0, 1

# ---- groups, of all communicators. A group that only doors have seen is that of THREAD; all others are in OPEN only.

_groups = RecordLayout()
GROUPS_OPEN = _groups.word()  # how many groups threads have open; the lower half is looked at
GROUPS_THREAD = _groups.word()  # number of the thread; 0: there is no such group
GROUPS_DEPTH = _groups.word()  # how many blocks it has open
GROUPS_STATE = (
    _groups.word()
)  # of the communicator by whose doors calls are noted, 0 while there are none
GROUPS_BATCHES = _groups.word()  # a list, of its HAND_OVER then
GROUPS_BEGIN, GROUPS_END = (
    _groups.word(),
    _groups.word(),
)  # objects that begin and end what is not taken here
GROUPS_NONE = _groups.word()  # the object None
GROUPS_WORDS = _groups.end // 8

# ---- a door

# NEXT and its SELF are C function and object of the builtin that calls go to which this door does not take, 0 for none
FAST_STATE, FAST_FALLBACK, FAST_FALLBACK_SELF = 0, 8, 16
FAST_COLLECTS = 24  # whether it notes calls while a group is open
# the door of a collective. Blocks are those that ``x`` and ``out`` have; without ``out`` some work in place.
FAST_COLLECTIVE, FAST_IN_BLOCKS, FAST_OUT_BLOCKS, FAST_THIRD, FAST_IN_PLACE = 32, 40, 48, 56, 64
THIRD_NOTHING, THIRD_OPERATOR, THIRD_ROOT, THIRD_BOTH = (
    0,
    1,
    2,
    3,
)  # what the third argument is; BOTH: the operator, the sixth the root
# the door of a send or a receive
FAST_RECEIVES = 32
# the door of a collective that is a list of messages: whether only the root takes ``out`` or gives ``x``; whether ``x`` and ``out`` have a
# block for each rank, and whether these are alike; the collective
FAST_ROOTED, FAST_SPLITS_IN, FAST_SPLITS_OUT, FAST_EVEN, FAST_OP = 32, 40, 48, 56, 64
NOT_ROOTED, ROOTED_OUT, ROOTED_IN = 0, 1, 2
# the door of reduce_scatter_v: the collective that it is with equal counts, and the one that each part is with others
FAST_EQUAL_OP, FAST_PER_RANK_OP = 32, 40
FAST_WORDS = 9

# ---- records in the state of a communicator

NOPS = 5  # operators that have a number
NDTYPES = 12  # DLDataTypes that are known
MAX_RANKS = 8
MAX_FOREIGN_TYPES = 8  # types of arrays that are asked by their protocols
MAX_RETAINED, MAX_RETAINED_BYTES = (
    16,
    1 << 20,
)  # capsules that are held, and what they may keep alive
NAMES = ("_c_contiguous", "size", "dtype", "data", "ptr", "device_id")
KEYS = ("shape", "typestr", "data", "strides", "stream", "mask")

# a view: a DLTensor; the capsule that it is from, which the view owns while a door looks at a call, else 0; whether it must not be written;
# its bytes, where there is a capsule
VIEW_OWNER, VIEW_READ_ONLY, VIEW_NBYTES, VIEW_BYTES = 48, 56, 64, 72

# a type of arrays that is asked by a protocol: whether by DLPack; whether such arrays never change; a function that gives the capsule of
# those whose sharding has that type, 0: the method gives it; names of the keyword arguments
(
    FOREIGN_TYPE,
    FOREIGN_DLPACK,
    FOREIGN_IMMUTABLE,
    FOREIGN_EXPORT,
    FOREIGN_KEYWORDS,
    FOREIGN_SHARDING,
    FOREIGN_BYTES,
) = (
    0,
    8,
    16,
    24,
    32,
    40,
    48,
)

# a message of a call: what (``message_kind``), elements, address; of a remembered launch: the same with the address's place in the argument
MESSAGE_KIND, MESSAGE_COUNT, MESSAGE_ADDRESS = 0, 8, 16
MESSAGE_BYTES = 24
MAX_MESSAGES = 64  # of a launch

# a row of the table of launches; MESSAGES is the address of those of a launch that has some, else 0. Their number is COUNT then, and
# SIGNATURE that of the collective that they are, 0 for plain ones.
LAUNCH_KEY, LAUNCH_COUNT, LAUNCH_RECORD, LAUNCH_SATURATES, LAUNCH_MESSAGES, LAUNCH_SIGNATURE = (
    0,
    8,
    16,
    24,
    32,
    40,
)
LAUNCH_BYTES = 48
TABLE_ENTRIES = 1024  # a power of two
PROBES = 8  # rows in which a launch may stand

# ---- the state of a communicator

_state = RecordLayout()
STATE_ABORT = _state.word()  # address of a 32-bit word that is not 0 when something is wrong
STATE_TYPE = _state.word()  # PyTorch's type of tensors, 0 where there is none that can be looked at
# functions of that type: dltensor_from_py_object_no_sync, current_work_stream; 0: ASK is asked
STATE_VIEW, STATE_CURRENT = _state.word(), _state.word()
STATE_DEVICE = _state.word()  # DLDevice of this GPU
STATE_STREAM = _state.word()  # of the last operation
STATE_OTHER_STREAMS = (
    _state.word()
)  # not 0: operations may have been in other streams than the default one, which is never captured
STATE_CAPTURED = _state.word()  # not 0: Python has found that this stream was captured then
# address of a word that has the second value if no other communicator filled the GPU last
STATE_ORDER, STATE_OWN = _state.word(), _state.word()
STATE_LAST_RECORD = _state.word()  # block of the last operation if it went through a door, else 0
STATE_NONE, STATE_FALSE = _state.word(), _state.word()  # the objects None and False
STATE_INT_TYPE = _state.word()  # the type int
STATE_RANK, STATE_NRANKS = _state.word(), _state.word()
STATE_GROUPS = _state.word()  # address of the words of groups
STATE_CPU_PLAN = _state.word()  # address of a word that becomes 0 with each operation
STATE_CLOSED = _state.word()  # the word that ABORT points to in the end
STATE_COLLECTED, STATE_COLLECTED_STREAM = (
    _state.word(),
    _state.word(),
)  # how many messages of a group are noted, and for which stream
STATE_COLLECTED_ARRAYS = _state.word()  # a list of their arrays
STATE_COLLECTED_SIGNATURE = _state.word()  # of the collective that they are, 0 for plain ones
STATE_HAND_OVER = _state.word()  # an object, which GROUPS_BATCHES is to have while any are noted
# a Python function for the current stream, 0 where none is needed yet, and its argument
STATE_QUERY_STREAM, STATE_ORDINAL = _state.word(), _state.word()
STATE_QUERY_CUPY_STREAM = _state.word()  # likewise for that of CuPy's arrays
STATE_OPS = _state.word(NOPS)  # the objects that are operators, by number
STATE_ARRAY_TYPE = _state.word()  # CuPy's type of arrays, as TYPE
STATE_LIST_TYPE, STATE_TUPLE_TYPE = _state.word(), _state.word()  # the types list and tuple
STATE_RAISE = _state.word()  # a Python function, which raises what a code of CUDA says
STATE_VIEWS = _state.word(2 * VIEW_BYTES // 8)  # of the arrays of a call: two views
STATE_DTYPES = _state.word(NDTYPES)  # the DLDataTypes that are known
STATE_ARRAY_DTYPES = _state.word(
    2 * NDTYPES
)  # objects that are NumPy's dtypes, each with its DLDataType
STATE_NAMES = _state.word(
    len(NAMES)
)  # strings: attributes of CuPy's arrays and, from PTR on, of their memory
NAME_CONTIGUOUS, NAME_SIZE, NAME_DTYPE, NAME_DATA, NAME_PTR, NAME_DEVICE = (
    STATE_NAMES + 8 * number for number in range(len(NAMES))
)

# arrays of other types, which are asked by their protocols: that runs code of anybody's
STATE_BUSY = _state.word()  # not 0 meanwhile, and no door takes calls
STATE_RESULT = _state.word()  # where functions of the driver write
STATE_ARGS = _state.word(3)  # of a call of Python's: an array, a stream, DLPack's version
STATE_DLPACK = _state.word()  # the string "__dlpack__"
STATE_INTERFACE = _state.word()  # the string "__cuda_array_interface__"
STATE_SHARDING = _state.word()  # the string "sharding"
STATE_KEYS = _state.word(len(KEYS))  # strings: keys of the dictionary that the interface is
KEY_SHAPE, KEY_TYPESTR, KEY_DATA, KEY_STRIDES, KEY_STREAM, KEY_MASK = (
    STATE_KEYS + 8 * number for number in range(len(KEYS))
)
STATE_TYPESTRS = _state.word()  # a dictionary: DLDataTypes by what the interface says
STATE_DICT_TYPE, STATE_STR_TYPE = _state.word(), _state.word()  # the types dict and str
STATE_TRUE = _state.word()  # the object True
STATE_EXCEPTION = _state.word()  # the type Exception
STATE_POINTER_ATTRIBUTE = _state.word()  # address of cuPointerGetAttribute, 0 where there is none
STATE_IS_CAPTURING = _state.word()  # address of cuStreamIsCapturing, likewise
STATE_CAPSULE_NAME, STATE_VERSIONED_NAME = (
    _state.word(),
    _state.word(),
)  # addresses of the names of DLPack's capsules
STATE_RETAINED = _state.word()  # a list of capsules of which launches read, and perhaps still do
STATE_RETAINED_BYTES, STATE_RETAINED_STREAM = (
    _state.word(),
    _state.word(),
)  # what they keep alive, and where these launches are
STATE_RELEASE = _state.word()  # a Python function, which hands them to who lets go of them in time
STATE_VIEW_FOREIGN = _state.word()  # address of the function that looks at arrays of these types
STATE_COLLECTED_OWNERS, STATE_COLLECTED_BYTES = (
    _state.word(),
    _state.word(),
)  # a list of capsules of messages that are noted; as HELD
STATE_FOREIGN_TYPES = _state.word(
    (MAX_FOREIGN_TYPES + 1) * FOREIGN_BYTES // 8
)  # the types themselves, up to the first 0

STATE_SHARES = _state.word(
    2 * MAX_RANKS
)  # elements of the blocks of ``x`` of a call, then those of ``out``
STATE_RECORDS = _state.word(MAX_RANKS)  # of a call of several launches
STATE_CODE = _state.word()  # what one of these failed with, as an object
STATE_EVENT = (
    _state.word()
)  # by which one stream waits for another; 0: changes of streams are Python's
STATE_EVENT_RECORD, STATE_STREAM_WAIT = (
    _state.word(),
    _state.word(),
)  # addresses of cuEventRecord and cuStreamWaitEvent
STATE_GET_CONTEXT, STATE_CONTEXT = (
    _state.word(),
    _state.word(),
)  # address of cuCtxGetCurrent, 0: not asked; what it is to say
STATE_CALL_MESSAGES = _state.word(2 * MAX_RANKS * MESSAGE_BYTES // 8)  # the messages of a call
STATE_COLLECTED_MESSAGES = _state.word(MAX_MESSAGES * MESSAGE_BYTES // 8)  # those that are noted
STATE_TABLE = _state.word(TABLE_ENTRIES * LAUNCH_BYTES // 8)  # of launches
STATE_BYTES = _state.end
POINTER_DEVICE_ORDINAL = 9  # cuda.h CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
STREAM_LEGACY = 1  # the legacy default stream, in DLPack and the interface
STREAM_PER_THREAD = 2  # the default stream of a thread; up to here numbers stand for a stream of the current context

# ---- records elsewhere

# a shape, which is what messages are but for their sizes, of a launch into whose argument sizes are written: ``WarpQueueRules`` in words, and
# where the signature of the collective that they are is written (0: they are plain ones); then a row for each message: what, its record in
# the argument (address, then bytes and type), the type there, the number of its queue, that of the other half of a message of this rank to
# itself (-1: to or from a peer); then a row for each queue: its record, whose first word has kind and peer, lanes << 16, first lane << 32;
# that word without lanes; its lanes in the call under way
(
    TEMPLATE_QUEUES,
    TEMPLATE_GROUP_VECTORS,
    TEMPLATE_FIRST_VECTORS,
    TEMPLATE_WARP_QUEUES,
    TEMPLATE_COPY_WARP_QUEUES,
    TEMPLATE_BLOCKS,
    TEMPLATE_BULK_MIN_BYTES,
    TEMPLATE_SIGNATURE,
) = range(0, 64, 8)
TEMPLATE_BYTES = 64
(
    TEMPLATE_MESSAGE_KIND,
    TEMPLATE_MESSAGE_RECORD,
    TEMPLATE_MESSAGE_TYPE,
    TEMPLATE_MESSAGE_QUEUE,
    TEMPLATE_MESSAGE_PARTNER,
) = range(0, 40, 8)
TEMPLATE_MESSAGE_BYTES = 40
QUEUE_RECORD, QUEUE_HEAD, QUEUE_WARP_QUEUES = range(0, 24, 8)
QUEUE_BYTES = 24

# struct DLTensor of dlpack.h, DLPack 1.3; DLDevice is type and number, 32 bits each
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


MESSAGES_KEY = 1 << 62  # with their hash; no collective has a key like it
TEMPLATE_KEY = 3 << 61  # with the hash of what they are


def table_index(hashed: int, probe: int) -> int:
    """Return the index of the ``probe``-th table entry for a hash of key and count."""
    return hashed + probe & TABLE_ENTRIES - 1
