"""Kernel source: what doors see of arrays that are neither PyTorch's nor CuPy's, by the protocols that they speak: DLPack and
``__cuda_array_interface__``.

Only types are asked whose arrays went the long way before (``STATE_KINDS``).  Asking may run code of anybody's: no door takes calls
meanwhile, and what the view says is looked at again in every call.  DLPack's producer is given the stream, so that it makes that wait for
what it still computes; who has another stream in its interface goes the long way, which does so.  The capsule is the view's until the door
knows what becomes of the call (``doors.views``).
"""

from __future__ import annotations

from miraccl.fastpath.cuda import layout as at
from miraccl.fastpath.cuda.arrays import item_size
from miraccl.fastpath.cuda.streams import captures, forgive
from miraccl.fastpath.cuda.tensors import (
    address,
    call_int4,
    count_of,
    data_type,
    is_there,
    number_of,
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

MOST_ELEMENTS = 1 << 46


@inline
def kind_of(state: int, thing: int) -> int:
    """The row of its type; 0 for a type that is not asked."""
    kind, row = load(thing + at.OB_TYPE), state + at.STATE_KINDS
    while load(row + at.KIND_TYPE) != 0:
        if load(row + at.KIND_TYPE) == kind:
            return row
        row += at.KIND_BYTES
    return 0


@inline
def legacy_or(stream: int) -> int:
    """A stream as the protocols write it."""
    return at.STREAM_LEGACY if stream == 0 else stream


def view_foreign(state: int, row: int, thing: int, view: int) -> int:
    """Look at an array on this GPU that is contiguous, and write at ``view`` what it is; its elements, -1 for anything else.

    A function of its own, which doors call by its address: it is too long to be in each of them.
    """
    before = load(state + at.STATE_STREAM)
    count = (
        view_capsule(state, row, thing, view)
        if load(row + at.KIND_DLPACK) != 0
        else view_interface(state, thing, view)
    )
    return (
        count if load(state + at.STATE_STREAM) == before else -1
    )  # nobody may have called another operation


# ---- DLPack


@inline
def has_sharding(state: int, thing: int, kind: int) -> bool:
    """Whether the sharding of an array of JAX's has this type."""
    sharding = PyObject_GetAttr(thing, load(state + at.STATE_SHARDING))
    if sharding == 0:
        PyErr_Clear()
        return False
    found = load(sharding + at.OB_TYPE)
    Py_DecRef(sharding)
    return found == kind


@inline
def export(state: int, row: int, thing: int) -> int:
    """The capsule; 0 where there is none."""
    function, keywords = load(row + at.KIND_EXPORT), load(row + at.KIND_KEYWORDS)
    if function != 0 and not has_sharding(state, thing, load(row + at.KIND_SHARDING)):
        function = (
            0  # it would give the first part of an array that has several; the method refuses these
        )
    stream, args = PyLong_FromLong(legacy_or(load(state + at.STATE_STREAM))), state + at.STATE_ARGS
    if stream == 0:
        return 0
    store(args, thing)
    store(args + 8, stream)  # DLPack's version follows
    if function != 0:
        capsule = PyObject_Vectorcall(function, args, 1, keywords)
    else:
        capsule = PyObject_VectorcallMethod(load(state + at.STATE_DLPACK), args, 1, keywords)
    Py_DecRef(stream)
    if capsule == 0:
        forgive(state)
    return capsule


@inline
def read_capsule(state: int, row: int, capsule: int, view: int) -> int:
    """As ``view_foreign``, of what the capsule holds."""
    tensor, read_only = 0, load(row + at.KIND_IMMUTABLE)
    if PyCapsule_IsValid(capsule, load(state + at.STATE_VERSIONED)) != 0:
        managed = PyCapsule_GetPointer(capsule, load(state + at.STATE_VERSIONED))
        if load32(managed) == at.DL_MAJOR:
            tensor = managed + at.VERSIONED_TENSOR
            read_only |= load(managed + at.VERSIONED_FLAGS) & at.DL_READ_ONLY
    elif PyCapsule_IsValid(capsule, load(state + at.STATE_PLAIN)) != 0:
        tensor = PyCapsule_GetPointer(capsule, load(state + at.STATE_PLAIN))
    if tensor == 0:
        return -1
    for offset in range(0, at.DL_BYTES, 8):
        store(view + offset, load(tensor + offset))
    count, size = count_of(state, view), item_size(data_type(view))
    if count <= 0 or size == 0 or address(view) % size != 0:
        return -1
    store(view + at.VIEW_READ_ONLY, read_only)
    store(view + at.VIEW_NBYTES, count * size)
    return count


@inline
def view_capsule(state: int, row: int, thing: int, view: int) -> int:
    if captures(state, load(state + at.STATE_STREAM)):
        return -1
    store(state + at.STATE_BUSY, 1)
    capsule = export(state, row, thing)
    store(state + at.STATE_BUSY, 0)
    if capsule == 0:
        return -1
    count = read_capsule(state, row, capsule, view)
    if count < 0:
        Py_DecRef(capsule)
    else:
        store(view + at.VIEW_OWNER, capsule)
    return count


# ---- __cuda_array_interface__


@inline
def view_interface(state: int, thing: int, view: int) -> int:
    if load(state + at.STATE_POINTER_ATTRIBUTE) == 0:
        return -1
    store(state + at.STATE_BUSY, 1)
    interface = PyObject_GetAttr(thing, load(state + at.STATE_INTERFACE))
    store(state + at.STATE_BUSY, 0)
    if interface == 0:
        forgive(state)
        return -1
    count = (
        read_interface(state, interface, view)
        if load(interface + at.OB_TYPE) == load(state + at.STATE_DICT_TYPE)
        else -1
    )
    Py_DecRef(interface)
    return count


@inline
def item(state: int, interface: int, key: int) -> int:
    """What the interface has under a key; 0 for nothing and None."""
    value = PyDict_GetItem(interface, load(state + key))
    return 0 if value == load(state + at.STATE_NONE) else value


@inline
def tuple_of(state: int, given: int) -> bool:
    return given != 0 and load(given + at.OB_TYPE) == load(state + at.STATE_TUPLE_TYPE)


@inline
def stands_on_this_gpu(state: int, memory: int) -> bool:
    """As the driver says."""
    answer = state + at.STATE_ANSWER
    store(answer, -1)
    code = call_int4(
        load(state + at.STATE_POINTER_ATTRIBUTE), answer, at.POINTER_DEVICE_ORDINAL, memory, 0
    )
    return code == 0 and load32(answer) == load32(state + at.STATE_DEVICE + 4)


@inline
def dense_count(state: int, interface: int, size: int) -> int:
    """Elements of ``size`` bytes by shape and strides; -1 where they do not follow one another, and for what is no everyday number."""
    shape, strides, count = (
        item(state, interface, at.KEY_SHAPE),
        item(state, interface, at.KEY_STRIDES),
        1,
    )
    if not tuple_of(state, shape):
        return -1
    ndim = PyTuple_Size(shape)
    if strides != 0 and (not tuple_of(state, strides) or PyTuple_Size(strides) != ndim):
        return -1
    for axis in range(ndim - 1, -1, -1):
        length = number_of(state, PyTuple_GetItem(shape, axis))
        if length <= 0 or length > MOST_ELEMENTS // count:
            return -1
        if (
            strides != 0
            and length != 1
            and number_of(state, PyTuple_GetItem(strides, axis)) != count * size
        ):
            return -1
        count *= length
    return count


@inline
def read_interface(state: int, interface: int, view: int) -> int:
    """As ``view_foreign``, of an interface. Its stream is that of the operation before, or there is none."""
    stream = item(state, interface, at.KEY_STREAM)
    if stream != 0 and legacy_or(number_of(state, stream)) != legacy_or(
        load(state + at.STATE_STREAM)
    ):
        return -1
    typestr, data = item(state, interface, at.KEY_TYPESTR), item(state, interface, at.KEY_DATA)
    if (
        item(state, interface, at.KEY_MASK) != 0
        or not tuple_of(state, data)
        or PyTuple_Size(data) != 2
    ):
        return -1
    if typestr == 0 or load(typestr + at.OB_TYPE) != load(state + at.STATE_STR_TYPE):
        return -1
    known = PyDict_GetItem(load(state + at.STATE_TYPESTRS), typestr)
    if known == 0:
        return -1
    dtype, memory, read_only = (
        PyLong_AsLong(known),
        number_of(state, PyTuple_GetItem(data, 0)),
        PyTuple_GetItem(data, 1),
    )
    if not is_there(memory, 1) or memory % item_size(dtype) != 0:
        return -1
    if read_only != load(state + at.STATE_FALSE) and read_only != load(state + at.STATE_TRUE):
        return -1
    count = dense_count(state, interface, item_size(dtype))
    if count <= 0 or not stands_on_this_gpu(state, memory):
        return -1
    store(view + at.DL_DATA, memory)
    store(view + at.DL_NDIM, dtype << 32)  # two fields
    store(view + at.DL_OFFSET, 0)
    store(view + at.VIEW_READ_ONLY, 1 if read_only == load(state + at.STATE_TRUE) else 0)
    return count
