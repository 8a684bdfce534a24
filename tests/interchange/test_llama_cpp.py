"""llama.cpp computes what transformers does of models without rotation, beyond their context too.

It comes from PyPI: ``cyllama`` binds it, and the source distribution of ``llama-cpp-python`` holds
its converter. ``LLAMA_CPP`` names a directory with ``convert_hf_to_gguf.py`` that is there already.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.interchange.families import made
from trainer.data.tokenizer import train_tokenizer
from trainer.hf import drop_rotation
from trainer.interchange.export import Tokens, export_model
from trainer.model.config import QKNormConfig
from trainer.positional.layout import drop

llama = pytest.importorskip("cyllama.llama.llama_cpp")

pytestmark = pytest.mark.weekly

C = 64
EVERY = 16
TOKENIZER = train_tokenizer(["some text and words "], 320, [])
CONVERT = """
import sys

sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
sys.argv = ["convert_hf_to_gguf.py", sys.argv[2], "--outfile", sys.argv[3], "--outtype", "f32"]
import convert_hf_to_gguf as program
from conversion.base import TextModel

# The converter refuses tokenizers that it does not know, and some families read sentencepiece's.
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
class_of = program.get_model_class


def with_vocabulary(*arguments, **options):
    found = class_of(*arguments, **options)
    found.set_vocab = TextModel._set_vocab_gpt2
    return found


program.get_model_class = with_vocabulary
program.main()
"""
FAMILIES = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None},
    "Olmo2": {},
    "Phi3": {},
}
ROTATING = ("Qwen3", "Olmo2")
"""Families that rotate in llama.cpp unless the converter gets a linear type."""
LINEAR = {"rope_type": "linear", "factor": 1e30, "rope_theta": 1e4}
TOLERANCE = 0.02
"""Of the largest logit: llama.cpp computes products of float32 matrices in less. Rotation makes a
difference of more than 0.5."""
EXPORTS = {"without QK-norm": QKNormConfig(), "with QK-norm": QKNormConfig("after_drop")}


@pytest.fixture(scope="module")
def converter(tmp_path_factory):
    """The directory of llama.cpp's converter."""
    if "LLAMA_CPP" in os.environ:
        return Path(os.environ["LLAMA_CPP"])
    place = tmp_path_factory.mktemp("llama_cpp")
    words = ["download", "--no-deps", "--no-binary", ":all:", "llama-cpp-python", "-d", str(place)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(place, filter="data")
    (program,) = place.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py")
    return program.parent


def converted(converter, directory):
    """Convert a model to a file of llama.cpp, and return its path."""
    path = directory.with_suffix(".gguf")
    words = [sys.executable, "-c", CONVERT, str(converter), str(directory), str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert path.exists(), done.stderr[-2000:]
    return path


class Model(llama.LlamaModel):
    """cyllama 0.2.18 reads this attribute, which its own class lacks."""

    n_vocab = TOKENIZER.get_vocab_size()


def logits_of_llama_cpp(path, tokens):
    """Return the logits ``[n, V]`` of every :data:`EVERY`-th token, the last one included."""
    llama.llama_backend_init()
    model = Model(str(path), llama.LlamaModelParams(), verbose=False)
    options = llama.LlamaContextParams()
    options.type_k = options.type_v = 0  # float32
    options.n_ctx = options.n_batch = options.n_ubatch = len(tokens)
    context = llama.LlamaContext(model, options, verbose=False)
    logits = []
    for begin in range(0, len(tokens), EVERY):
        batch = llama.LlamaBatch(n_tokens=EVERY, embd=0, n_seq_max=1)
        for position in range(begin, begin + EVERY):
            batch.add(tokens[position], position, [0], position == begin + EVERY - 1)
        context.decode(batch)
        logits.append(np.array(context.get_logits()))
    return np.stack(logits)


@torch.no_grad()
def largest_difference(converter, directory, saved, factor):
    """Return the difference between llama.cpp's logits and those of the ``saved`` model in
    transformers at ``factor`` contexts, as a share of the largest."""
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    ids = torch.randint(
        TOKENIZER.get_vocab_size(), (1, factor * C), generator=torch.Generator().manual_seed(1)
    )
    expected = model(ids).logits[0, EVERY - 1 :: EVERY].numpy()
    found = logits_of_llama_cpp(converted(converter, directory), ids[0].tolist())
    return np.abs(found - expected).max() / np.abs(expected).max()


def for_llama_cpp(directory):
    """Return a copy of an export with the configuration for the converter."""
    copy = directory.with_name("gguf")
    shutil.copytree(directory, copy)
    (copy / "config_for_llama_cpp.json").replace(copy / "config.json")
    return copy


@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_without_rotation(converter, tiny_decoder, tmp_path, name, factor):
    shape = {"vocab_size": TOKENIZER.get_vocab_size(), "qk_norm": EXPORTS[name]}
    model = tiny_decoder(training_length=C, model=shape)
    model.layout = drop(model.layout, qk_norm="with" in name.split())
    export_model(model, Tokens(TOKENIZER, 0), tmp_path / "export", context=4 * C)
    directory = for_llama_cpp(tmp_path / "export")
    assert largest_difference(converter, directory, tmp_path / "export", factor) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_what_drop_rotation_saved(converter, tmp_path, family):
    model = made(
        family,
        vocab_size=TOKENIZER.get_vocab_size(),
        max_position_embeddings=C,
        **FAMILIES[family],
    )
    saved = tmp_path / "model"
    drop_rotation(model).save_pretrained(saved)
    TOKENIZER.save(str(saved / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (saved / "tokenizer_config.json").write_text(json.dumps(settings))
    differences = [largest_difference(converter, saved, saved, factor) for factor in (1, 4)]
    if family not in ROTATING:
        assert max(differences) < TOLERANCE
        return
    assert min(differences) > 0.5
    changed = tmp_path / "changed"
    shutil.copytree(saved, changed)
    values = json.loads((saved / "config.json").read_text()) | {"rope_parameters": LINEAR}
    (changed / "config.json").write_text(json.dumps(values))
    differences = [largest_difference(converter, changed, saved, factor) for factor in (1, 4)]
    assert max(differences) < TOLERANCE
