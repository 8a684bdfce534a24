"""Files of a user's own: groups of configuration, text, published models, places to write to."""

import json

DEEP = 100_000

GROUPS = {
    "not YAML": ("a: [", "line 2"),
    "a tab": ("model:\n\thidden_size: 3", "line 3"),
    "a key twice": ("seed: 1\nseed: 2", "seed"),
    "a tag of Python": ("seed: !!python/object/apply:os.mkdir [harm]", "constructor"),
    "a tag of nobody": ("seed: !mine 3", "constructor"),
    "an unset variable": ("name: ${oc.env:NO_SUCH_VARIABLE}", "NO_SUCH_VARIABLE"),
    "no such resolver": ("name: ${no.such:1}", "no.such"),
    "itself": ("seed: ${seed}", "seed"),
    "a circle": ("seed: ${trainer.max_steps}\ntrainer: {max_steps: '${seed}'}", "Recursive"),
    "a key that is not there": ("name: ${no_such_key}", "no_such_key"),
    "an open brace": ("name: ${a", "name"),
    "a list": ("- seed: 1", "expected keys with values"),
    "a word": ("seed", "seed: expected a whole number, got null"),
    "an unknown option": ("defaults:\n- override /model: nanoo", "nanoo"),
    "an unknown group": ("defaults:\n- /modell: nano", "modell"),
    "defaults that are no list": ("defaults: nano", "expected a list"),
    "its own default": ("defaults: [own]", "leads back to itself"),
    "an unknown key": ("model: {hiden_size: 3}", "hiden_size"),
    "a value for a group": ("model: 3", "model"),
    "a group for a value": ("seed: {a: 1}", "seed"),
    "a number that is none": ("optimizer: {lr: .nan}", "finite number"),
    "an infinite number": ("optimizer: {lr: .inf}", "finite number"),
    "a huge number": ("seed: 1" + "0" * 40, "seed"),
    "bytes": ("seed: !!binary aGk=", "seed"),
    "deep": ("a: " + "[" * 600 + "]" * 600, "experiment"),
    "an anchor in itself": ("a: &a [*a]", "a"),
    "no text": (b"\xff\xfe\xfa", "experiment"),
    "a zero byte": ("seed: 1\x00", "experiment"),
}
"""Experiments of a directory of ``--config-dir``, and a part of what is said."""

NO_MARK = ("seed: 1", "expected '# @package _global_'")
"""An experiment without its first line."""

TEXTS = {
    "deep.jsonl": ('{"text": ' + "[" * DEEP, "line 1"),
    "deeper.jsonl": ("[" * DEEP, "line 1"),
    "number.jsonl": ('{"text": ' + "1" * 10_000 + "}", "line 1"),
    "third.jsonl": ('{"text": "a"}\n{"text": "b"}\n{"text": 3}\n', "line 3"),
    "open.jsonl": ('{"text": "a', "line 1"),
    "list.jsonl": ("[1]\n", "is no object"),
    "other.jsonl": ('{"texts": "a"}\n', "data.text_field"),
    "null.jsonl": ('{"text": null}\n', "has no text under"),
    "halves.jsonl": ('{"text": "\\ud800"}\n', "too few different documents"),
    "bytes.jsonl": (b"\xff\xfe\n", "is not JSON"),
    "blank.jsonl": ("\n \n", "too few different documents"),
    "same.jsonl": ('{"text": "a"}\n' * 50, "too few different documents"),
    "bytes.txt": (b"abc\xff\xfe", "is not UTF-8 text"),
    "zero.txt": (b"abc\x00def", "is NUL"),
    "blank.txt": (" \n\n", "too few different documents"),
    "short.txt": ("A few words.", "too few different documents"),
    "no.parquet": (b"PAR1 and no more", "cannot be read to its end"),
    "no.arrow": (b"ARROW1", "cannot be read to its end"),
    "no.jsonl.gz": (b"no gzip", "cannot be read to its end"),
    "no.jsonl.zst": (b"no zstd", "cannot be read to its end"),
    "name.csv": ("a,b", "is not in"),
}
"""Files of text by name, and a part of what is said."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 32,
}
MODELS = {
    "not JSON": ("{", "is not JSON"),
    "deep": ("[" * DEEP, "config.json"),
    "a list": ("[]", "holds no keys"),
    "nothing in it": ("{}", "architecture"),
    "another architecture": ({"architectures": ["GPT2LMHeadModel"]}, "is not supported"),
    "an architecture that is a number": ({"architectures": 3}, "architecture"),
    "architectures in words": ({"architectures": "Llama"}, "architecture"),
    "no sizes": ({"hidden_size": None}, "hidden_size"),
    "a size in words": ({"hidden_size": "8"}, "hidden_size"),
    "a negative size": ({"hidden_size": -8}, "hidden_size"),
    "a huge size": ({"hidden_size": 10**9}, "hidden_size"),
    "a hundred thousand layers": ({"num_hidden_layers": 10**5}, "num_hidden_layers"),
    "two thousand layers": ({"num_hidden_layers": 2000}, "num_hidden_layers"),
    "many heads": ({"num_attention_heads": 10**9}, "num_attention_heads"),
    "heads that do not divide": ({"num_attention_heads": 3}, "num_attention_heads"),
    "a huge vocabulary": ({"vocab_size": 10**12}, "vocab_size"),
    "a length in words": ({"max_position_embeddings": "x"}, "max_position_embeddings"),
    "a huge length": ({"max_position_embeddings": 10**15}, "max_position_embeddings"),
    "theta in words": ({"rope_theta": "x"}, "rope_theta"),
    "theta that is no number": ({"rope_theta": float("nan")}, "rope_theta"),
    "a negative theta": ({"rope_theta": -1.0}, "rope_theta"),
    "a scaling in words": ({"rope_scaling": "yarn"}, "rope_parameters"),
    "an unknown scaling": ({"rope_scaling": {"rope_type": "mine"}}, "mine"),
    "a scaling by nothing": ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    "a scaling by words": ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "factor"),
    "an activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "a norm in words": ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    "tied in words": ({"tie_word_embeddings": "x"}, "tie_word_embeddings"),
    "a window in words": ({"sliding_window": "x"}, "sliding_window"),
}
"""``config.json`` of published models: changes to a sound one, or the whole text."""

WEIGHTS = {
    "none": (None, "there is no 'model.safetensors'"),
    "empty": (b"", "truncated, damaged or no safetensors file"),
    "a huge header": ((1 << 62).to_bytes(8, "little"), "truncated, damaged"),
    "a header that is none": ((4).to_bytes(8, "little") + b"[[[[", "truncated, damaged"),
    "a header of nothing": ((2).to_bytes(8, "little") + b"{}", "tensors that are missing"),
}
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
INDEXES = {
    "a list": ("[]", "is damaged"),
    "deep": ("[" * DEEP, "is damaged"),
    "no map": ("{}", "is damaged"),
    "a parent": ('{"weight_map": {"a": "../x.safetensors"}}', "outside its directory"),
    "an absolute path": ('{"weight_map": {"a": "/etc/passwd"}}', "outside its directory"),
    "dots": ('{"weight_map": {"a": ".."}}', "outside its directory"),
    "a number": ('{"weight_map": {"a": 3}}', "is damaged"),
    "another file": ('{"weight_map": {"a": "none"}}', "is missing"),
}


def group(place, content):
    """An experiment ``own`` in the directory ``conf``."""
    path = place / "conf" / "experiment" / "own.yaml"
    path.parent.mkdir(parents=True)
    head = b"# @package _global_\n"
    path.write_bytes(head + (content if isinstance(content, bytes) else content.encode()))


def model(place, config=LLAMA, weights=None, index=None):
    """A directory ``published``."""
    path = place / "published"
    path.mkdir()
    text = config if isinstance(config, str) else json.dumps(LLAMA | config)
    (path / "config.json").write_text(text)
    if weights is not None:
        (path / "model.safetensors").write_bytes(weights)
    if index is not None:
        (path / "model.safetensors.index.json").write_text(index)
