"""Kernel source: reading arrays of other libraries by DLPack or ``__cuda_array_interface__``.

Only types whose arrays have passed the slow path are read (``STATE_FOREIGN_TYPES``). Reading may
run arbitrary code, so fast calls are disabled during it (``STATE_BUSY``), and every call validates
the view again. A DLPack producer receives the stream and makes it wait for its pending work; an
interface with another stream goes to the slow path. The view owns the capsule until the end of the
call (``views.finish_call``).
"""

from __future__ import annotations

from miraccl.executor.cuda import fast_call_layout
from miraccl.fastpath.cuda.arrays import item_size
from miraccl.fastpath.cuda.streams import clear_exception, is_capturing
from miraccl.fastpath.cuda.tensors import (
    address,
    call_int4,
    data_type,
    int_value,
    is_valid_address,
    tensor_count,
)
from miraccl.native.intrinsics import (
    Py_DecRef,
    PyCapsule_GetPointer,
    PyCapsule_IsValid,
    PyDict_GetItem,
    PyErr_Clear,
    PyLong_AsLong,
    PyLong_FromLong,
    PyObject_GetAttr,
    PyObject_Vectorcall,
    PyObject_VectorcallMethod,
    PyTuple_GetItem,
    PyTuple_Size,
    inline,
    load,
    load32,
    store,
)

MAX_ELEMENTS = 1 << 46


@inline
def foreign_type(state: int, array: int) -> int:
    """Return the record of the array's type; 0 if the type is not known."""
    type_address, entry = (
        load(array + fast_call_layout.OB_TYPE),
        state + fast_call_layout.STATE_FOREIGN_TYPES,
    )
    while load(entry + fast_call_layout.FOREIGN_TYPE) != 0:
        if load(entry + fast_call_layout.FOREIGN_TYPE) == type_address:
            return entry
        entry += fast_call_layout.FOREIGN_BYTES
    return 0


@inline
def protocol_stream(stream: int) -> int:
    """Return a stream handle in the encoding of the protocols."""
    return fast_call_layout.STREAM_LEGACY if stream == 0 else stream


def view_foreign(state: int, entry: int, array: int, view: int) -> int:
    """Write the view of a contiguous array on this GPU at ``view``; return its elements, -1 for
    others.
    """
    # Called by its address, because it is too long to be inlined in each fast call.
    before = load(state + fast_call_layout.STATE_STREAM)
    count = (
        view_capsule(state, entry, array, view)
        if load(entry + fast_call_layout.FOREIGN_DLPACK) != 0
        else view_interface(state, array, view)
    )
    return (
        count if load(state + fast_call_layout.STATE_STREAM) == before else -1
    )  # reading must not have run another operation


# ---- DLPack


@inline
def has_sharding(state: int, array: int, type_address: int) -> bool:
    """Return True if the sharding of a JAX array has this type."""
    sharding = PyObject_GetAttr(array, load(state + fast_call_layout.STATE_SHARDING))
    if sharding == 0:
        PyErr_Clear()
        return False
    found = load(sharding + fast_call_layout.OB_TYPE)
    Py_DecRef(sharding)
    return found == type_address


@inline
def export(state: int, entry: int, array: int) -> int:
    """Return the DLPack capsule of an array; 0 on failure."""
    function, keywords = (
        load(entry + fast_call_layout.FOREIGN_EXPORT),
        load(entry + fast_call_layout.FOREIGN_KEYWORDS),
    )
    if function != 0 and not has_sharding(
        state, array, load(entry + fast_call_layout.FOREIGN_SHARDING)
    ):
        function = 0  # of a sharded array it would export the first part; the method rejects it
    stream, args = (
        PyLong_FromLong(protocol_stream(load(state + fast_call_layout.STATE_STREAM))),
        state + fast_call_layout.STATE_ARGS,
    )
    if stream == 0:
        return 0
    store(args, array)
    store(args + 8, stream)  # followed by DLPack's version
    if function != 0:
        capsule = PyObject_Vectorcall(function, args, 1, keywords)
    else:
        capsule = PyObject_VectorcallMethod(
            load(state + fast_call_layout.STATE_DLPACK), args, 1, keywords
        )
    Py_DecRef(stream)
    if capsule == 0:
        clear_exception(state)
    return capsule


@inline
def read_capsule(state: int, entry: int, capsule: int, view: int) -> int:
    """Write the view of a capsule's tensor; return its elements, -1 if unsuitable."""
    tensor, read_only = 0, load(entry + fast_call_layout.FOREIGN_IMMUTABLE)
    if PyCapsule_IsValid(capsule, load(state + fast_call_layout.STATE_VERSIONED_NAME)) != 0:
        managed = PyCapsule_GetPointer(capsule, load(state + fast_call_layout.STATE_VERSIONED_NAME))
        if load32(managed) == fast_call_layout.DL_MAJOR:
            tensor = managed + fast_call_layout.VERSIONED_TENSOR
            read_only |= (
                load(managed + fast_call_layout.VERSIONED_FLAGS) & fast_call_layout.DL_READ_ONLY
            )
    elif PyCapsule_IsValid(capsule, load(state + fast_call_layout.STATE_CAPSULE_NAME)) != 0:
        tensor = PyCapsule_GetPointer(capsule, load(state + fast_call_layout.STATE_CAPSULE_NAME))
    if tensor == 0:
        return -1
    for offset in range(0, fast_call_layout.DL_BYTES, 8):
        store(view + offset, load(tensor + offset))
    count, size = tensor_count(state, view), item_size(data_type(view))
    if count <= 0 or size == 0 or address(view) % size != 0:
        return -1
    store(view + fast_call_layout.VIEW_READ_ONLY, read_only)
    store(view + fast_call_layout.VIEW_NBYTES, count * size)
    return count


@inline
def view_capsule(state: int, entry: int, array: int, view: int) -> int:
    if is_capturing(state, load(state + fast_call_layout.STATE_STREAM)):
        return -1
    store(state + fast_call_layout.STATE_BUSY, 1)
    capsule = export(state, entry, array)
    store(state + fast_call_layout.STATE_BUSY, 0)
    if capsule == 0:
        return -1
    count = read_capsule(state, entry, capsule, view)
    if count < 0:
        Py_DecRef(capsule)
    else:
        store(view + fast_call_layout.VIEW_OWNER, capsule)
    return count


# ---- __cuda_array_interface__


@inline
def view_interface(state: int, array: int, view: int) -> int:
    if load(state + fast_call_layout.STATE_POINTER_ATTRIBUTE) == 0:
        return -1
    store(state + fast_call_layout.STATE_BUSY, 1)
    interface = PyObject_GetAttr(array, load(state + fast_call_layout.STATE_INTERFACE))
    store(state + fast_call_layout.STATE_BUSY, 0)
    if interface == 0:
        clear_exception(state)
        return -1
    count = (
        read_interface(state, interface, view)
        if load(interface + fast_call_layout.OB_TYPE)
        == load(state + fast_call_layout.STATE_DICT_TYPE)
        else -1
    )
    Py_DecRef(interface)
    return count


@inline
def item(state: int, interface: int, key: int) -> int:
    """Return the interface's value for a key; 0 for None or a missing key."""
    value = PyDict_GetItem(interface, load(state + key))
    return 0 if value == load(state + fast_call_layout.STATE_NONE) else value


@inline
def is_tuple(state: int, value: int) -> bool:
    return value != 0 and load(value + fast_call_layout.OB_TYPE) == load(
        state + fast_call_layout.STATE_TUPLE_TYPE
    )


@inline
def is_on_this_gpu(state: int, memory: int) -> bool:
    """Return True if the driver reports this GPU for the address."""
    result = state + fast_call_layout.STATE_RESULT
    store(result, -1)
    code = call_int4(
        load(state + fast_call_layout.STATE_POINTER_ATTRIBUTE),
        result,
        fast_call_layout.POINTER_DEVICE_ORDINAL,
        memory,
        0,
    )
    return code == 0 and load32(result) == load32(state + fast_call_layout.STATE_DEVICE + 4)


@inline
def dense_count(state: int, interface: int, size: int) -> int:
    """Return the elements of ``size`` bytes by shape and strides; -1 if not contiguous or not plain
    ints.
    """
    shape, strides, count = (
        item(state, interface, fast_call_layout.KEY_SHAPE),
        item(state, interface, fast_call_layout.KEY_STRIDES),
        1,
    )
    if not is_tuple(state, shape):
        return -1
    ndim = PyTuple_Size(shape)
    if strides != 0 and (not is_tuple(state, strides) or PyTuple_Size(strides) != ndim):
        return -1
    for axis in range(ndim - 1, -1, -1):
        length = int_value(state, PyTuple_GetItem(shape, axis))
        if length <= 0 or length > MAX_ELEMENTS // count:
            return -1
        if (
            strides != 0
            and length != 1
            and int_value(state, PyTuple_GetItem(strides, axis)) != count * size
        ):
            return -1
        count *= length
    return count


@inline
def read_interface(state: int, interface: int, view: int) -> int:
    """Write the view of an interface; return its elements, -1 if unsuitable.

    Its stream must be that of the previous operation, or absent.
    """
    stream = item(state, interface, fast_call_layout.KEY_STREAM)
    if stream != 0 and protocol_stream(int_value(state, stream)) != protocol_stream(
        load(state + fast_call_layout.STATE_STREAM)
    ):
        return -1
    typestr, data = (
        item(state, interface, fast_call_layout.KEY_TYPESTR),
        item(state, interface, fast_call_layout.KEY_DATA),
    )
    if (
        item(state, interface, fast_call_layout.KEY_MASK) != 0
        or not is_tuple(state, data)
        or PyTuple_Size(data) != 2
    ):
        return -1
    if typestr == 0 or load(typestr + fast_call_layout.OB_TYPE) != load(
        state + fast_call_layout.STATE_STR_TYPE
    ):
        return -1
    known = PyDict_GetItem(load(state + fast_call_layout.STATE_TYPESTRS), typestr)
    if known == 0:
        return -1
    dtype, memory, read_only = (
        PyLong_AsLong(known),
        int_value(state, PyTuple_GetItem(data, 0)),
        PyTuple_GetItem(data, 1),
    )
    if not is_valid_address(memory, 1) or memory % item_size(dtype) != 0:
        return -1
    if read_only != load(state + fast_call_layout.STATE_FALSE) and read_only != load(
        state + fast_call_layout.STATE_TRUE
    ):
        return -1
    count = dense_count(state, interface, item_size(dtype))
    if count <= 0 or not is_on_this_gpu(state, memory):
        return -1
    store(view + fast_call_layout.DL_DATA, memory)
    store(view + fast_call_layout.DL_NDIM, dtype << 32)  # two fields
    store(view + fast_call_layout.DL_OFFSET, 0)
    store(
        view + fast_call_layout.VIEW_READ_ONLY,
        1 if read_only == load(state + fast_call_layout.STATE_TRUE) else 0,
    )
    return count
