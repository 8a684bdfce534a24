"""One column of files, as other programs write them, and of files that are broken."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.common.errors import UserError
from trainer.data import readers
from trainer.data.readers import format_of, read_column

ODD = [
    *("null", "NA", "None", "nan", "N/A", "true", "TRUE", "007", "1.50", "1e5", "-", "#N/A"),
    *("2024-01-01", "12:30", "{}", "[]", '"', '""', '"a" and "b"', "it's", "a,b;c", "\\n", "\\"),
    *(
        " space around ",
        "z\u00fcrich \u4e2d\u6587 \U0001f600",
        "\u2028 line \x85 ends \x1e",
        "=1+1",
        "x" * 200_000,
    ),
]
"""Texts that readers take for something else."""
LINES = ["a line\nand another", "ends\r\nof Windows", "a\ttab", "\n\nblank", "ends in a line\n"]
"""Texts that a file with one row a line cannot hold."""


def read(path, column="text"):
    return [text for text in read_column(str(path), column) if text is not None]


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(texts):
    """``texts`` beside columns that change their types."""
    return pd.DataFrame({"id": range(len(texts)), "text": texts, "other": [None] * len(texts)})


# ------------------------------------------------- text as text


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_csv_holds_any_text(tmp_path, ending, quoting):
    texts = [*ODD, *LINES]
    table(texts).to_csv(tmp_path / "a.csv", index=False, lineterminator=ending, quoting=quoting)
    assert read(tmp_path / "a.csv") == texts


def test_csv_of_the_standard_library_is_read(tmp_path):
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text"], *([text] for text in ODD + LINES)])
    assert read(tmp_path / "a.csv") == ODD + LINES


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_tsv_holds_any_text_without_tabs_and_lines(tmp_path, ending):
    rows = [["id", "text", "other"], *([str(i), text, ""] for i, text in enumerate(ODD))]
    content = "".join("\t".join(row) + ending for row in rows)
    assert read(written(tmp_path, "a.tsv", content)) == ODD


@pytest.mark.parametrize("ascii_only", [True, False])
def test_jsonl_holds_any_text_whatever_its_other_columns(tmp_path, ascii_only):
    others = [None, 1, 1.5, "a", [1, "a"], {"b": {"c": None}}, True, 2**80, float("nan")]
    texts = [*ODD, *LINES]
    rows = [{"meta": others[i % len(others)], "text": text} for i, text in enumerate(texts)]
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    assert read(written(tmp_path, "a.jsonl", "\n".join(lines))) == texts  # no line end at the end
    assert read(written(tmp_path, "b.jsonl", "\r\n".join(lines) + "\r\n")) == texts
    assert read(written(tmp_path, "c.jsonl", "\n\n \n".join(["", *lines, ""]))) == texts
    assert read(written(tmp_path, "d.json", json.dumps(rows, indent=1))) == texts
    assert read(written(tmp_path, "e.json", json.dumps(rows[0]))) == texts[:1]
    assert read(written(tmp_path, "f.json", "\n \r\n " + json.dumps(rows, indent=1))) == texts


def test_parquet_and_arrow_hold_any_text_of_any_type_of_text(tmp_path):
    texts = [*ODD, None, "", *LINES]
    expected = [text for text in texts if text is not None]
    kinds = pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())
    for number, kind in enumerate(kinds):
        column = pa.array(texts, pa.string()).cast(kind)
        rows = pa.table({"number": range(len(texts)), "text": column})
        pq.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=7)
        for name, new in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
            with new(tmp_path / f"{number}-{name}.arrow", rows.schema) as writer:
                writer.write_table(rows, max_chunksize=5)
        for path in tmp_path.glob(f"{number}*"):
            assert read(path) == expected, path


def test_only_the_column_of_the_text_is_read(tmp_path):
    """The others may be anything, also no UTF-8."""
    content = b"other,text,other\n\xff,first,\xfe\n1,second,\n"
    assert read(written(tmp_path, "a.csv", content)) == ["first", "second"]
    assert read(written(tmp_path, "a.tsv", content.replace(b",", b"\t"))) == ["first", "second"]
    lines = b'{"name": "\xff", "text": "first"}\n{"text": "second", "name": "\\ud800"}\n'
    assert read(written(tmp_path, "a.jsonl", lines)) == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,id\nfirst,a\nsecond,b\n"),
        ("a.csv", "text,id\nfirst,a,\nsecond,b,,,\n"),  # longer rows
        ("a.csv", "text,id\nfirst\nsecond,b\n"),  # shorter ones, as Excel writes them
        ("a.csv", '"text"\n"first"\n\n"second"'),
        ("a.csv", 'id,text\r\n1,"first"\r\n\r\n2,second\r\n'),
        ("a.tsv", "text\tid\nfirst\ta\nsecond\tb\t\t\n"),
        ("a.tsv", "text\nfirst\n\nsecond\n"),
        ("a.jsonl", '{"text": "first"}\n{"text": null}\n{"text": "second"}'),
        ("a.json", '[{"text": "first"},\n{"text": "second"}]\n'),
    ],
)
def test_a_mark_of_byte_order_and_every_compression_change_nothing(tmp_path, name, content):
    compressions = {
        "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
        ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    }  # fmt: skip
    for suffix, compress in compressions.items():
        for encoding in ("utf-8", "utf-8-sig"):
            path = written(tmp_path, name + suffix, compress(content.encode(encoding)))
            assert read(path) == ["first", "second"], path
        # Members one after the other, as `cat a.gz b.gz` makes them.
        if suffix and name == "a.tsv":
            halves = (content[:9].encode(), content[9:].encode())
            path = written(tmp_path, name + suffix, b"".join(map(compress, halves)))
            assert read(path) == ["first", "second"], path


CELLS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"))


@pytest.mark.slow
@given(st.lists(st.tuples(CELLS, CELLS)))
def test_csv_is_read_as_pandas_writes_it(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    pd.DataFrame(rows, columns=["text", "other"], dtype=object).to_csv(path, index=False)
    assert read(path) == [text for text, _ in rows]


def test_a_file_of_text_is_one_document_unless_it_is_long(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST", 3000)
    book = "One book.\nOf two lines.\n"
    assert read(written(tmp_path, "a.txt", book)) == [book]
    assert read(written(tmp_path, "b.txt.gz", gzip.compress(book.encode("utf-8-sig")))) == [book]
    assert read(written(tmp_path, "c.rst", book.replace("\n", "\r\n"))) == [book]
    assert read(written(tmp_path, "d.txt", "")) == []
    long = read(written(tmp_path, "e.md", "Line of a long book.\n" * 500))
    assert "".join(long) == "Line of a long book.\n" * 500
    assert 4 <= len(long) <= 6
    assert all(text.endswith("book.\n") and len(text) <= 3000 for text in long)


# ------------------------------------------------- what is broken


ROW = '{"text": "some text"}\n'
BROKEN = [
    ("a.jsonl", ROW * 2 + '{"text": "cut', 3),
    ("a.jsonl", ROW + "\n" + ROW + "text\n" + ROW, 4),
    ("a.jsonl", ROW + '{"body": "text"}\n', 2),
    ("a.jsonl", ROW + '"text"\n', 2),
    ("a.jsonl", ROW + '{"text": 7}\n', 2),
    ("a.jsonl", ROW + '{"text": true}\n', 2),
    ("a.jsonl", ROW + '{"text": "a", "deep": ' + "[" * 100_000 + "]" * 100_000 + "}\n", 2),
    ("a.jsonl", ROW + '{"text": {"a": "text"}}\n', 2),
    ("a.jsonl", ROW + '{"text": "half of \\ud83d a character"}\n', 2),
    ("a.jsonl", (ROW * 3).encode() + b'{"text": "\xff"}\n', 4),
    ("a.jsonl", (ROW * 3).encode("utf-16"), 1),
    ("a.json", "[" + ROW, 1),
    ("a.json", '[{"text": "first"},\n{"text": "second"},\n{"body": "third"}]', 3),
    ("a.json", '[{"body": "text"}]', 1),
    ("a.json", '\n[{"text": "first"},\n{"body": "second"}]', 3),
    ("a.jsonl", ROW + "[" + ROW + "]", 2),
    ("a.csv", "body,id\ntext,1\n", 1),
    ("a.csv", "text,text\nwhich,one\n", 1),
    ("a.csv", "text;id\ntext;1\n", 1),
    ("a.csv", "", 1),
    ("a.csv", "text\nOne, two\n", 2),
    ("a.csv", 'text,id\n"of\ntwo lines",1\none, two, three\n', 4),
    ("a.csv", "id,text\n1,text\n2\n", 3),
    ("a.csv", 'text,id\n"some" text,1\n', 2),
    ("a.csv", 'text,id\nfirst,1\n"no end,1\nsecond,2\n', 3),
    ("a.csv", "text,id\nfirst,1\na\rb,2\n", 3),  # a line end that is not quoted
    ("a.csv", b"text,id\nfirst,1\nz\xfcrich,1\n", 3),
    ("a.csv", "text,id\nfirst,1\n".encode("utf-16"), 1),
    ("a.tsv", "text\tid\nfirst\t1\nsecond\n", 3),  # perhaps a text of two lines
    ("a.tsv", "text\tid\nfirst\t1\nsecond\t1\t2\n", 3),
    ("a.txt", b"first\nsecond\nz\xfcrich\n", 3),
    ("a.txt", "some text".encode("utf-16"), 1),
    ("a.parquet", b"PAR1", 1),
    ("a.arrow", b"ARROW1", 1),
]


@pytest.mark.parametrize(("name", "content", "line"), BROKEN)
def test_what_cannot_be_read_is_named_with_its_line(tmp_path, name, content, line):
    path = written(tmp_path, name, content)
    with pytest.raises(UserError, match=rf"^data\.files: {path}: line {line}: ") as raised:
        read(path)
    message = str(raised.value)
    assert "\n" not in message
    assert message.isprintable()


def test_a_line_that_is_cut_is_not_called_a_list(tmp_path):
    path = written(tmp_path, "a.jsonl", ROW + '{"text":\n')
    with pytest.raises(UserError, match=r"line 2: Expecting value at column 9$"):
        read(path)


@pytest.mark.parametrize(
    "values", [[1, 2], [None, True], [["a", "b"]], [[{"role": "user", "content": "Hello"}]], [b"a"]]
)
def test_a_column_that_is_no_text_is_refused(tmp_path, values):
    rows = pa.table({"text": ["first", *["text"] * (len(values) - 1)], "chat": values})
    pq.write_table(rows, tmp_path / "a.parquet")
    assert len(read(tmp_path / "a.parquet")) == len(values)
    line = len(values) if values[0] is None else 1
    with pytest.raises(UserError, match=rf"a\.parquet: line {line}: chat: expected text, got "):
        read(tmp_path / "a.parquet", "chat")
    with pytest.raises(UserError, match="expected one column 'body', got "):
        read(tmp_path / "a.parquet", "body")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.tsv"])
def test_a_compressed_file_that_is_cut_is_named(tmp_path, name, suffix):
    compress = {
        ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
        ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    }[suffix]  # fmt: skip
    rows = {"a.txt": "some text\n", "a.jsonl": ROW, "a.csv": "text\n", "a.tsv": "text\n"}[name]
    whole = compress((rows * 8_000).encode())
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 255
    for content in (whole[:-1], whole[: len(whole) // 2], whole[:9], b"", b"no archive", damaged):
        path = written(tmp_path, name + suffix, bytes(content))
        with pytest.raises(UserError, match=rf"^data\.files: {path}: line \d+: "):
            read(path)
    assert len(list(read(written(tmp_path, name + suffix, whole)))) >= 1


def test_the_last_suffix_but_that_of_a_compression_names_the_format():
    names = ("a.md/v1.5.JSONL.gz", "data.txt.csv", "a.txt/b", "a.gz", "a.jsonl.bin")
    assert [*map(format_of, names)] == [".jsonl", ".csv", None, None, None]


def test_a_file_without_a_reader_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.files: .*a\.bin: expected \.txt, "):
        read(written(tmp_path, "a.bin", "text"))


def test_rows_come_before_the_file_ends(tmp_path):
    path = written(tmp_path, "a.csv", "text\n" + "some text\n" * 10**5 + '"')
    rows = read_column(str(path), "text")
    assert [next(rows), next(rows)] == [None, "some text"]
