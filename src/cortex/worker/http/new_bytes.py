"""Bytes to be filled by reads from a socket."""

from __future__ import annotations

import ctypes


def new_bytes(size: int) -> tuple[bytes, memoryview]:
    """Return bytes with undefined contents, and their memory, which must be written before anyone else has the bytes.

    Joining the parts of a body instead copies it once more, a sixth of what an upload of a megabyte costs.
    """
    created = _create_bytes(None, size)
    return created, _view_of_memory(_address_of_bytes(created), size, _WRITABLE)


_WRITABLE = 0x200  # PyBUF_WRITE
_create_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address_of_bytes = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
_view_of_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
