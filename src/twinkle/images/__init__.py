"""Images in requests: reading them safely, preparing them for a model, and the positions of their tokens."""

from twinkle.images.decoding import EncodedImage, ImageLimits, read_image
from twinkle.images.positions import position_axes
from twinkle.images.processing import ImageProcessing, ImageSize, ResizedImage
from twinkle.images.sent import SentImage, SentImages, SentPatches
from twinkle.images.sources import ImageSource

__all__ = [
    "EncodedImage",
    "ImageLimits",
    "ImageProcessing",
    "ImageSize",
    "ImageSource",
    "ResizedImage",
    "SentImage",
    "SentImages",
    "SentPatches",
    "position_axes",
    "read_image",
]
