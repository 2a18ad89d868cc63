"""The shape and datatype of an annotated array. Users write `Annotated[numpy.ndarray, cortex.Shape(-1, 4)]`."""

from __future__ import annotations

from typing import Annotated, Any


class Shape:
    """The sizes of an array, -1 for any, and the name of its datatype, such as "float32"; None: that of the values."""

    def __init__(self, *sizes: int, dtype: str | None = None) -> None:
        if not all(type(size) is int and size >= -1 for size in sizes):
            raise ValueError(f"Shape{sizes}: sizes are whole numbers, or -1 for any")
        self.sizes = sizes
        self.dtype = dtype

    def __repr__(self) -> str:
        dtype = [] if self.dtype is None else [f"dtype={self.dtype!r}"]
        return f"Shape({', '.join([*map(str, self.sizes), *dtype])})"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Return the core schema of a field that is such an array."""
        from cortex.payloads.annotated_arrays import array_type  # noqa: PLC0415 - only pydantic calls this
        from cortex.payloads.annotations import Part  # noqa: PLC0415 - as above

        return handler.generate_schema(Annotated[Any, Part(array_type(Annotated[source, self]))])
