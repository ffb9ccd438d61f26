"""Reads a pickle without running it: numbers, strings, containers and numpy arrays come out, all else is inert.

A pickle is a program: it names functions of any module and calls them. Here no name is ever imported. Each one is
looked up in GLOBALS, a table of harmless stand-ins, and whatever is not there becomes `Inert`, which accepts every
call and does nothing. Not even numpy's own constructors run; an array is bytes with a checked size. (A pickle made for
the purpose can still waste time: tuples nested in tuples, each twice, take long to hash.)

The stand-ins define __setstate__, so that a pickle cannot set their attributes (its BUILD instruction would).
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

NUMBERS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}
MAX_MEMO = 10**6  # Python's unpickler takes memory up to the highest index that a pickle names


class Inert:
    """Stands for any class or function that a pickle names."""

    __slots__ = ()

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __call__(self, *args, **kwargs):
        return self

    def ignore(self, *args):
        pass

    __setstate__ = __setitem__ = append = extend = add = ignore


class Dict(dict):
    """Stands for flax's FrozenDict, also of the time when it was pickled by its slots, and for OrderedDict."""

    def __setstate__(self, state):
        if isinstance(state, tuple) and isinstance(state[-1], dict):
            self.update(state[-1].get("_dict", {}))


class Dtype:
    """Stands for numpy.dtype. `value`: the type, or None where it is not of booleans, integers or floats."""

    __slots__ = ("value",)

    def __init__(self, code, *_):
        self.value = np.dtype(code) if code in NUMBERS else None

    def __setstate__(self, state):
        if self.value is not None and state[1] in ("<", ">"):
            self.value = self.value.newbyteorder(state[1])


class Array:
    """Stands for numpy.ndarray. `value`: the array, once its bytes have come, or None where they are not numbers."""

    __slots__ = ("value",)

    def __init__(self, *_):
        self.value = None

    def __setstate__(self, state):
        *_, shape, dtype, fortran, data = state
        self.fill(data, dtype, shape, "F" if fortran else "C")

    def fill(self, data, dtype, shape, order):
        if not isinstance(dtype, Dtype) or dtype.value is None or order not in ("C", "F"):
            return
        size = memoryview(data).nbytes
        if size != math.prod(shape) * dtype.value.itemsize:
            raise ValueError(f"an array of shape {shape} has {size} bytes")
        self.value = np.ndarray(shape, dtype.value, buffer=data, order=order)


class Function:
    """Stands for a function: a call returns what __new__ does."""

    def __setstate__(self, state):
        raise ValueError("a function has no state")


class Buffer(Function):
    """Stands for numpy's _frombuffer, by which arrays are pickled since protocol 5."""

    def __new__(cls, data, dtype, shape, order, *_):
        array = Array()
        array.fill(data, dtype, shape, order)
        return array


class Scalar(Function):
    """Stands for numpy's scalar(dtype, bytes)."""

    def __new__(cls, dtype, data=b""):
        known = isinstance(dtype, Dtype) and dtype.value is not None
        return np.frombuffer(data, dtype.value, count=1)[0].item() if known else Inert()


class JaxArray(Function):
    """Stands for the functions by which jax pickles its arrays, as of 0.3.14: numpy's parts, and jax's own state."""

    def __new__(cls, fun, args, array_state, *_):
        array = Array()
        array.__setstate__(array_state)
        return array


class FloatStorage(Function):
    """Stands for the type of torch's storages of 32-bit floats, which only the identifiers of storages name."""

    def __new__(cls, *_):
        return Inert()


class Tensor(Function):
    """Stands for torch's _rebuild_tensor_v2(storage, offset, size, stride, ...), for contiguous tensors."""

    def __new__(cls, storage, offset, size, stride, *_):
        array = Array()
        if isinstance(storage, np.ndarray):
            if tuple(stride) != tuple(math.prod(size[i + 1 :]) for i in range(len(size))):
                raise ValueError(f"a tensor of shape {size} has the strides {stride}")
            array.fill(storage[offset : offset + math.prod(size)], Dtype("f4"), size, "C")
        return array


class Parameter(Function):
    """Stands for torch's _rebuild_parameter(tensor, requires_grad, hooks)."""

    def __new__(cls, tensor, *_):
        return tensor


GLOBALS = {
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): Dtype,
    ("flax.core.frozen_dict", "FrozenDict"): Dict,
    ("collections", "OrderedDict"): Dict,
    ("torch", "FloatStorage"): FloatStorage,
    ("torch._utils", "_rebuild_tensor_v2"): Tensor,
    ("torch._utils", "_rebuild_parameter"): Parameter,
} | {
    (f"numpy.{core}.{module}", name): stand_in
    for core in ("core", "_core")
    for module, name, stand_in in (
        ("multiarray", "_reconstruct", Array), ("multiarray", "scalar", Scalar), ("numeric", "_frombuffer", Buffer)
    )
}  # fmt: skip


class Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, storage: Callable[[str], np.ndarray] | None):
        super().__init__(io.BytesIO(data))
        self.storage = storage

    def persistent_load(self, identifier):
        """A torch storage, by ("storage", type, key, device, number of elements)."""
        _, kind, key, *_ = identifier
        return self.storage(key) if self.storage and kind is FloatStorage else Inert()

    def find_class(self, module: str, name: str):
        if module.split(".")[0] == "jax" and "reconstruct" in name:
            return JaxArray
        return GLOBALS.get((module, name), Inert)


def loads(data: bytes, storage: Callable[[str], np.ndarray] | None = None) -> Any:
    """The object in a pickle; arrays as `Array`, unknown objects as `Inert`. `storage`: finds the 32-bit floats that
    torch keeps beside its pickle. Raises nearly anything on a bad file."""
    for opcode, arg, _ in pickletools.genops(data):  # builds nothing, and checks every length against the data
        if "PUT" in opcode.name and int(arg) > MAX_MEMO or opcode.name == "DUP" or opcode.name.startswith("EXT"):
            raise ValueError(f"the instruction {opcode.name} {arg} is not read")
    return Unpickler(data, storage).load()
