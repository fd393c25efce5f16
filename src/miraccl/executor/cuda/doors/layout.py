"""The words that doors and Python share. All offsets are in bytes but those of a launch's block; all words are int64."""

from __future__ import annotations

# a launch's block, in words: address of cuLaunchKernelEx, address of the kernel's argument, then what cuLaunchKernelEx takes:
# configuration (CUlaunchConfig), function, parameters
BLOCK_WORDS = 5
FUNCTION, ARGUMENT, CONFIG, KERNEL, PARAMETERS = range(BLOCK_WORDS)
CONFIG_STREAM = 32  # from the beginning of the configuration to the stream

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
STATE_VIEWS = 256  # room for two DLTensors and a stream
STATE_DTYPES = 384  # the DLDataTypes that are known
NDTYPES = 12
STATE_ARRAY_DTYPES = 480  # objects that are NumPy's dtypes, each with its DLDataType
STATE_NAMES = STATE_ARRAY_DTYPES + NDTYPES * 16  # strings: attributes of CuPy's arrays and, from PTR on, of their memory
NAMES = ("_c_contiguous", "size", "dtype", "data", "ptr", "device_id")
NAME_CONTIGUOUS, NAME_SIZE, NAME_DTYPE, NAME_DATA, NAME_PTR, NAME_DEVICE = (STATE_NAMES + 8 * number for number in range(len(NAMES)))

# a message of a call: what (``what_of``), elements, address; of a remembered launch: the same with the address's place in the argument
MESSAGE_WHAT, MESSAGE_COUNT, MESSAGE_ADDRESS = 0, 8, 16
MESSAGE_BYTES = 24
MOST_MESSAGES = 64  # of a launch
MOST_RANKS = 8
STATE_SHARES = STATE_NAMES + 8 * len(NAMES)  # elements of the blocks of ``x`` of a call, then those of ``out``
STATE_BLOCKS = STATE_SHARES + 2 * 8 * MOST_RANKS  # of a call of several launches, and room for a code
STATE_CALL = STATE_BLOCKS + 8 * MOST_RANKS + 8  # the messages of a call,
STATE_GROUP = STATE_CALL + 2 * MOST_RANKS * MESSAGE_BYTES  # those that are noted

# a row of the table of launches; MESSAGES is the address of those of a launch that has some, else 0. Their number is COUNT then.
ROW_KEY, ROW_COUNT, ROW_BLOCK, ROW_FILLS, ROW_MESSAGES = 0, 8, 16, 24, 32
ROW_BYTES = 40
STATE_TABLE = STATE_GROUP + MOST_MESSAGES * MESSAGE_BYTES
TABLE_SLOTS = 1024  # a power of two
PROBES = 8  # rows in which a launch may stand
STATE_BYTES = STATE_TABLE + TABLE_SLOTS * ROW_BYTES

# struct DLTensor of dlpack.h, DLPack 1.3; DLDevice is type and number, 32 bits each
DL_DATA, DL_DEVICE, DL_NDIM, DL_DTYPE, DL_SHAPE, DL_STRIDES, DL_OFFSET, DL_BYTES = 0, 8, 16, 20, 24, 32, 40, 48
DL_CUDA = 2
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


def slot_of(hashed: int, probe: int) -> int:
    """The number of a row in which a launch may stand; ``hashed`` are key and count."""
    return hashed + probe & TABLE_SLOTS - 1
