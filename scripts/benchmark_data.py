"""Measure speed and memory of preparing, opening and reading text, as ratios within one run.

python scripts/benchmark_data.py prepare texts/*.jsonl     speed against `tokenizers` alone
python scripts/benchmark_data.py memory --tokens=1e9       peak memory for a synthetic stream
python scripts/benchmark_data.py open --tokens=1e11        opening by 64 processes in parallel
python scripts/benchmark_data.py read DIRECTORY            blocks of 2k to 128k tokens, by workers
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 32_768
MIB = 2**20


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("measurement", choices=("prepare", "memory", "open", "read"))
    parser.add_argument("paths", nargs="*", help="texts, or a directory that `prepare` wrote")
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    print(f"{processor()}, {options.workers} workers")
    if options.measurement == "prepare":
        prepare(options.paths, options.workers)
    elif options.measurement == "memory":
        memory(int(options.tokens), options.workers)
    elif options.measurement == "open":
        open_many(int(options.tokens))
    else:
        read(Path(options.paths[0]), options.workers)


def processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def peak() -> float:
    """Return the peak memory of this process or its largest child, whichever is more, in MiB."""
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    theirs = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return max(mine, theirs) / 1024


def prepare(paths: list[str], workers: int) -> None:
    """Time `prepare` and the batches of `tokenizers` on as many threads, in turns."""
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    from tokenizers import Tokenizer

    from trainer.data.config import DataConfig, TokenizerConfig
    from trainer.data.files import find_files, read_rows
    from trainer.data.preparing import Preparation
    from trainer.data.tokenizer import train_tokenizer

    texts = [r for f in find_files(paths, "paths") for r in read_rows(f.path, "text")]
    texts = [text for text in texts if isinstance(text, str)]
    characters = sum(map(len, texts))
    tokenizer = train_tokenizer(texts[:: max(len(texts) // 20_000, 1)], VOCABULARY, [])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        tokenizer.save(str(path))
        print(f"{characters / 1e6:,.0f} million characters, {len(texts):,} documents")
        for turn in range(2):
            alone = Tokenizer.from_file(str(path))
            began, tokens = time.perf_counter(), 0
            for start in range(0, len(texts), 256):
                encoded = alone.encode_batch_fast(texts[start : start + 256])
                tokens += sum(len(encoding) for encoding in encoded)
            of_library = time.perf_counter() - began
            config = DataConfig(source="files", files=paths, cache_dir=f"{directory}/{turn}")
            began = time.perf_counter()
            work = Preparation.find(config, TokenizerConfig(path=str(path)), None)
            work.run(workers=workers)
            ours = time.perf_counter() - began
            print(
                f"tokenizers alone {tokens / of_library:12,.0f} tokens/s   prepare "
                f"{tokens / ours:12,.0f} tokens/s   ratio {of_library / ours:.2f}"
            )


def made_up(words: int) -> Iterator[str]:
    """Yield documents of 100 to 4,000 words, two tokens each, until there are ``words`` words."""
    draws = np.random.default_rng(0)
    vocabulary = np.array([f" word{i}" for i in range(2_000)])
    while words > 0:
        size = int(draws.integers(100, 4_000))
        yield "".join(vocabulary[draws.integers(0, len(vocabulary), size)])
        words -= size


def memory(tokens: int, workers: int) -> None:
    """Prepare a stream that is never held as a whole, and print the processes' peak memory."""
    from trainer.data.config import DataConfig, TokenizerConfig
    from trainer.data.prepared import open_prepared
    from trainer.data.preparing import Preparation
    from trainer.data.sources import text_source
    from trainer.data.tokenizer import train_tokenizer

    text_source(made_up)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        train_tokenizer(made_up(1_000_000), 4_096, []).save(str(path))
        config = DataConfig(
            source="made_up", arguments={"words": tokens // 2}, cache_dir=f"{directory}/cache"
        )
        work = Preparation.find(config, TokenizerConfig(path=str(path)), None)
        began = time.perf_counter()
        work.run(workers=workers)
        seconds = time.perf_counter() - began
        prepared_tokens = sum(open_prepared(work.directory).manifest.tokens.values())
    mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(
        f"{prepared_tokens:,} tokens in {seconds:,.0f} s ({prepared_tokens / seconds:,.0f} "
        f"tokens/s); peak memory: reader {mine:,.0f} MiB, largest worker {child:,.0f} MiB, "
        f"together at most {mine + workers * child:,.0f} MiB"
    )


def sparse(directory: Path, tokens: int) -> None:
    """Write prepared text as sparse files, which open like real ones."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(
        models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>")
    ).to_str()
    (directory / "tokenizer.json").write_text(tokenizer)
    size = 512 * MIB // 2
    counts = {"train": tokens, "validation": size // 20, "test": size // 20}
    shards: dict[str, list[dict[str, object]]] = {}
    for split, count in counts.items():
        shards[split] = []
        for index in range(-(-count // size)):
            name, mine = f"{split}-{index:05d}-0000", min(size, count - index * size)
            for suffix, length in ((".bin", 2 * mine), (".ends", 4 * (mine // 1000))):
                with (directory / f"{name}{suffix}").open("wb") as file:
                    file.truncate(length)
            about = {"documents": mine // 1000, "sha256": "0" * 64, "ends_sha256": "0" * 64}
            shards[split].append({"name": name, "tokens": mine, **about})
    import hashlib

    manifest = {
        "format": 2,
        "request": {"source": "made_up"},
        "source": {},
        "dtype": "<u2",
        "end_of_text": 0,
        "tokenizer_sha256": hashlib.sha256(tokenizer.encode()).hexdigest(),
        "bad_rows": 0,
        "tokens": counts,
        "documents": {split: count // 1000 for split, count in counts.items()},
        "shards": shards,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))


def _opened(directory: str, barrier: object, results: object) -> None:
    from trainer.data.order import sample_indices
    from trainer.data.packing import StreamBlocks
    from trainer.data.prepared import open_prepared

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    barrier.wait()  # type: ignore[attr-defined]
    began = time.perf_counter()
    text = open_prepared(Path(directory))
    opened = time.perf_counter() - began
    blocks = StreamBlocks(text.train, 2048)
    numbers = np.arange(10**9, 10**9 + 64)
    blocks.read(sample_indices(0, numbers, len(blocks)))
    first = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results.put((opened, first, (after - before) / 1024))  # type: ignore[attr-defined]


def open_many(tokens: int) -> None:
    """Measure opening, reading sample 10^9, and memory, in one process, then in 64 in parallel."""
    import trainer.data.packing  # noqa: F401  once, before the processes are forked

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        sparse(Path(directory), tokens)
        for count in (1, 64):
            barrier, results = context.Barrier(count), context.Queue()
            arguments = (directory, barrier, results)
            processes = [context.Process(target=_opened, args=arguments) for _ in range(count)]
            for process in processes:
                process.start()
            measured = np.array([results.get() for _ in processes])
            for process in processes:
                process.join()
            opened, first, extra = measured.max(axis=0)
            print(
                f"{tokens:,} tokens, {count:2} processes: open after {opened:.3f} s, batch of 64 "
                f"at sample 10^9 after {first:.3f} s, {extra:.0f} MiB more (maxima over processes)"
            )


def read(directory: Path, workers: int) -> None:
    """Measure tokens per second from a warm page cache, through the loader that training uses."""
    import torch
    from torch.utils.data import DataLoader

    from trainer.data.config import DataConfig
    from trainer.data.corpus import corpus_at
    from trainer.data.dataset import CountingSampler, TrainingSamples

    torch.set_num_threads(1)
    for length in (2_048, 4_096, 32_768, 131_072):
        config = DataConfig(sequence_length=length, prepared=str(directory))
        samples = TrainingSamples(corpus_at(config, [str(directory)]), config, 0)
        size = max(2**19 // length, 1)
        for processes in (0, workers):
            sampler = CountingSampler(40, size)
            loader = DataLoader(
                samples, batch_sampler=sampler, collate_fn=lambda b: b, num_workers=processes
            )
            batches = iter(loader)
            next(batches)
            began = time.perf_counter()
            count = sum(batch["labels"].numel() for batch in batches)
            rate = count / (time.perf_counter() - began)
            print(
                f"blocks of {length:7,}, {processes} workers: {rate / 1e6:6.1f} million tokens/s, "
                f"each read a sample of {length * 2 / 1024:,.0f} KiB"
            )


if __name__ == "__main__":
    main()
