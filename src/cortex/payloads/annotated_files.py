"""Payloads that are images and uploaded files. Imported only if a user's method annotates one."""

from __future__ import annotations

import base64
import binascii
import io
import re
from typing import Any

from cortex.payloads.payload_type import BYTES_SCHEMA, PayloadType
from cortex.payloads.signature import BodySignature
from cortex.payloads.validation import payload_error

#: Formats that are only decoded. Pillow runs Ghostscript for EPS, and has little-used decoders for many others.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
#: An image of one pixel, as an example.
SMALLEST_GIF = "R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="
_DATA_URL = re.compile(r"data:[\w/+.;=-]*;base64,")


def only_file(form: Any) -> Any:
    """Return the `UploadFile` of a form that has exactly one. Raises: PayloadError."""
    files = _files(form)
    if len(files) != 1:
        raise payload_error("form", f"Input should be a form with one file, but has {len(files)}")
    return files[0]


def _files(form: Any) -> list[Any]:
    return [value for _, value in form.multi_items() if hasattr(value, "filename")]


class ImageType(PayloadType):
    """An image of Pillow: the body, the only file of a form, or a base64 string in JSON."""

    reads_bytes = True
    alternatives = (BodySignature(BYTES_SCHEMA, "image/*", is_typed=True),)
    result_media_type = "image/png"

    def __init__(self) -> None:
        schema = {"type": "string", "contentEncoding": "base64", "examples": [SMALLEST_GIF]}
        super().__init__(schema, result_schema=BYTES_SCHEMA)

    def from_json(self, value: Any, text: bytes) -> Any:
        if self.is_none(value):
            return None
        if not isinstance(value, str):
            raise payload_error("image_type", "Input should be an image in base64")
        prefix = _DATA_URL.match(value)
        try:
            data = base64.b64decode(value[prefix.end() :] if prefix else value, validate=True)
        except (binascii.Error, ValueError):
            raise payload_error("image_type", "Input should be an image in base64") from None
        return self.from_bytes(data, "")

    def from_bytes(self, body: bytes, media_type: str) -> Any:
        from PIL import Image  # noqa: PLC0415 - only for what is annotated

        try:
            image = Image.open(io.BytesIO(body), formats=_FORMATS)
            width, height = image.size
            if width * height <= (Image.MAX_IMAGE_PIXELS or width * height):
                image.load()
                return image
        except Image.DecompressionBombError:
            pass
        except Exception:  # the decoders raise exceptions of many kinds
            message = f"Input should be an image, one of {', '.join(_FORMATS)}"
            raise payload_error("image_type", message) from None
        raise payload_error("image_too_large", f"Input should be an image of at most {Image.MAX_IMAGE_PIXELS} pixels")

    def from_form(self, form: Any) -> Any:
        return self.from_bytes(only_file(form).file.read(), "")


class UploadType(PayloadType):
    """Starlette's `UploadFile`: the only file of a form; or a list of all its files."""

    reads_bytes = True
    media_type = "multipart/form-data"

    def __init__(self, is_many: bool = False) -> None:
        files = {"type": "array", "items": BYTES_SCHEMA} if is_many else BYTES_SCHEMA
        required = [] if is_many else ["file"]
        super().__init__({"type": "object", "properties": {"file": files}, "required": required})
        self._is_many = is_many

    def from_json(self, value: Any, text: bytes) -> Any:
        if self.is_none(value):
            return None
        files = value if self._is_many and isinstance(value, list) else [value]
        if not all(hasattr(each, "filename") for each in files):  # no field of a form
            return self.from_bytes(text, "")
        return files if self._is_many else value

    def from_bytes(self, body: bytes, media_type: str) -> Any:
        raise payload_error("form", f"Input should be a form with {'files' if self._is_many else 'one file'}")

    def from_form(self, form: Any) -> Any:
        return _files(form) if self._is_many else only_file(form)
