"""Where text comes from."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest

from trainer.commands.hydra.composing import compose_words
from trainer.common.errors import UserError
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.files import File
from trainer.data.plan import request_of
from trainer.data.sources import (
    TEXT_SOURCES,
    code_hash,
    list_source,
    read_source,
    source_problems,
    stdlib_docs,
    text_source,
)


@pytest.fixture(scope="module")
def docs():
    return stdlib_docs()


def test_stdlib_docs_are_megabytes_of_clean_prose(docs):
    assert 1.5e6 < sum(map(len, docs)) < 4e6
    assert len(set(docs)) == len(docs)
    assert all(text.isascii() and text.isprintable() for text in docs)


def test_stdlib_docs_hold_what_pydoc_shows(docs):
    import textwrap

    folded = " ".join(textwrap.dedent(textwrap.TextWrapper.__doc__).split())
    assert any(folded[:60] in text for text in docs)


def test_files_have_one_identity_wherever_they_lie(tmp_path):
    for place in ("here", "there"):
        (tmp_path / place / "sub").mkdir(parents=True)
        (tmp_path / place / "a.txt").write_text("some text")
        (tmp_path / place / "sub" / "b.txt").write_text("more text")
    first, second = (
        list_source(DataConfig(source="files", files=[str(tmp_path / place)])).identity
        for place in ("here", "there")
    )
    assert first == second == {"revision": None, "files": [["a.txt", 9], ["sub/b.txt", 9]]}


def test_a_list_of_addresses_stands_for_its_lines(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "list").write_text(f"{tmp_path}/a.txt\n\n")
    config = DataConfig(source="files", files=[f"@{tmp_path}/list"])
    assert [file.name for file in list_source(config).files] == ["a.txt"]
    with pytest.raises(UserError, match=r"the list .*missing' cannot be read"):
        list_source(DataConfig(source="files", files=[f"@{tmp_path}/missing"]))


def test_of_a_list_only_addresses_that_match_a_pattern_are_read(tmp_path):
    for name in ("web-0.txt", "web-1.txt", "books-0.txt"):
        (tmp_path / name).write_text("some text")
    (tmp_path / "list").write_text("\n".join(str(path) for path in sorted(tmp_path.iterdir())))

    def names(*patterns):
        config = DataConfig(
            source="files", files=[f"@{tmp_path}/list"], allow_patterns=list(patterns)
        )
        return [file.name for file in list_source(config).files]

    assert names() == ["books-0.txt", "web-0.txt", "web-1.txt"]
    assert names("*/web-*") == ["web-0.txt", "web-1.txt"]
    assert names("*/web-1*", "*/books-*") == ["books-0.txt", "web-1.txt"]
    sentence = r"data.allow_patterns: none of the 3 addresses in .*books-0.txt', matches \['web'\]"
    with pytest.raises(UserError, match=sentence):
        names("web")


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


def test_parts_of_one_list_are_texts_of_their_own():
    asked = [
        request_of(
            DataConfig(source="files", files=["@list"], allow_patterns=patterns),
            TokenizerConfig(),
            None,
        )
        for patterns in ([], ["*/web/*"], ["*/books/*"])
    ]
    assert "allow_patterns" not in asked[0]  # what was prepared before there were any is found
    assert asked[1]["allow_patterns"] == ["*/web/*"] != asked[2]["allow_patterns"]


def test_a_dataset_is_the_files_of_its_configuration_and_split(tmp_path):
    """``datasets`` reads the same card from a directory as from the hub."""
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n"
        "    path: small/*.jsonl\n- config_name: large\n  data_files: large/*.jsonl\n---\n"
    )
    for name in ("small/a.jsonl", "small/b.jsonl", "large/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    config = DataConfig(source="hub", hub_name=str(tmp_path), hub_config="small")
    files = list_source(config).files
    read = [row for file in files for row in read_source(config, file)]
    assert read == ["small/a.jsonl", "small/b.jsonl"]
    with pytest.raises(UserError, match="no such split"):
        list_source(DataConfig(**{**vars(config), "hub_split": "tests"}))


def test_a_dataset_that_cannot_be_had_says_what_is_missing(monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", offline)
    with pytest.raises(UserError, match=r"'some/text' cannot be read from the hub: Couldn't"):
        list_source(DataConfig(source="hub", hub_name="some/text"))


def _half(text="ok"):
    return [text, "half \ud800"]


def _stops():
    raise SystemExit(7)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (_stops, r"'mine' failed: SystemExit\(7\)"),
        (lambda: "one text", "gave one text instead of several"),
        (lambda: None, "failed: TypeError"),
    ],
)
def test_a_source_that_fails_is_named(monkeypatch, function, sentence):
    monkeypatch.setattr("trainer.data.sources.TEXT_SOURCES", {"mine": function})
    with pytest.raises(UserError, match=sentence):
        list(read_source(DataConfig(source="mine"), File("mine", "mine", 0)))


def test_half_a_character_of_a_source_is_replaced(monkeypatch):
    monkeypatch.setattr("trainer.data.sources.TEXT_SOURCES", {"mine": _half})
    config = DataConfig(source="mine")
    assert list(read_source(config, File("mine", "mine", 0))) == ["ok", "half ?"]


def test_a_source_cannot_take_the_name_of_one_that_is_built_in():
    def files():
        return []

    with pytest.raises(UserError, match="cannot be called 'files'"):
        text_source(files)


def test_a_password_in_an_address_is_refused():
    for address in ("https://me:secret@host/a.txt", "@s3://key:secret@bucket/list"):
        (problem,) = map(str, DataConfig(source="files", files=[address]).problems())
        assert "~/.netrc" in problem
        assert "secret" not in problem
    for address in (
        "https://host/a:b@c.txt",
        "hf://datasets/a/b@main/c.txt",
        "s3://bucket/a@b.txt",
    ):
        assert DataConfig(source="files", files=[address]).problems() == []


def function_of(code):
    """A function without a source that can be read."""
    names = {}
    exec(code, names)
    return names["mine"]


def test_the_state_of_a_users_own_source_is_its_code(monkeypatch):
    def one(count=2):
        return [f"one {i}" for i in range(count)]

    def other(count=2):
        return [f"other {i}" for i in range(count)]

    identities = []
    for function in (one, other, one):
        monkeypatch.setattr("trainer.data.sources.TEXT_SOURCES", {"mine": function})
        identities.append(list_source(DataConfig(source="mine")).identity)
    assert identities[0] == identities[2] != identities[1]
    assert "code" not in list_source(DataConfig()).identity  # of other sources names stay


def test_the_code_of_a_source_that_cannot_be_read_is_its_bytecode_and_constants():
    code = "def mine():\n    return [x for x in ('a', 'b') if x in {'a', 'c', 'd'}]"
    before = code_hash(function_of(code))
    assert code_hash(function_of(f"\n\n{code}  # the same")) == before
    for old, new in (("('a', 'b')", "('a', 'e')"), ("in {'a'", "not in {'a'"), ("'d'}", "'e'}")):
        assert code_hash(function_of(code.replace(old, new))) != before
    assert code_hash(len) == code_hash(print)  # neither has any


def test_a_source_of_the_users_own(monkeypatch):
    monkeypatch.setattr("trainer.data.sources.TEXT_SOURCES", dict(TEXT_SOURCES))

    @text_source
    def numbers(upto=3):
        return [f"number {i}" for i in range(upto)]

    config = DataConfig(source="numbers", arguments={"upto": 2})
    assert source_problems(config) == []
    (file,) = list_source(config).files
    from trainer.data import sources

    monkeypatch.setitem(sources.TEXT_SOURCES, "numbers", numbers)
    assert list(read_source(config, file)) == ["number 0", "number 1"]
    assert (
        "does not take them"
        in source_problems(DataConfig(source="numbers", arguments={"up": 2}))[0].message
    )
    assert source_problems(DataConfig(source="number"))[0].hint == "Did you mean 'numbers'?"
