"""Published weights: checked by their headers, and read into a decoder one tensor at a time.

A model is a directory as Hugging Face publishes it (``config.json``, ``model.safetensors`` or
shards with an index, ``tokenizer.json``), one of our exports, or a hub id. Only tensors are read;
no code in a file is run.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.files import expecting
from trainer.interchange import published
from trainer.interchange.hf_config import is_unused, shape_and_layout
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder, initial_value
from trainer.positional.layout import Layout

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_headers(directory: Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Return file and shape of every tensor in ``directory``, sharded or not, by its name there."""
    names = [SINGLE]
    index = directory / INDEX
    if not (directory / SINGLE).is_file() and index.is_file():
        with expecting("the file of each tensor in JSON", index):
            files = json.loads(index.read_text("utf-8"))["weight_map"].values()
            names = sorted({Path(name).name for name in files})  # files beside the index only
    headers = {}
    for path in (directory / name for name in names):
        with expecting("tensors in safetensors", path), safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                headers[key] = path, tuple(file.get_slice(key).get_shape())
    return headers


def read_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor.

    The file is opened anew: mapped pages count as memory once they were touched, so otherwise a
    model would need its size twice.
    """
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


@dataclass(frozen=True)
class Pretrained:
    """A model whose files were checked, and whose weights are still in them.

    ``tensors``: functions that read them, by the decoder's parameter names. ``tokenizer``: None if
    the model came without one. ``token_files``: see
    :func:`~trainer.interchange.published.read_token_files`. ``end_of_text``: id after each document
    of the text that a run was trained on.
    """

    name: str
    config: ModelConfig
    layout: Layout
    tokenizer: Tokenizer | None
    tensors: Mapping[str, Callable[[], Tensor]]
    token_files: Mapping[str, str] = field(default_factory=dict)
    end_of_text: int | None = None

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """Read the value of a decoder's parameter.

        Query and key norms that wait for a drop are in no file and get their initial values.
        """
        read = self.tensors.get(name)
        return read() if read else initial_value(self.config, name, parameter.shape, seed=0)

    def decoder(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
        """Load the model onto the device in ``dtype``; takes hardly more memory than its size."""
        with torch.device("meta"):
            model = Decoder(self.config, self.layout).to(dtype)
        model.to_empty(device=device)
        model.fill(self.value)
        return model

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raise a UserError if the model came without one."""
        if self.tokenizer is None:
            raise UserError(f"{self.name}: there is no tokenizer.json beside its weights")
        return self.tokenizer


def read_pretrained(location: str) -> Pretrained:
    """Check the files of a model without reading weights.

    ``location``: a directory or a hub id.

    Raises:
        UserError: the model is not supported, or its tensors are not those of its configuration.
        OSError: a file is missing.
    """
    path = published.find_pretrained(location)
    values = published.read_config(path)
    config, layout = shape_and_layout(values)
    tensors = {}
    saved_shapes = {}
    for key, (file, size) in read_headers(path).items():
        if not is_unused(values, key):
            name = key.removeprefix("model.")
            if name in tensors:
                raise UserError(f"{location}: tensor {name}: expected one, got model.{name} too")
            tensors[name] = partial(read_tensor, file, key)
            saved_shapes[name] = size
    with torch.device("meta"):
        shapes = {
            name: tuple(parameter.shape)
            for name, parameter in Decoder(config, layout).named_parameters()
            if not is_disabled_norm(name, layout)
        }
    redundant = "rotary_emb.inv_freq", "lm_head.weight"  # a tied head is not in shapes
    for name, _ in sorted(shapes.items() ^ saved_shapes.items()):
        if name in shapes or not name.endswith(redundant):
            expected, got = (sizes.get(name, "none") for sizes in (shapes, saved_shapes))
            raise UserError(f"{location}: tensor {name}: shape: expected {expected}, got {got}")
    tied_head = None if "lm_head.weight" in shapes else tensors.get("lm_head.weight")
    if tied_head and not torch.equal(tied_head(), tensors["embed_tokens.weight"]()):
        raise UserError(
            f"{location}: tensor lm_head.weight: differs from the embeddings, which the model uses "
            "as its head; tie_word_embeddings: false in config.json uses lm_head.weight"
        )
    return Pretrained(
        location,
        config,
        layout,
        published.read_tokenizer(path),
        {name: tensors[name] for name in shapes},
        published.read_token_files(path),
    )


def is_disabled_norm(name: str, layout: Layout) -> bool:
    """Whether a parameter is a query or key norm of a layer whose norms are disabled."""
    parts = name.split(".")
    return parts[-2] in ("q_norm", "k_norm") and not layout.layers[int(parts[1])].qk_norm
