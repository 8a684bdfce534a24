"""Documents of files, of datasets and of Python itself."""

from __future__ import annotations

import gzip
import io
import json
import textwrap
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from trainer.commands import compose_words
from trainer.common.errors import UserError
from trainer.common.registry import Registry
from trainer.config import DataConfig, TokenizerConfig
from trainer.data import readers, sources
from trainer.data.corpus import prepare_corpus
from trainer.data.sources import (
    documents,
    find_files,
    revision_of,
    source_of,
    stdlib_docs,
    text_source,
)

TEXTS = [f"Text {i}. " * i for i in range(1, 150)]


def files_of(*paths, **keys):
    return DataConfig(source="files", files=[str(path) for path in paths], **keys)


def state_of(config):
    return source_of(config).state(config)


def read(config, tmp_path):
    return list(documents(replace(config, cache_dir=str(tmp_path / "cache"))))


@pytest.mark.slow
def test_stdlib_docs_are_megabytes_of_clean_prose_that_pydoc_shows():
    docs = stdlib_docs()
    assert 1.5e6 < sum(map(len, docs)) < 4e6
    assert len(set(docs)) == len(docs)
    assert all(text.isascii() and text.isprintable() for text in docs)
    folded = " ".join(textwrap.dedent(textwrap.TextWrapper.__doc__).split())
    assert any(folded[:60] in text for text in docs)


def test_a_name_may_hold_spaces_and_brackets(tmp_path):
    paths = [tmp_path / name for name in ("my text.txt", "part[1].txt")]
    for path in paths:
        path.write_text("some text")
    (tmp_path / "list").write_text("\n".join(map(str, paths)))
    assert find_files(files_of(f"@{tmp_path}/list")) == [str(path) for path in paths]


def test_a_directory_with_brackets_may_lie_in_a_hidden_one(tmp_path):
    place = tmp_path / "a[1]" / ".cache"
    (place / ".git").mkdir(parents=True)
    for path in (place / "x.txt", place / ".git" / "y.txt"):
        path.write_text("some text")
    assert find_files(files_of(place)) == [str(place / "x.txt")]


def test_files_are_named_by_paths_directories_globs_and_lists(tmp_path):
    paths = [tmp_path / name for name in ("books-0.txt", "sub/web-1.txt", "web-0.txt")]
    (tmp_path / "sub").mkdir()
    for path in paths:
        path.write_text("some text")
    (tmp_path / "list").write_text("\n".join(map(str, paths)) + "\n\n")
    names = [Path(path).name for path in find_files(files_of(tmp_path))]
    assert names == ["books-0.txt", "web-1.txt", "web-0.txt"]
    twice = files_of(tmp_path / "web-*", tmp_path / "web-0.txt")
    assert find_files(twice) == [str(paths[2])]

    def listed(*patterns):
        config = files_of(f"@{tmp_path}/list", allow_patterns=list(patterns))
        return find_files(config)

    assert listed() == [str(path) for path in paths]
    assert listed("*/web-1*", "*/books-*") == [str(path) for path in paths[:2]]
    with pytest.raises(FileNotFoundError, match=r"data.files: there is no file .*gone"):
        find_files(files_of(tmp_path / "gone.txt"))
    with pytest.raises(UserError, match=r"data.files: .*list: expected .txt"):
        read(files_of(tmp_path / "list"), tmp_path)


def test_an_address_of_the_web_may_end_in_a_query(tmp_path, monkeypatch):
    address = "https://no.where/a.txt.gz?download=true&file=b.csv"
    content = gzip.compress(b"some text")
    for name in ("who.txt", "what?.txt"):
        (tmp_path / name).write_text("some text")
    assert len(find_files(files_of(tmp_path / "w??.txt"))) == 1  # here, it is any character
    assert read(files_of(tmp_path / "what?.txt"), tmp_path) == ["some text"]
    monkeypatch.setattr(readers, "_raw", lambda path: io.BytesIO(content))
    assert find_files(files_of(address)) == [address]
    assert read(files_of(address), tmp_path) == ["some text"]


@pytest.mark.parametrize("nothing", ["memory://nothing/*.txt", "memory://shelf/empty"])
def test_a_place_elsewhere_without_files_is_missed(nothing):
    memory = fsspec.filesystem("memory")
    memory.pipe("/shelf/a.txt", b"some text")
    memory.makedirs("/shelf/empty", exist_ok=True)
    assert find_files(files_of("memory://shelf/*.txt")) == ["memory:///shelf/a.txt"]
    with pytest.raises(FileNotFoundError, match=r"data.files: there is no file .*(empty|nothing)"):
        find_files(files_of("memory://shelf/*.txt", nothing))
    memory.rm("/shelf", recursive=True)


@pytest.mark.slow
def test_a_saved_dataset_is_its_rows_without_what_lies_beside_them(tmp_path):
    import datasets

    rows = datasets.Dataset.from_dict({"text": TEXTS, "number": range(len(TEXTS))})
    rows.save_to_disk(tmp_path / "rows", num_shards=3)
    datasets.load_from_disk(str(tmp_path / "rows")).map(lambda row: {"text": row["text"].lower()})
    assert list((tmp_path / "rows").glob("cache-*.arrow"))
    assert read(files_of(tmp_path / "rows"), tmp_path) == TEXTS
    splits = datasets.DatasetDict({"train": rows, "test": rows.select(range(3))})
    splits.save_to_disk(tmp_path / "splits")
    assert read(files_of(tmp_path / "splits"), tmp_path) == TEXTS[:3] + TEXTS
    assert read(files_of(tmp_path / "splits" / "test"), tmp_path) == TEXTS[:3]
    states = tmp_path / "geography"  # of nobody else's name
    states.mkdir()
    for name in ("country", "state"):
        (states / f"{name}.json").write_text(json.dumps({"text": name}))
    assert read(files_of(states), tmp_path) == ["country", "state"]


def test_files_of_a_saved_dataset_are_those_of_its_rows(tmp_path):
    """Those of JSON beside them describe it, unless they only have such a name."""
    both = ("dataset_info.json", "state.json")
    for place in ("saved", "plain"):
        (tmp_path / place).mkdir()
        for name in ("cache-1.arrow", "data-1.arrow", *both[place == "plain" :]):
            (tmp_path / place / name).touch()
    (tmp_path / "dataset_dict.json").touch()
    names = ["plain/cache-1.arrow", "plain/data-1.arrow", "plain/state.json", "saved/data-1.arrow"]
    assert find_files(files_of(tmp_path)) == [str(tmp_path / name) for name in names]


def test_documents_without_text_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "TEXT_SOURCES", Registry("text source"))

    @text_source()
    def sparse():
        return [None, "a text", "", " \n", "."]

    assert read(DataConfig(source="sparse"), tmp_path) == ["a text", "."]


def test_the_state_of_files_is_their_names_and_contents_wherever_they_lie(tmp_path, monkeypatch):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text("some text")
    here, there = (files_of(tmp_path / place) for place in ("here", "there"))
    assert state_of(here) == state_of(there)
    (tmp_path / "there" / "a.txt").write_text("some_text")
    assert state_of(here) != state_of(there)
    by_address = files_of(f"file://{tmp_path}/there")
    assert state_of(by_address) == state_of(there)
    assert not source_of(there).is_remote(by_address)
    monkeypatch.setattr(sources, "READ_WHOLE", 4)
    monkeypatch.setattr(sources, "END", 3)
    assert state_of(here) == state_of(there)  # of a large file both ends count
    (tmp_path / "there" / "a.txt").write_text("some tent")
    assert state_of(here) != state_of(there)
    states = [state_of(files_of(f"@https://no.where/{name}", "s3://no/where")) for name in "aba"]
    assert states[0] == states[2] != states[1]  # without a network


def test_the_state_of_a_list_is_that_of_its_addresses(tmp_path):
    config, states = files_of(f"@{tmp_path}/list"), []
    (tmp_path / "a.txt").write_text("some text")
    for name in "aba":
        lines = f"{tmp_path}/a.txt\nhttps://no.where/{name}.txt\n"
        (tmp_path / "list").write_text(lines)
        states.append(state_of(config))
    assert states[0] == states[2] != states[1]
    assert states[0] == state_of(files_of(*lines.split()))
    here = replace(config, allow_patterns=["/*"])
    assert source_of(config).is_remote(config)
    assert not source_of(here).is_remote(here)
    assert state_of(here) == state_of(files_of(tmp_path))


def test_the_state_of_a_dataset_in_a_directory_is_its_files(tmp_path):
    path = tmp_path / "train" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "a"}')
    config = DataConfig(source="hub", hub_name=str(tmp_path))
    assert not source_of(config).is_remote(config)
    states = [state_of(config), state_of(config)]
    path.write_text('{"text": "b"}')
    states.append(state_of(config))
    path.rename(tmp_path / "a.jsonl")  # of another split
    states.append(state_of(config))
    assert states[0] == states[1]
    assert len({*states}) == 3
    elsewhere = replace(config, hub_name="some/text")
    assert source_of(elsewhere).is_remote(elsewhere)
    assert state_of(elsewhere) is None


@pytest.mark.slow
def test_a_dataset_is_read_by_its_configuration_and_split(tmp_path):
    """``datasets`` reads the same card from a directory as from the hub."""
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n"
        "    path: small/*.jsonl\n- config_name: large\n  data_files: large/*.jsonl\n---\n"
    )
    for name in ("small/a.jsonl", "small/b.jsonl", "large/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    config = DataConfig(source="hub", hub_name=str(tmp_path), hub_config="small")
    assert read(config, tmp_path) == ["small/a.jsonl", "small/b.jsonl"]


def test_a_dataset_of_the_hub_is_one_of_its_commits(tmp_path, monkeypatch):
    def dataset_info(_, name, revision):
        if name == "some/gone":
            raise ConnectionError("no network")
        return SimpleNamespace(sha=f"{name} {revision}")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", dataset_info)
    config = DataConfig(source="hub", hub_name="some/text", revision="v1")
    assert revision_of(config) == "some/text v1"
    for here in (replace(config, hub_name=str(tmp_path)), replace(config, source="files")):
        assert revision_of(here) == "v1"
    with pytest.raises(UserError, match=r"^data\.hub_name: some/gone: no network"):
        revision_of(replace(config, hub_name="some/gone"))


def test_prose_of_the_standard_library_is_clean(tmp_path, monkeypatch):
    """Docstrings at any depth, but not of tests, names or numbers."""
    long = " ".join(["word"] * 20)
    code = f'''"""Module   {long}"""
if True:
    class A:
        """Class \u00e9{long} -----"""

        async def f():
            """Short."""
            try:
                pass
            except ValueError:
                def g():
                    """Function {long}\n    ======\n"""
    x = """No docstring {long}"""
'''
    for name in ("a.py", "package/b.py", "test/c.py", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code if name != "package/b.py" else f"'B {long}'", "utf-8")
    (tmp_path / "broken.py").write_text("def")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr("pydoc_data.topics.topics", {"t": f"Topic {long}", "u": "Short."})
    documents = stdlib_docs.__wrapped__()
    names = [f"Module {long}", f"Class {long} -", f"Function {long} =", f"B {long}"]
    assert sorted(documents) == sorted([*names, f"Topic {long}"])
    assert len(documents) == 5


def test_every_part_of_dolma_belongs_to_one_text_of_its_mixture():
    mixture = compose_words(["data=dolma_reweighted"]).values["data"]["mixture"]
    assert sum(text["weight"] for text in mixture.values()) == pytest.approx(1)
    web = "c4-filtered cc_en_head cc_en_middle cc_en_tail cc_news_head falcon-refinedweb-filtered"
    parts = {
        **{name: ["web"] for name in web.split()},
        **{name: [name] for name in ("starcoder", "reddit", "pes2o", "books", "tulu_flan", "wiki")},
        "redpajama-stackexchange": ["stackexchange"],
        "redpajama-arxiv": ["arxiv"],
        "proof_pile_2-open_web_math": ["open_web_math"],
        "proof_pile_2-algebraic_stack": ["algebraic_stack"],
    }
    for part, texts in parts.items():
        address = f"https://olmo-data.org/dolma-v1_7/{part}/{part}-0000.json.gz"
        assert texts == [
            name
            for name, text in mixture.items()
            if any(fnmatchcase(address, glob) for glob in text["allow_patterns"])
        ]


def test_a_source_of_the_users_own_has_its_code_as_its_state(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "TEXT_SOURCES", Registry("text source"))

    @text_source()
    def numbers(upto=3):
        return [f"number {i}" for i in range(upto)]

    config = DataConfig(source="numbers", arguments={"upto": 2})
    assert read(config, tmp_path) == ["number 0", "number 1"]
    before = state_of(config)
    assert state_of(config) == before

    @text_source()
    def numbers(upto=3):  # noqa: F811
        return []

    assert state_of(config) != before
    with pytest.raises(UserError, match=r"data.source: expected one of .*numbers, got 'letters'"):
        state_of(DataConfig(source="letters"))


@pytest.mark.parametrize(
    ("arguments", "documents_read"),
    [({"least": 1}, 1), ({"least": 1, "key": 2}, 3), ({}, None), ({"least": 1, "upto": 3}, None)],
)
def test_a_source_of_the_users_own_gets_the_arguments_that_it_takes(
    monkeypatch, tmp_path, arguments, documents_read
):
    monkeypatch.setattr(sources, "TEXT_SOURCES", Registry("text source"))

    @text_source()
    def numbers(*, least, key=0):
        return ["some text"] * (least + key)

    config = DataConfig(source="numbers", arguments=arguments)
    if documents_read is None:
        with pytest.raises(UserError, match=r"^data\.arguments: numbers: .*'(least|upto)'"):
            read(config, tmp_path)
    else:
        assert len(read(config, tmp_path)) == documents_read


@pytest.mark.parametrize("source", ["files", "hub", "stdlib_docs"])
def test_arguments_are_for_the_sources_that_take_them(source):
    config = DataConfig(source=source, hub_name="some/text", arguments={"count": 3})
    with pytest.raises(UserError, match=r"data\.arguments"):
        source_of(config)


def test_files_that_are_not_named_are_asked_for(tmp_path):
    config = DataConfig(source="files", cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"^data\.files: "):
        prepare_corpus(config, TokenizerConfig())
