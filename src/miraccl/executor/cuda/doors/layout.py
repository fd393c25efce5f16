"""The words that doors and Python share. All offsets are in bytes but those of a launch's block; all words are int64."""

from __future__ import annotations

# a launch's block, in words: address of cuLaunchKernelEx, address of the kernel's argument, then what cuLaunchKernelEx takes:
# configuration (CUlaunchConfig), function, parameters
BLOCK_WORDS = 5
FUNCTION, ARGUMENT, CONFIG, KERNEL, PARAMETERS = range(BLOCK_WORDS)
CONFIG_STREAM = 32  # from the beginning of the configuration to the stream
CONFIG_BLOCKS, CONFIG_THREADS = 0, 8  # to words whose lower half is the number of blocks, whose upper half that of threads

# what a door says: it has done the call, or noted it for the end of the group; Python is to do it, nothing has happened
DONE, NOT_TAKEN = 0, 1

# groups, of all communicators. A group that only doors have seen is that of THREAD (0: there is none); all others are in OPEN only.
GROUPS_OPEN = 0  # how many groups threads have open; the lower half is looked at
GROUPS_THREAD, GROUPS_DEPTH = 8, 16  # number of the thread, and how many blocks it has open
GROUPS_STATE = 24  # of the communicator by whose doors calls are noted, 0 while there are none
GROUPS_NOTED = 32  # a list, of its HAND_OVER then
GROUPS_BEGIN, GROUPS_END = 40, 48  # objects that begin and end what is not taken here
GROUPS_NONE = 56  # the object None
GROUPS_WORDS = 8

# a door. NEXT and its SELF are C function and object of the builtin that calls go to which this door does not take, 0 for none.
DOOR_STATE, DOOR_NEXT, DOOR_NEXT_SELF = 0, 8, 16
DOOR_NOTES = 24  # whether it notes calls while a group is open
# the door of a collective. Blocks are those that ``x`` and ``out`` have; without ``out`` some work in place.
DOOR_COLLECTIVE, DOOR_IN_BLOCKS, DOOR_OUT_BLOCKS, DOOR_THIRD, DOOR_IN_PLACE = 32, 40, 48, 56, 64
THIRD_NOTHING, THIRD_OPERATOR, THIRD_ROOT, THIRD_BOTH = 0, 1, 2, 3  # what the third argument is; BOTH: the operator, the sixth the root
# the door of a send or a receive
DOOR_RECEIVES = 32
# the door of a collective that is a list of messages: whether only the root takes ``out`` or gives ``x``; whether ``x`` and ``out`` have a
# block for each rank, and whether these are alike
DOOR_ROOTED, DOOR_SPLITS_IN, DOOR_SPLITS_OUT, DOOR_EVEN = 32, 40, 48, 56
ROOTED_NOWHERE, ROOTED_OUT, ROOTED_IN = 0, 1, 2
# the door of reduce_scatter_v: the collective that it is with equal counts, and the one that each part is with others
DOOR_WHOLE, DOOR_PART = 32, 40
DOOR_WORDS = 9

# the state of a communicator
STATE_ABORT = 0  # address of a 32-bit word that is not 0 when something is wrong
STATE_TYPE = 8  # PyTorch's type of tensors, 0 where there is none that can be looked at
STATE_VIEW, STATE_CURRENT = 16, 24  # functions of that type: dltensor_from_py_object_no_sync, current_work_stream; 0: ASK is asked
STATE_DEVICE = 32  # DLDevice of this GPU
STATE_STREAM = 40  # of the last operation
STATE_ORDER, STATE_SELF = 48, 56  # address of a word that has the second value if no other communicator filled the GPU last
STATE_LAST = 64  # block of the last operation if it went through a door, else 0
STATE_NONE, STATE_FALSE = 72, 80  # the objects None and False
STATE_INT_TYPE = 88  # the type int
STATE_RANK, STATE_NRANKS = 96, 104
STATE_GROUPS = 112  # address of the words of groups
STATE_CPU_PLAN = 120  # address of a word that becomes 0 with each operation
STATE_CLOSED = 128  # the word that ABORT points to in the end
STATE_NOTED, STATE_NOTED_STREAM = 136, 144  # how many messages of a group are noted, and for which stream
STATE_NOTES = 152  # a list of their arrays
STATE_HAND_OVER = 160  # an object, which GROUPS_NOTED is to have while any are noted
STATE_ASK, STATE_ORDINAL = 168, 176  # a Python function for the current stream, 0 where none is needed yet, and its argument
STATE_OPS = 184  # the objects that are operators, by number
NOPS = 5
STATE_ARRAY_TYPE = 224  # CuPy's type of arrays, likewise
STATE_LIST_TYPE, STATE_TUPLE_TYPE = 232, 240  # the types list and tuple
STATE_FAIL = 248  # a Python function, which raises what a code of CUDA says
STATE_VIEWS = 256  # of the arrays of a call: two views
# a view: a DLTensor; the capsule that it is from, which the view owns while a door looks at a call, else 0; whether it must not be written;
# its bytes, where there is a capsule
VIEW_OWNER, VIEW_READ_ONLY, VIEW_NBYTES, VIEW_BYTES = 48, 56, 64, 72
STATE_DTYPES = STATE_VIEWS + 2 * VIEW_BYTES  # the DLDataTypes that are known
NDTYPES = 12
STATE_ARRAY_DTYPES = STATE_DTYPES + 8 * NDTYPES  # objects that are NumPy's dtypes, each with its DLDataType
STATE_NAMES = STATE_ARRAY_DTYPES + NDTYPES * 16  # strings: attributes of CuPy's arrays and, from PTR on, of their memory
NAMES = ("_c_contiguous", "size", "dtype", "data", "ptr", "device_id")
NAME_CONTIGUOUS, NAME_SIZE, NAME_DTYPE, NAME_DATA, NAME_PTR, NAME_DEVICE = (STATE_NAMES + 8 * number for number in range(len(NAMES)))

# arrays of other types, which are asked by their protocols. That runs code of anybody's; BUSY is not 0 meanwhile, and no door takes calls
STATE_BUSY = STATE_NAMES + 8 * len(NAMES)
STATE_ANSWER = STATE_BUSY + 8  # where functions of the driver write
STATE_ARGS = STATE_BUSY + 16  # of a call of Python's: an array, a stream, DLPack's version
STATE_DLPACK = STATE_BUSY + 40  # the string "__dlpack__"
STATE_INTERFACE = STATE_BUSY + 48  # the string "__cuda_array_interface__"
STATE_SHARDING = STATE_BUSY + 56  # the string "sharding"
STATE_KEYS = STATE_BUSY + 64  # strings: keys of the dictionary that the interface is
KEYS = ("shape", "typestr", "data", "strides", "stream", "mask")
KEY_SHAPE, KEY_TYPESTR, KEY_DATA, KEY_STRIDES, KEY_STREAM, KEY_MASK = (STATE_KEYS + 8 * number for number in range(len(KEYS)))
STATE_TYPESTRS = STATE_KEYS + 8 * len(KEYS)  # a dictionary: DLDataTypes by what the interface says
STATE_DICT_TYPE, STATE_STR_TYPE = STATE_TYPESTRS + 8, STATE_TYPESTRS + 16  # the types dict and str
STATE_TRUE = STATE_TYPESTRS + 24  # the object True
STATE_EXCEPTION = STATE_TYPESTRS + 32  # the type Exception
STATE_POINTER_ATTRIBUTE = STATE_TYPESTRS + 40  # address of cuPointerGetAttribute, 0 where there is none
STATE_IS_CAPTURING = STATE_TYPESTRS + 48  # address of cuStreamIsCapturing, likewise
STATE_PLAIN, STATE_VERSIONED = STATE_TYPESTRS + 56, STATE_TYPESTRS + 64  # addresses of the names of DLPack's capsules
STATE_HELD = STATE_TYPESTRS + 72  # a list of capsules of which launches read, and perhaps still do
STATE_HELD_BYTES, STATE_HELD_STREAM = STATE_TYPESTRS + 80, STATE_TYPESTRS + 88  # what they keep alive, and where these launches are
STATE_RELEASE = STATE_TYPESTRS + 96  # a Python function, which hands them to who lets go of them in time
MOST_HELD, MOST_HELD_BYTES = 16, 1 << 20
# the types themselves, up to the first 0: whether asked by DLPack; whether such arrays never change; a function that gives the capsule of
# those whose sharding has that type, 0: the method gives it; names of the keyword arguments
STATE_VIEW_FOREIGN = STATE_TYPESTRS + 104  # address of the function that looks at them
STATE_NOTED_OWNERS, STATE_NOTED_BYTES = STATE_TYPESTRS + 112, STATE_TYPESTRS + 120  # a list of capsules of messages that are noted; as HELD
STATE_KINDS = STATE_TYPESTRS + 128
KIND_TYPE, KIND_DLPACK, KIND_IMMUTABLE, KIND_EXPORT, KIND_KEYWORDS, KIND_SHARDING, KIND_BYTES = 0, 8, 16, 24, 32, 40, 48
MOST_KINDS = 8
STATE_FOREIGN_END = STATE_KINDS + (MOST_KINDS + 1) * KIND_BYTES
POINTER_DEVICE_ORDINAL = 9  # cuda.h CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
STREAM_LEGACY = 1  # the legacy default stream, in DLPack and the interface

# a message of a call: what (``what_of``), elements, address; of a remembered launch: the same with the address's place in the argument
MESSAGE_WHAT, MESSAGE_COUNT, MESSAGE_ADDRESS = 0, 8, 16
MESSAGE_BYTES = 24
MOST_MESSAGES = 64  # of a launch
MOST_RANKS = 8
STATE_SHARES = STATE_FOREIGN_END  # elements of the blocks of ``x`` of a call, then those of ``out``
STATE_BLOCKS = STATE_SHARES + 2 * 8 * MOST_RANKS  # of a call of several launches, and room for a code
STATE_EVENT = STATE_BLOCKS + 8 * MOST_RANKS + 8  # by which one stream waits for another; 0: changes of streams are Python's
STATE_RECORD, STATE_WAIT = STATE_EVENT + 8, STATE_EVENT + 16  # addresses of cuEventRecord and cuStreamWaitEvent
STATE_CALL = STATE_EVENT + 24  # the messages of a call,
STATE_GROUP = STATE_CALL + 2 * MOST_RANKS * MESSAGE_BYTES  # those that are noted

# a row of the table of launches; MESSAGES is the address of those of a launch that has some, else 0. Their number is COUNT then.
ROW_KEY, ROW_COUNT, ROW_BLOCK, ROW_FILLS, ROW_MESSAGES = 0, 8, 16, 24, 32
ROW_BYTES = 40
STATE_TABLE = STATE_GROUP + MOST_MESSAGES * MESSAGE_BYTES
TABLE_SLOTS = 1024  # a power of two
PROBES = 8  # rows in which a launch may stand
STATE_BYTES = STATE_TABLE + TABLE_SLOTS * ROW_BYTES

# a shape, which is what messages are but for their sizes, of a launch into whose argument sizes are written: what ``Reach`` says, then a
# row for each message: what, its record in the argument (address, then bytes and type), the type there, the number of its queue, that of
# the other half of a message of this rank to itself (-1: to or from a peer); then a row for each queue: its record, whose first word has
# kind and peer, lanes << 16, first lane << 32; that word without lanes; its lanes in the call under way
SHAPE_QUEUES, SHAPE_GROUP, SHAPE_FIRST, SHAPE_LANES, SHAPE_COPY_LANES, SHAPE_BLOCKS, SHAPE_BULK_FROM = range(0, 56, 8)
SHAPE_BYTES = 56
SHAPED_WHAT, SHAPED_RECORD, SHAPED_TYPE, SHAPED_QUEUE, SHAPED_PARTNER = range(0, 40, 8)
SHAPED_BYTES = 40
QUEUE_RECORD, QUEUE_HEAD, QUEUE_LANES = range(0, 24, 8)
QUEUE_BYTES = 24

# struct DLTensor of dlpack.h, DLPack 1.3; DLDevice is type and number, 32 bits each
DL_DATA, DL_DEVICE, DL_NDIM, DL_DTYPE, DL_SHAPE, DL_STRIDES, DL_OFFSET, DL_BYTES = 0, 8, 16, 20, 24, 32, 40, 48
DL_CUDA = 2
# struct DLManagedTensorVersioned: a DLPackVersion, two pointers, flags, the DLTensor
VERSIONED_FLAGS, VERSIONED_TENSOR = 24, 32
DL_READ_ONLY = 1
# struct DLPackExchangeAPI: a DLPackVersion and a pointer, then five functions
API_MAJOR, API_VIEW, API_CURRENT = 0, 40, 48
DL_MAJOR = 1

OB_TYPE = 8  # PyObject.ob_type


def key_of(collective: int, third: int, dtype: int) -> int:
    """``third`` is the operator's number, the root, or ``both_of``; below 256. ``dtype`` is a DLDataType: code, bits << 8, lanes << 16."""
    return collective << 40 | third << 32 | dtype


def both_of(op: int, root: int) -> int:
    """An operator and a root in one number."""
    return root * NOPS + op


def what_of(receives: int, peer: int, dtype: int) -> int:
    """What a message is, but for its size: ``receives`` is 0 or 1."""
    return dtype << 32 | peer << 1 | receives


KEY_OF_MESSAGES = 1 << 62  # with their hash; no collective has a key like it
KEY_OF_SHAPE = 3 << 61  # with the hash of what they are


def slot_of(hashed: int, probe: int) -> int:
    """The number of a row in which a launch may stand; ``hashed`` are key and count."""
    return hashed + probe & TABLE_SLOTS - 1
