"""Damage to the files of a run, and files made up by somebody."""

import json
import os
import pickle

from trainer.runs.checkpoints import MANIFEST, digests


class Gone:
    def __repr__(self) -> str:
        return "gone"  # the same in every process


GONE = Gone()
"""In the place of a value: the key is not there."""
DEEP_LIST, DEEP_OBJECT = "[" * 100_000, '{"a":' * 100_000

NO_JSON = (
    "",
    "nothing",
    "{",
    "null",
    "[]",
    "3",
    '"text"',
    DEEP_LIST,
    DEEP_OBJECT,
    "\ufeff{}",
    "{}",
)
NO_TEXT = (b"\xff\xfe\x00", b"\x00" * 64)

STATE = [
    ("step", (GONE, None, "12", -1, 1.5, True, [], 10**30, "\ud800")),
    ("format", (0, -1, 99, "1", None, 1.5)),
    ("model", (GONE, None, [], 3, {})),
    ("model.hidden_size", ("wide", None, 0, -32, 33, 10**9, 10**30, 1.5)),
    ("model.num_hidden_layers", (0, 3, 10**5, 10**9)),
    ("model.num_attention_heads", (0, 3, 10**9)),
    ("model.num_key_value_heads", (0, 7, 10**9)),
    ("model.head_dim", (15, -2, 10**9)),
    ("model.vocab_size", (None, 0, 10, 10**9, 10**12)),
    ("model.intermediate_size", (47, 10**12)),
    ("model.rms_norm_eps", ("x", 0, -1.0)),
    ("model.tie_word_embeddings", ("yes", True)),
    ("model.qk_norm", (3, {"when": "now"}, {"when": "never"})),
    ("model.initializer", ("zeros",)),
    ("layout", (GONE, None, [], {}, {"spectra": []}, {"spectra": [{}], "layers": []})),
    ("layout.training_length", (GONE, 0, -1, "32", 10**12, None)),
    ("layout.layers", (GONE, [], [1], None, [{}] * 2)),
    ("layout.layers.0.groups", ([], [[9, 1]], [[0, 0]], [[0, -1]], [[0, 10**9]], [[0]], "x")),
    ("layout.layers.0.window", (0, -1, "4", 10**12)),
    ("layout.layers.0.qk_norm", ("x", None)),
    ("layout.spectra", (GONE, [], [3], None)),
    ("layout.spectra.0.inv_freq", ("x", [1.0] * 1000, ["a"], None, [10**400])),
    ("layout.spectra.0.temperature", (None, {"scale": None}, {"per": "day"})),
    ("layout.spectra.0.rotary_scale", ("x", None)),
    ("layout.spectra.0.long", ({}, 3, {"length": 64, "inv_freq": [1.0], "stretch": {}})),
    ("layout.spectra.0.colour", ("red",)),
    ("tokenizer", (GONE, None, 3, "", "{}", "x", DEEP_LIST, '{"model": {"type": "BPE"}}')),
    ("config", (GONE, None, [], "x", 3)),
    ("config.trainer", ([], "x", {"max_steps": -1}, {"batch_size": "x"})),
    ("config.data", (None, {"sequence_length": 0}, {"sequence_length": "x"})),
    ("config.drop", ({"at": "x"}, {"at": []})),
    ("config.seed", (-1, "x", 10**30)),
    ("config.positional", ({"layers": 3}, [])),
    ("config.controls", (3, {"a": 3})),
    ("skips", (3, [[1]], [["a", 1]], [[-1, 1]])),
    ("data", (3, {}, {"corpus": 1, "order": 2, "texts": 3})),
    ("lengths", (3, [3])),
    ("benchmarks", (3, {"a": 3})),
    ("loss", ("x", [])),
    ("versions", (3, {"unrope": 3})),
]
"""Values that ``state.json`` cannot have for whoever reads it, by their place."""

RESUMED = [
    ("tally", (GONE, None, {}, [])),
    ("tally.loss", ("x", None, [])),
    ("tally.sums", ([], [[1]], "x")),
    ("tally.spikes", (GONE, {}, {"seen": -1, "count": 0.0, "last": None})),
    ("tally.spikes.last", ([[1]], "x")),
    ("certificate", (None, {}, {"samples": "x", "last_step": "0" * 16})),
    ("certificate.last_step", ("f" * 16, "", 3)),
    ("pending_metrics", (GONE, 3, {"a": "b"})),
    ("effects", (GONE, 3, [])),
    ("effects.recalibrate.step", ("x", -1)),
    ("effects.recalibrate.sequences", (3, {"before": ["x"]})),
    ("layout_before_drop", (GONE, 3, {"layers": []})),
    ("held_out_losses", (GONE, 3, ["x"])),
    ("lengths", (GONE, [{}])),
    ("benchmarks", (GONE, [{}])),
    ("data", (GONE, {"corpus": "x", "order": "y", "texts": []})),
    ("step", (5, 10**9)),
    ("user_callbacks", (3, {"a": 3})),
]
"""The same for whoever trains on."""

FILES = {  # of a checkpoint's manifest: sizes and checksums
    "a list": "[]",
    "no sizes": '{"state.json": "x"}',
    "no checksums": '{"state.json": [3]}',
    "a size in words": '{"state.json": ["3", "x"]}',
    "a negative size": '{"state.json": [-3, "x"]}',
    "a huge size": '{"state.json": [1e999, "x"]}',
    "a checksum that is a number": '{"state.json": [3, 4]}',
    "a parent": '{"../../config.yaml": [3, "x"]}',
    "an absolute path": '{"/etc/passwd": [3, "x"]}',
    "dots": '{"..": [3, "x"]}',
    "a name without letters": '{"": [3, "x"]}',
    "a long name": json.dumps({"a" * 5000: [3, "x"]}),
    "a zero byte": '{"a\\u0000b": [3, "x"]}',
    "a lone surrogate": '{"\\ud800": [3, "x"]}',
    "another file": '{"none": [3, "x"]}',
}


def put(plain, place, value):
    """Set a value deep in plain values, or take it away."""
    *keys, last = (int(key) if key.isdecimal() else key for key in place.split("."))
    for key in keys:
        plain = plain[key]
    if value is GONE:
        del plain[last]
    else:
        plain[last] = value


def vouch_for(checkpoint):
    """A manifest of the files as they are."""
    files = digests(checkpoint, "*") | digests(checkpoint, ".metadata")
    (checkpoint / MANIFEST).write_text(json.dumps(files))


def state_with(place, value):
    def harm(run):
        path = newest(run) / "state.json"
        state = json.loads(path.read_text())
        put(state, place, value)
        path.write_text(json.dumps(state))
        vouch_for(newest(run))

    return harm


def content(name, data, vouched=True):
    """A file of the newest checkpoint, or of the run, with that content."""

    def harm(run):
        path = newest(run) / name if name in IN_CHECKPOINT else run / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
        if vouched and name in IN_CHECKPOINT and name != MANIFEST:
            vouch_for(newest(run))

    return harm


IN_CHECKPOINT = ("state.json", MANIFEST, ".metadata", "__0_0.distcp", "temperature.json")


def newest(run):
    return max((run / "checkpoints").glob("step-*"))


def missing(name):
    def harm(run):
        (newest(run) / name).unlink()
        vouch_for(newest(run))

    return harm


def directory_at(name):
    def harm(run):
        path = newest(run) / name if name in IN_CHECKPOINT else run / name
        path.unlink()
        path.mkdir()

    return harm


def pipe_at(name):
    """Nobody writes into it: whoever reads it without looking waits for ever."""

    def harm(run):
        path = newest(run) / name if name in IN_CHECKPOINT else run / name
        path.unlink()
        os.mkfifo(path)

    return harm


class Call:
    """A pickle of it calls ``module.name("harm")``, a dotted name resolved dot by dot."""

    def __init__(self, module, name, *arguments):
        self.module, self.name, self.arguments = module, name, arguments or ("harm",)

    def pickled(self):
        words = b"".join(
            b"\x8c" + bytes([len(word)]) + word.encode() for word in (self.module, self.name)
        )
        arguments = pickle.dumps(self.arguments, 4)[2:-1]
        return b"\x80\x04" + words + b"\x93" + arguments + b"R."


DCP = "torch.distributed.checkpoint.metadata"
INDEXES = {
    "nothing": b"",
    "no pickle": b"an index",
    "cut short": pickle.dumps({"a": 1})[:-3],
    "a dictionary": pickle.dumps({}),
    "a number": pickle.dumps(3),
    "another module": Call("os", "mkdir").pickled(),
    "posix": Call("posix", "mkdir").pickled(),
    "builtins": Call("builtins", "eval", "__import__('os').mkdir('harm')").pickled(),
    "through an admitted module": Call(DCP, "os.mkdir").pickled(),
    "through pathlib": Call("pathlib", "os.mkdir").pickled(),
    "through torch": Call("torch", "os.mkdir").pickled(),
    "a method of an admitted class": Call("pathlib", "PosixPath.mkdir").pickled(),
    "a function of torch": Call("torch", "load").pickled(),
    "the hub": Call("torch.hub", "load").pickled(),
    "a module's name as a name": Call("torch.serialization", "os").pickled(),
    "an admitted class alone": Call(DCP, "Metadata").pickled(),
    "a shape alone": Call("torch", "Size", [1, 2]).pickled(),
    "a persistent id": b"\x80\x04\x8c\x01aQ.",
    "an extension": b"\x80\x02\x82\x01.",
    "an old instance": b"(ios\nmkdir\n.",
    "a class changed": b"\x80\x04\x8c\x25"
    + DCP.encode()
    + b"\x8c\x08Metadata\x93N}\x8c\x01aK\x01s\x86b.",
    "a long string that is not there": b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"a.",
    "deep": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
}
"""Content of the index of tensors, which is a pickle."""


def index_with(change):
    """The index, changed in Python and written again."""

    def harm(run):
        path = newest(run) / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        place, stored = next(i for i in metadata.storage_data.items() if "embed" in i[0].fqn)
        change(metadata, place, stored, metadata.state_dict_metadata[place.fqn])
        path.write_bytes(pickle.dumps(metadata))
        vouch_for(newest(run))

    return harm


def _bytes_instead(metadata, place, stored, about):
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata.state_dict_metadata[place.fqn] = BytesStorageMetadata()


def _huge(metadata, place, stored, about):
    import torch

    about.size = about.chunks[0].sizes = torch.Size([10**6, 10**6])


CHANGES = {
    "an offset before the file": lambda m, p, stored, a: setattr(stored, "offset", -5),
    "an offset behind the file": lambda m, p, stored, a: setattr(stored, "offset", 10**9),
    "a length of nothing": lambda m, p, stored, a: setattr(stored, "length", 0),
    "a huge length": lambda m, p, stored, a: setattr(stored, "length", 10**15),
    "a length in words": lambda m, p, stored, a: setattr(stored, "length", "x"),
    "the parent": lambda m, p, stored, a: setattr(stored, "relative_path", ".."),
    "a path": lambda m, p, stored, a: setattr(stored, "relative_path", "../x.distcp"),
    "an absolute path": lambda m, p, stored, a: setattr(stored, "relative_path", "/etc/passwd"),
    "another file": lambda m, p, stored, a: setattr(stored, "relative_path", "none"),
    "a number for a name": lambda m, p, stored, a: setattr(stored, "relative_path", 3),
    "a transformation": lambda m, p, stored, a: setattr(stored, "transform_descriptors", ["zstd"]),
    "no place": lambda m, place, s, a: m.storage_data.pop(place),
    "no places": lambda m, p, s, a: m.storage_data.clear(),
    "no tensor": lambda m, place, s, a: m.state_dict_metadata.pop(place.fqn),
    "no tensors": lambda m, p, s, a: m.state_dict_metadata.clear(),
    "no pieces": lambda m, p, s, about: about.chunks.clear(),
    "two pieces": lambda m, p, s, about: about.chunks.append(about.chunks[0]),
    "a shape in words": lambda m, p, s, about: setattr(about, "size", "x"),
    "a huge shape": _huge,
    "bytes for a tensor": _bytes_instead,
    "no type": lambda m, p, s, about: setattr(about, "properties", None),
}


MARKS = ("[]", "{}", "3", '{"format": "x"}', '{"format": 99, "program": "unrope"}',
         '{"format": 1, "program": "another"}', DEEP_LIST, b"\xff")  # fmt: skip
CONFIGS = ("", "[]", "3", "a: [", "a: b: c", "\t", "!!python/object:os.system {}", b"\xff\xfe\xfa",
           "trainer: 3", "trainer: {max_steps: x}", "trainer: {max_steps: -1}", "seed: .nan",
           "data: {sequence_length: 0}", "&a [*a]", "[" * 1000)  # fmt: skip
METRICS = ("a,b\n1,2\n", "step\nx\n", "step,loss\n1,x\n", "step,loss\n-,1\n",
           "step\n1\n1,2,3\n", "step,loss\n1.5,2\n", b"\xff\xfe\xfa\n1\n",
           "step,loss\n\x00,1\n")  # fmt: skip
COEFFICIENTS = (float("nan"), 1e300, -1, "a", None)
FITTED = {"coefficient": 0.1, "per": "sequence", "lengths": [1], "text": "", "tokens": 3}
TEMPERATURES = (
    *("", "[]", "{}", DEEP_LIST, b"\xff", json.dumps({**FITTED, "per": "day"})),
    *(json.dumps({**FITTED, "coefficient": value}) for value in COEFFICIENTS),
)
