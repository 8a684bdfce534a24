"""Measure the speed of preparing text against `tokenizers` alone, in turns within one run.

python scripts/benchmark_data.py texts/*.jsonl
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Self

from tokenizers import Tokenizer

from trainer.config import DataConfig, TokenizerConfig
from trainer.data.prepared import prepare
from trainer.data.sources import documents
from trainer.data.tokenizer import train_tokenizer

VOCABULARY = 32_768


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("paths", nargs="+", help="files of text")
    speed(parser.parse_args().paths)


class Stopwatch:
    """Seconds of a block, by the clock and of all processors."""

    def __enter__(self) -> Self:
        self.seconds = -time.perf_counter()
        self.processors = -time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter()
        self.processors += time.process_time()


def encoded_tokens(tokenizer: Tokenizer, texts: list[str]) -> int:
    """Encode texts in batches; return the number of tokens."""
    tokens = 0
    for start in range(0, len(texts), 256):
        encoded = tokenizer.encode_batch_fast(texts[start : start + 256])
        tokens += sum(len(encoding) for encoding in encoded)
    return tokens


def speed(paths: list[str]) -> None:
    """Time `prepare` and the batches of `tokenizers`, in turns."""
    config = DataConfig(source="files", files=paths)
    with tempfile.TemporaryDirectory() as directory:
        texts = list(documents(config))
        print(f"{sum(map(len, texts)) / 1e6:,.0f} million characters, {len(texts):,} documents")
        path = f"{directory}/tokenizer.json"
        sample = texts[:: max(len(texts) // 20_000, 1)]
        train_tokenizer(sample, VOCABULARY, []).save(path)
        for turn in range(2):
            alone = Tokenizer.from_file(path)
            with Stopwatch() as of_library:
                tokens = encoded_tokens(alone, texts)
            turned = DataConfig(source="files", files=paths, cache_dir=f"{directory}/{turn}")
            with Stopwatch() as ours:
                prepare(turned, TokenizerConfig(path=path))
            print(
                f"tokenizers alone {tokens / of_library.seconds:12,.0f} tokens/s   prepare "
                f"{tokens / ours.seconds:12,.0f} tokens/s   "
                f"ratio {of_library.seconds / ours.seconds:.2f}, "
                f"of processor time {of_library.processors / ours.processors:.2f}"
            )


if __name__ == "__main__":
    main()
