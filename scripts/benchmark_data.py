"""Measure the speed of preparing text against `tokenizers` alone, in turns within one run.

python scripts/benchmark_data.py texts/*.jsonl
"""

from __future__ import annotations

import argparse
import tempfile
import time

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


if __name__ == "__main__":
    main()
