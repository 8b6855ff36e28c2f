"""Turn images into vectors of their patches, from a layer of a vision encoder; visual LSPs are learned from them.

    report = encode_images(ImagesConfig(images=("photos/*.jpg",), teacher="facebook/dino-vits16", layer=8))

writes <output>/vectors/<encoder>-l<layer>-<digits>/, which appears whole or not at all:

    <encoder>-l<layer>.npy          float16 (N, d), rows of unit length: the patches of the first image, row by row of
                                    its grid, then those of the next image
    <encoder>-l<layer>.images.json  the images' names, the grid of patches per image, encoder and layer
    pictures/<n>.jpg                image n as the encoder reads it: turned upright as its EXIF says, then resized and
                                    cropped by the encoder's own processor

learn-dictionary --hidden learns from the vectors; show-lsp DICTIONARY --vectors shows the result. Not supported:
encoders that do not keep one vector per patch in every layer (Swin, ConvNeXt). The class token is skipped, because its
vector belongs to no place of the image.

Shapes: W images at once, N patches, d hidden width.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mlsm.common.errors import EncodeError, TeacherError, describe
from mlsm.common.progress import silent
from mlsm.common.settings import Positional, check

IMAGES_AT_ONCE = 16
MOST_EXTRA = 16  # most vectors before those of the patches: class, distillation, registers
ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # looked for in a directory
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # others make Pillow call other programs
ORIENTATION = 0x0112  # EXIF's tag for how a camera was held; 1 is upright
INDEX, PICTURES = ".images.json", "pictures"  # instead of .npy; a directory


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Encode the patches of images as vectors, to learn a dictionary from and to look at by their LSPs."""

    images: Positional[tuple[str, ...]] = ()
    """Image files, globs or directories, which are searched for images with all that is below them."""
    teacher: str | None = None
    """Vision encoder: the directory or Hub id of a model that AutoModel and AutoImageProcessor load, such as a ViT,
    DeiT, DINO or CLIP."""
    layer: int | None = None
    """Layer whose output is taken, counted from 1; the layers above it are not computed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute: `auto` takes a GPU if there is one."""
    output: Path = Path("runs")
    """Directory whose `vectors` gets the result."""

    def __post_init__(self):
        check(self)
        for name in ("images", "teacher", "layer"):
            if not getattr(self, name):
                flag = "IMAGES" if name == "images" else f"--{name}"
                raise ValueError(f"{flag} is missing: encode-images 'photos/*.jpg' --teacher MODEL --layer 8")


def encode_images(config: ImagesConfig, progress: Callable[..., None] = silent) -> dict:
    """Make the vectors of the images' patches, unless they exist already.

    Returns  vectors (the file), images (their number), grid, width, finished_before
    Raises   EncodeError if there are no images, one cannot be read, or they have patches in different numbers;
             TeacherError if the encoder cannot be loaded, or has no such layer or not one vector per patch
    """
    from mlsm.common.device import choose_device
    from mlsm.common.disk import file_sha256, read_file
    from mlsm.common.durable import publish_directory
    from pipeline.job import named_by_content
    from shards.files import refuse_foreign_output
    from shards.manifest import fingerprint

    refuse_foreign_output(config.output)
    config = replace(config, teacher=os.path.expanduser(str(config.teacher)))
    device = choose_device(config.device)
    files = _find_images(config.images, config.output)
    progress("load encoder", 0, None)
    from PIL import Image  # before transformers, which says in its own words that it is not installed

    processor, encoder, last_layer = _load(config)
    weights = hashlib.sha256()
    for name, tensor in encoder.state_dict().items():
        weights.update(f"{name} {tuple(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
    turned, of_16_bits = [], []
    progress("read images", 0, None)
    for number, file in enumerate(files):
        # a file that is not an image is reported when its pixels are read
        with suppress(Exception), Image.open(file, formats=FORMATS) as image:
            turned += [number] * (image.getexif().get(ORIENTATION, 1) != 1)
            of_16_bits += [number] * _is_of_16_bits(image)
    request = {
        "encoder": weights.hexdigest(),
        "processor": processor.to_dict(),
        "layer": config.layer,
        "images": [file_sha256(file) for file in files],
    }
    # images that were once read otherwise; only if any, so that other vectors keep their names
    request |= {name: found for name, found in (("turned", turned), ("of_16_bits", of_16_bits)) if found}
    name = f"{Path(str(config.teacher)).name}-l{config.layer}"
    place = named_by_content(config.output / "vectors", name, fingerprint(request))
    finished_before = place.is_dir()
    if not finished_before:
        encoder = encoder.to(device)
        parts = (config, files, processor, encoder, last_layer, progress)
        publish_directory(place, lambda new: _write(new / f"{name}.npy", *parts), replace=False)
    (vectors,) = place.glob("*.npy")  # named after the encoder's name at that time
    index = json.loads(read_file(vectors.with_suffix(INDEX)))
    return {
        "vectors": str(vectors),
        "images": len(index["images"]),
        "grid": index["grid"],
        "width": index["width"],
        "finished_before": finished_before,
    }


def _find_images(patterns, output):
    from pipeline.corpus import expand

    found: list[Path] = []
    for pattern in patterns:
        if not pattern:  # Path("") is the working directory
            raise EncodeError("IMAGES: one of its names is empty. Expected a file, a glob or a directory of images.")
        files = sorted(expand(pattern, output, _images_of))
        if not files:
            raise EncodeError(f"IMAGES {pattern}: no image found. Expected a file, a glob or a directory of images.")
        found += files
    return list(dict.fromkeys(found))


def _images_of(path):
    """The file itself, or the images below a directory."""
    from pipeline.corpus import walk

    if not path.is_dir():
        return [path] if path.is_file() else []
    return [file for file in walk(path) if file.suffix.lower() in ENDINGS]


def _load(config):
    """The image processor, and the encoder cut after the requested layer."""
    from transformers import MODEL_MAPPING, AutoImageProcessor, AutoModel

    from mlsm.common.model_checks import (
        check_size,
        describe_foreign_settings,
        open_config,
        quiet_transformers,
        without_pooler,
    )

    try:
        with quiet_transformers():
            hf_config = open_config(config.teacher)
            if trouble := describe_foreign_settings(hf_config):
                raise TeacherError(f"{config.teacher}: {trouble}")
            if hf_config.model_type == "vit_mae":
                raise TeacherError(f"{config.teacher}: ViT-MAE shuffles the patches of an image. Use another encoder.")
            check_size(MODEL_MAPPING[type(hf_config)], hf_config, config.teacher)
            processor = AutoImageProcessor.from_pretrained(config.teacher, trust_remote_code=False, backend="pil")
            model, report = AutoModel.from_pretrained(
                config.teacher,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **without_pooler(hf_config),
            )
    except TeacherError:
        raise
    except Exception as error:  # of transformers, safetensors and the Hub, with classes of their own
        raise TeacherError(f"{config.teacher} cannot be loaded as a vision encoder ({describe(error)})") from error
    encoder = getattr(model, "vision_model", model).float().eval()  # CLIP's vision half
    used = "" if encoder is model else "vision_model."
    # a mask token is only for pre-training, and checkpoints of classifiers lack it
    lacking = [
        name for name in sorted(report["missing_keys"]) if name.startswith(used) and not name.endswith("mask_token")
    ]
    if lacking:
        raise TeacherError(
            f"{config.teacher}: its files lack {len(lacking)} weights of a {hf_config.model_type} encoder, such as "
            f"{lacking[0]}, which would be random numbers. Save the model again."
        )
    layers = _layers(encoder)
    if not 1 <= config.layer <= len(layers):
        raise TeacherError(f"{config.teacher} has layers 1 to {len(layers)}, found --layer {config.layer}")
    del layers[config.layer :]
    return processor, encoder, layers[-1]


def _layers(encoder):
    """The layers of an encoder, a ModuleList."""
    import torch

    count = getattr(encoder.config, "num_hidden_layers", None)
    for layers in encoder.modules():
        has_patches = hasattr(encoder.config, "patch_size") and hasattr(encoder.config, "hidden_size")
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == count and has_patches:
            return layers
    raise TeacherError(
        f"a {encoder.config.model_type} encoder has no sequence of layers that keep one vector per patch. Expected a "
        "ViT, DeiT, BEiT, DINO, CLIP or the like."
    )


def _write(vectors, config, files, processor, encoder, last_layer, progress):
    """Write the .npy file, with the index and the pictures next to it."""
    import numpy as np
    import torch

    from mlsm.common.proofs import lacks_memory
    from pipeline.dictionary.vectors import unit_length
    from pipeline.files import growing_rows

    size = _pixels(processor, files[0]).shape
    patch = encoder.config.patch_size
    height, width = (patch, patch) if isinstance(patch, int) else patch
    grid = (size[1] // height, size[2] // width)
    patches, hidden_size = grid[0] * grid[1], encoder.config.hidden_size
    taken: list = []  # by a hook, as the last of hidden_states is after the final norm
    hook = last_layer.register_forward_hook(lambda module, inputs, outputs: taken.append(outputs))
    pictures = vectors.with_name(PICTURES)
    pictures.mkdir()
    progress("images", 0, len(files), unit="images")
    with growing_rows(vectors, (len(files) * patches, hidden_size), np.float16) as add:
        for start in range(0, len(files), IMAGES_AT_ONCE):
            batch = []
            for number, file in enumerate(files[start : start + IMAGES_AT_ONCE], start):
                batch.append(_pixels(processor, file))
                if batch[-1].shape != size:
                    raise EncodeError(
                        f"{file}: the encoder reads it as {batch[-1].shape}, {files[0]} as {size}, so their numbers "
                        "of patches differ. Use images of one shape, or an encoder that crops them to one."
                    )
                _picture(processor, batch[-1]).save(pictures / f"{number}.jpg", quality=90)
            taken.clear()
            try:
                with torch.inference_mode():
                    encoder(pixel_values=torch.from_numpy(np.stack(batch)).to(encoder.device))
            except (RuntimeError, ValueError) as error:
                if lacks_memory(error):
                    raise
                raise TeacherError(
                    f"{config.teacher} cannot read images of {size[1]} x {size[2]} pixels, as its processor makes "
                    f"them: {describe(error)}. Use the processor that was saved with the model, or another encoder."
                ) from error
            hidden_WLd = taken[0][0] if isinstance(taken[0], tuple) else taken[0]
            if hidden_WLd.ndim != 3 or not 0 <= hidden_WLd.shape[1] - patches <= MOST_EXTRA:
                raise TeacherError(
                    f"layer {config.layer} of {config.teacher} gives {tuple(hidden_WLd.shape[1:])} for an image of "
                    f"{patches} patches. Expected one vector per patch, and a class token or registers before them."
                )
            rows_Nd = hidden_WLd[:, -patches:].float().cpu().numpy().reshape(-1, hidden_size)
            add(unit_length(rows_Nd, start * patches + np.arange(len(rows_Nd))))
            progress("images", min(start + IMAGES_AT_ONCE, len(files)), len(files), unit="images")
    hook.remove()
    index = {
        "made_by": "mlsm encode-images",
        "teacher": config.teacher,
        "layer": config.layer,
        "grid": grid,
        "width": hidden_size,
        "images": [str(file) for file in files],
    }
    vectors.with_suffix(INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _pixels(processor, file):
    """An image as the encoder reads it: float32 (channels, height, width)."""
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(file, formats=FORMATS) as image:
            deep = _is_of_16_bits(image)
            if image.mode in ("I", "F") and not deep:
                raise EncodeError(
                    f"{file}: its pixels are 32-bit numbers, and which of them is white is unknown. Save it with 8 or "
                    "16 bits, or remove it."
                )
            upright = ImageOps.exif_transpose(image)  # a camera held on its side says so in EXIF
            if deep:  # convert would make everything from 255 on white
                upright = Image.fromarray((np.asarray(upright) / 257).round().astype(np.uint8))
            upright = upright.convert("RGB")
            (pixels,) = processor(upright, return_tensors="np")["pixel_values"]
    except EncodeError:
        raise
    except Exception as error:  # of Pillow, of the processor, with classes of their own
        raise EncodeError(f"{file} cannot be read as an image ({describe(error)}). Remove it.") from error
    return np.ascontiguousarray(pixels, np.float32)


def _is_of_16_bits(image):
    """Whether a grey image has levels from 0 to 65,535. Older versions of Pillow open such a PNG in mode I."""
    return image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")


def _picture(processor, pixels):
    """The part of an image that the encoder reads, as a picture for people."""
    import numpy as np
    from PIL import Image

    if processor.do_normalize:
        mean, spread = (np.array(value)[:, None, None] for value in (processor.image_mean, processor.image_std))
        pixels = pixels * spread + mean
    levels = pixels * (255 if processor.do_rescale else 1)
    return Image.fromarray(levels.clip(0, 255).round().astype(np.uint8).transpose(1, 2, 0))
