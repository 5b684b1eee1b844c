"""Images as Caffe has them: uint8 arrays of shape (channels, height, width), blue before green before red."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tilewise.frontends.caffe.errors import CaffeError

if TYPE_CHECKING:
    pass

__all__ = ["Colour", "Pixels", "decoded", "encoded", "read_image", "resized"]

Pixels = npt.NDArray[np.uint8]
Colour = Literal["color", "gray", "own"]
"""Three channels, one, or as many as the image has."""
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000")
"""What is decoded, which is what OpenCV decodes. Others of Pillow's formats start programs or never were data sets."""
ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held."""


def read_image(path: Path, colour: Colour, where: str) -> Pixels:
    """The image in a file. Raises ``CaffeError`` that begins with ``where`` for what cannot be read or decoded."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CaffeError(f"{where}: {path} cannot be read: {error.strerror or error}") from error
    return decoded(content, colour, f"{where}: {path}")


def decoded(content: bytes, colour: Colour, where: str) -> Pixels:
    """An encoded image, of shape (channels, height, width).

    With ``"color"`` and ``"gray"`` a camera's orientation is applied, as OpenCV does since 3.1; with ``"own"`` it is
    not. Raises ``CaffeError`` that begins with ``where`` for what does not decode.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            # A file that claims to be huge is an error, not a warning.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                return _pixels(image, colour, where)
    except CaffeError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise CaffeError(f"{where}: the image is too large: {error}") from error
    # Pillow's decoders raise what they like for files that are broken.
    except (OSError, ValueError, SyntaxError, IndexError, KeyError, TypeError, OverflowError, EOFError) as error:
        raise CaffeError(f"{where}: does not decode as an image ({error}); {', '.join(FORMATS)} would do") from error


def _pixels(image: Any, colour: Colour, where: str) -> Pixels:
    """The pixels of an open image in Caffe's order of axes and channels."""
    import PIL.Image

    if colour == "gray" and image.format == "JPEG":
        image.draft("L", image.size)  # a JPEG holds its brightness by itself
    image.load()
    if image.mode.startswith(("I", "F")):
        if colour == "own" or image.mode == "F":
            raise CaffeError(f"{where}: pixels have more than 8 bits; 8 would do")
        deep = np.asarray(image, dtype=np.int64)
        image = PIL.Image.fromarray((np.clip(deep, 0, 65535) >> 8).astype(np.uint8))
    if colour != "own" and image.getexif().get(ORIENTATION, 1) != 1:
        from PIL import ImageOps

        image = ImageOps.exif_transpose(image)
    modes = {"color": "RGB", "gray": "L", "own": _own_mode(image)}
    array = np.array(image.convert(modes[colour]), dtype=np.uint8)  # a copy that can be written
    if array.ndim == 2:
        return np.ascontiguousarray(array[None])
    reds = [2, 1, 0, 3][: array.shape[2]]
    return np.ascontiguousarray(array.transpose(2, 0, 1)[reds])


def _own_mode(image: Any) -> str:
    """The mode of the channels that an image has by itself."""
    if image.mode in ("1", "L"):
        return "L"
    alpha = image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
    return "RGBA" if alpha else "RGB"


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """The image at another size, bilinear between the centres of pixels, as OpenCV's ``resize`` does by default.

    Nothing is smoothed where it shrinks. OpenCV computes in fixed point, so single values may differ by 1.
    """
    if pixels.shape[1:] == (height, width):
        return pixels
    given = torch.from_numpy(pixels)[None].to(torch.float32)
    made = F.interpolate(given, size=(height, width), mode="bilinear", align_corners=False)
    found: Pixels = made[0].round().clamp(0, 255).to(torch.uint8).numpy()
    return found


def encoded(pixels: Pixels, kind: str) -> bytes:
    """The image as a file of the kind (``png``, ``jpg``, ``bmp``, …). Raises ``CaffeError`` for an unknown kind."""
    from PIL import Image

    Image.init()
    name = Image.registered_extensions().get(f".{kind.lower().lstrip('.')}")
    if name not in FORMATS:
        raise CaffeError(f"encode_type={kind!r}: not a kind of image that is written; png or jpg would do")
    array = pixels[0] if len(pixels) == 1 else pixels[[2, 1, 0, 3][: len(pixels)]].transpose(1, 2, 0)
    file = io.BytesIO()
    options: dict[str, Any] = {"quality": 95} if name == "JPEG" else {}
    Image.fromarray(np.ascontiguousarray(array)).save(file, format=name, **options)
    return file.getvalue()
