"""The words that doors and Python share. All offsets are in bytes but those of a launch's block; all words are int64."""

from __future__ import annotations

# a launch's block, in words: address of cuLaunchKernelEx, address of the kernel's argument, then what cuLaunchKernelEx takes:
# configuration (CUlaunchConfig), function, parameters
BLOCK_WORDS = 5
FUNCTION, ARGUMENT, CONFIG, KERNEL, PARAMETERS = range(BLOCK_WORDS)
CONFIG_STREAM = 32  # from the beginning of the configuration to the stream

# a door: one collective of a communicator. Blocks are those that ``x`` and ``out`` have; without ``out`` some work in place.
DOOR_STATE, DOOR_COLLECTIVE, DOOR_IN_BLOCKS, DOOR_OUT_BLOCKS, DOOR_THIRD, DOOR_IN_PLACE = 0, 8, 16, 24, 32, 40
THIRD_NOTHING, THIRD_OPERATOR, THIRD_ROOT = 0, 1, 2  # what the third argument is

# the state of a communicator
STATE_ABORT = 0  # address of a 32-bit word that is not 0 when something is wrong
STATE_TYPE = 8  # the type of the tensors that are looked at, 0 where there is none
STATE_VIEW, STATE_CURRENT = 16, 24  # functions of that type: dltensor_from_py_object_no_sync, current_work_stream
STATE_DEVICE = 32  # DLDevice of this GPU
STATE_STREAM = 40  # of the last operation
STATE_ORDER, STATE_SELF = 48, 56  # address of a word that has the second value if no other communicator filled the GPU last
STATE_LAST = 64  # block of the last operation if it went through a door, else 0
STATE_NONE = 72  # the object None
STATE_INT_TYPE = 80  # the type int
STATE_OPS = 88  # the objects that are operators, by number
NOPS = 5
STATE_VIEWS = 128  # room for two DLTensors and a stream
STATE_TABLE = 256

# a row of the table of launches
ROW_KEY, ROW_COUNT, ROW_BLOCK, ROW_FILLS = 0, 8, 16, 24
ROW_BYTES = 32
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
    """``third`` is the operator's number, or the root; ``dtype`` a DLDataType: code, bits << 8, lanes << 16."""
    return collective << 40 | third << 32 | dtype


def slot_of(key: int, count: int, probe: int) -> int:
    """The number of a row in which a launch may stand."""
    return (((key * 0x9E3779B1 + count) * 0x85EBCA6B >> 32) + probe) & (TABLE_SLOTS - 1)
