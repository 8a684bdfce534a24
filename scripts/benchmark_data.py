"""Measure speed and memory of preparing and reading text, as ratios within one run.

python scripts/benchmark_data.py prepare texts/*.jsonl     speed against `tokenizers` alone
python scripts/benchmark_data.py memory --tokens=1e9       peak memory for one large .jsonl
python scripts/benchmark_data.py read DIRECTORY            blocks of 2k to 128k tokens
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from trainer.config import DataConfig, TokenizerConfig
from trainer.data.order import sample_indices
from trainer.data.prepared import Manifest, open_prepared, prepare
from trainer.data.sources import documents
from trainer.data.tokenizer import train_tokenizer

VOCABULARY = 32_768


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("measurement", choices=("prepare", "memory", "read"))
    parser.add_argument("paths", nargs="*", help="texts, or a directory that `prepare` wrote")
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    if options.measurement == "prepare":
        speed(options.paths)
    elif options.measurement == "memory":
        memory(int(options.tokens))
    else:
        read(Path(options.paths[0]))


def speed(paths: list[str]) -> None:
    """Time `prepare` and the batches of `tokenizers`, in turns."""
    from tokenizers import Tokenizer

    config = DataConfig(source="files", files=paths)
    with tempfile.TemporaryDirectory() as directory:
        texts = list(documents(config))
        print(f"{sum(map(len, texts)) / 1e6:,.0f} million characters, {len(texts):,} documents")
        path = f"{directory}/tokenizer.json"
        sample = texts[:: max(len(texts) // 20_000, 1)]
        train_tokenizer(sample, VOCABULARY, []).save(path)
        for turn in range(2):
            alone = Tokenizer.from_file(path)
            began, used, tokens = time.perf_counter(), time.process_time(), 0
            for start in range(0, len(texts), 256):
                encoded = alone.encode_batch_fast(texts[start : start + 256])
                tokens += sum(len(encoding) for encoding in encoded)
            of_library, its_processors = time.perf_counter() - began, time.process_time() - used
            turned = DataConfig(source="files", files=paths, cache_dir=f"{directory}/{turn}")
            began, used = time.perf_counter(), time.process_time()
            prepare(turned, TokenizerConfig(path=path))
            ours, our_processors = time.perf_counter() - began, time.process_time() - used
            print(
                f"tokenizers alone {tokens / of_library:12,.0f} tokens/s   prepare "
                f"{tokens / ours:12,.0f} tokens/s   ratio {of_library / ours:.2f}, "
                f"of processor time {its_processors / our_processors:.2f}"
            )


def memory(tokens: int) -> None:
    """Prepare a file of so many tokens, and print the peak memory."""
    draws = np.random.default_rng(0)
    vocabulary = np.array([f" word{i}" for i in range(2_000)])
    with tempfile.TemporaryDirectory() as directory:
        left = tokens // 2
        with Path(directory, "text.jsonl").open("w") as file:
            while left > 0:
                size = int(draws.integers(100, 4_000))
                text = "".join(vocabulary[draws.integers(0, len(vocabulary), size)])
                file.write(json.dumps({"text": text}) + "\n")
                left -= size
        path = f"{directory}/tokenizer.json"
        train_tokenizer(["".join(vocabulary)] * 10, 4_096, []).save(path)
        files = [f"{directory}/text.jsonl"]
        config = DataConfig(source="files", files=files, cache_dir=f"{directory}/cache")
        began = time.perf_counter()
        written = prepare(config, TokenizerConfig(path=path))
        seconds = time.perf_counter() - began
        count = sum(Manifest.load(written).tokens.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count:,} tokens, {count / seconds:,.0f} tokens/s, peak {peak:,.0f} MiB")


def read(directory: Path) -> None:
    """Time reading shuffled blocks of several lengths."""
    stream = open_prepared(directory).train
    for length in (2_048, 32_768, 131_072):
        blocks = len(stream) // length
        if not blocks:
            continue
        began, tokens = time.perf_counter(), 0
        for first in range(0, 2_000_000 // length, 8):
            starts = sample_indices(0, np.arange(first, first + 8), blocks) * length
            tokens += stream.windows(starts, length).size
        print(f"{length:7,} tokens: {tokens / (time.perf_counter() - began):14,.0f} tokens/s")


if __name__ == "__main__":
    main()
