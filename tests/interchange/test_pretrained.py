"""Published weights: the logits are those of transformers."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from trainer.common.errors import UserError
from trainer.interchange.pretrained import read_pretrained
from trainer.model.config import QKNormConfig
from trainer.model.decoder import Decoder
from trainer.model.generate import generate

ROOT = Path(__file__).parents[2]
IDS = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(1))
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0]}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def published(kind="Llama", **changes):
    """A small random model of transformers, its norms and biases not at 1 and 0."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.12,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    config = getattr(transformers, f"{kind}Config")(**shape | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture
def saved(tmp_path):
    """The directory of a small Llama, saved."""
    published().save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def assert_same_logits(directory, theirs):
    model = read_pretrained(str(directory)).decoder()
    expected = theirs(IDS).logits
    assert 0.1 < expected.std() < 10
    torch.testing.assert_close(model(IDS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("Llama", {"num_key_value_heads": 4, "head_dim": 16}),
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Llama", {"rope_parameters": YARN}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
        ("Llama", {"rope_parameters": LONG}),
        ("Llama", {"rope_parameters": LONG | {"original_max_position_embeddings": 48}}),
        (
            "Llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                "max_position_embeddings": 16,
            },
        ),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "proportional",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            },
        ),
        ("SmolLM3", {"no_rope_layers": [1, 0, 1, 1]}),
        ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
        ("SmolLM3", {"use_sliding_window": True, "sliding_window": 5}),
        ("Qwen2", {}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
        (
            "Qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
        ),
        ("Qwen3", {"head_dim": 16}),
        ("Qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN, "head_dim": 8}),
        ("Mistral", {"sliding_window": 7}),
        ("Mistral", {"sliding_window": None, "head_dim": 16}),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(tmp_path, kind, changes):
    theirs = published(kind, **changes)
    theirs.save_pretrained(tmp_path)
    assert_same_logits(tmp_path, theirs)


def test_shards(tmp_path):
    theirs = published()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_logits(tmp_path, theirs)


def test_a_file_in_the_old_style(saved):
    """As transformers 4 wrote it, with tables of rotations among the weights."""
    theirs = published()
    change_config(saved, rope_parameters=None, rope_theta=1e4, rope_scaling=None)
    change_weights(
        saved, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    )
    assert_same_logits(saved, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_of_weights(tmp_path, dtype):
    published().to(dtype).save_pretrained(tmp_path)
    load = transformers.LlamaForCausalLM.from_pretrained
    assert_same_logits(tmp_path, load(tmp_path, dtype=torch.float32))
    ours = read_pretrained(str(tmp_path)).decoder().embed_tokens.weight
    assert torch.equal(ours, load(tmp_path, dtype=dtype).model.embed_tokens.weight.float())


@torch.no_grad()
def test_longrope_is_generated_across_its_boundary_as_without_a_cache(tmp_path):
    """Deeper layers' keys and values of the short frequencies would differ."""
    short, long = [1.0, 1.1, 1.2, 1.3], [1.0, 3.0, 9.0, 27.0]
    rope = LONG | {"original_max_position_embeddings": 32, "short_factor": short}
    theirs = published(rope_parameters=rope | {"long_factor": long}, initializer_range=0.4)
    theirs.save_pretrained(tmp_path)
    prompts = [IDS[0, :30].tolist(), IDS[1, :21].tolist(), IDS[1, :36].tolist()]
    new = generate(read_pretrained(str(tmp_path)).decoder(), prompts, 20)
    for prompt, tokens in zip(prompts, new, strict=True):
        ids = list(prompt)
        for _ in range(20):
            ids.append(theirs(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
        assert tokens == ids[-20:]


def test_norms_that_wait_for_a_drop_begin_at_one(saved):
    pretrained = read_pretrained(str(saved))
    config = replace(pretrained.config, qk_norm=QKNormConfig("after_drop"))
    with torch.device("meta"):
        model = Decoder(config, pretrained.layout)
    model.to_empty(device="cpu")
    model.fill(pretrained.value)
    torch.testing.assert_close(model(IDS), pretrained.decoder()(IDS))
    assert torch.equal(model.layers[0].self_attn.q_norm.weight, torch.ones(8))


# ---------------------------------------------------------------- faults


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(directory, change):
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_cut_file_is_named(saved, name):
    content = (saved / name).read_bytes() if (saved / name).is_file() else b'{"model": {'
    (saved / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=rf"{name}: expected"):
        read_pretrained(str(saved))


@pytest.mark.parametrize("content", [b"", b"[]", b'{"metadata": {}}', b'{"weight_map": []}'])
def test_an_index_that_holds_something_else_is_named(saved, content):
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json: expected"):
        read_pretrained(str(saved))


def test_a_configuration_that_is_no_object_is_named(saved):
    (saved / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: expected"):
        read_pretrained(str(saved))


def test_weights_that_transformers_would_change_are_not_read_without_the_change(saved):
    """It adds an adapter that lies beside a model."""
    (saved / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=f"{saved}: merge the adapter"):
        read_pretrained(str(saved))


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path):
    with pytest.raises(UserError, match="gone' is no directory"):
        read_pretrained(str(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("removed", "added"),
    [
        ("model.norm.weight", {}),
        (None, {"b": torch.ones(1)}),
        (None, {"model.norm.weight": torch.ones(3)}),
        (None, {"norm.weight": torch.ones(32)}),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved, removed, added):
    def change(weights):
        weights.pop(removed, None)
        weights.update(added)

    change_weights(saved, change)
    wrong = (removed or next(iter(added))).removeprefix("model.")
    with pytest.raises(UserError, match=rf"tensor {wrong}: (shape: )?expected"):
        read_pretrained(str(saved))


def test_tied_embeddings_may_be_there_twice(tmp_path):
    theirs = published(tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path)
    copy = {"lm_head.weight": theirs.model.embed_tokens.weight.detach().clone()}
    change_weights(tmp_path, lambda weights: weights.update(copy))
    assert_same_logits(tmp_path, theirs)
    copy["lm_head.weight"][7, 3] += 1e-3
    change_weights(tmp_path, lambda weights: weights.update(copy))
    with pytest.raises(UserError, match=r"lm_head.weight: differs .* tie_word_embeddings: false"):
        read_pretrained(str(tmp_path))
    change_config(tmp_path, tie_word_embeddings=False)
    untied = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert_same_logits(tmp_path, untied)


# ------------------------------------------------------- memory


MEASURE = """
import sys, torch
from trainer.interchange.pretrained import read_pretrained

def peak():
    status = open("/proc/self/status").read()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])

torch.set_num_threads(1)
pretrained = read_pretrained(sys.argv[1])
before = peak()
model = pretrained.decoder()
size = sum(p.nbytes for p in model.parameters())
print((peak() - before) / size, size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
def test_loading_takes_hardly_more_memory_than_the_model(tmp_path):
    shape = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 8192}
    published(**shape, num_hidden_layers=16).to(torch.bfloat16).save_pretrained(tmp_path)
    command = [sys.executable, "-c", MEASURE, tmp_path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ratio, size = map(float, result.stdout.split())
    assert size > 2e8
    assert ratio < 1.3


def test_a_model_without_a_tokenizer_is_read_and_named_where_one_is_needed(saved):
    with pytest.raises(UserError, match=f"{saved}: there is no tokenizer.json"):
        read_pretrained(str(saved)).require_tokenizer()


# ---------------------------------------------------------------- the hub


class FakeHub(BaseHTTPRequestHandler):
    """The part of the hub's interface that a download uses, with one model."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes]] = {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
        "modeling_evil.py": b"raise SystemExit",
    }
    commit = "c" * 40

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        status, content = 404, b"{}"
        headers = {"X-Error-Code": "RepoNotFound"}
        if self.path.startswith("/api/models/someone/tiny"):
            answer = {"id": "someone/tiny", "sha": self.commit}
            if "/tree/" in self.path:
                answer = [
                    {"type": "file", "path": name, "size": len(file), "oid": "0"}
                    for name, file in self.files.items()
                ]
            status, content, headers = 200, json.dumps(answer).encode(), {}
        elif self.path.startswith("/someone/tiny/resolve/"):
            content = self.files[self.path.rpartition("/")[2]]
            status, headers = 200, {"X-Repo-Commit": self.commit, "ETag": f'"{len(content)}"'}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


FIND = """
import sys
from trainer.interchange.published import find_pretrained
for name in sys.argv[1:]:
    try:
        print(*sorted(path.name for path in find_pretrained(name).iterdir()))
    except OSError as error:
        print("refused:", name in str(error))
"""


@pytest.fixture
def hub_environment(tmp_path):
    """The environment of a process that finds the fake hub, and has no cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    offline = {"HF_HUB_OFFLINE", "HF_TOKEN", "http_proxy", "HTTP_PROXY"}
    kept = {name: value for name, value in os.environ.items() if name not in offline}
    yield kept | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_only_files_without_code_come_from_the_hub_and_what_is_not_there_is_named(hub_environment):
    done = subprocess.run(
        [sys.executable, "-c", FIND, "someone/tiny", "someone/none"],
        env=hub_environment, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "config.json model.safetensors tokenizer.json",
        "refused: True",
    ]
