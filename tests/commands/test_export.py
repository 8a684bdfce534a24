"""The export command: a run before and after its drop, its card, and what can be wrong."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tests.small_runs import SMALLEST, trained_in
from trainer.checkpoint import BEFORE_DROP, find_checkpoint, load_decoder, read_state
from trainer.commands.export import COMMAND
from trainer.commands.hydra.running import run_command
from trainer.common.errors import UserError
from trainer.data.tokenizer import END_OF_TEXT, train_tokenizer
from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Cell, Report
from trainer.interchange.export import directory as export_directory
from trainer.interchange.export.plan import make_plan
from trainer.interchange.pretrained import read_pretrained
from trainer.runs.fitted_temperature import keep_temperature, with_fitted_temperature
from trainer.runs.models import find_candidate


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """The directory of a run of four steps that drops after two, with a report."""
    place = tmp_path_factory.mktemp("run") / "tiny"
    steps = {"max_steps": 4, "checkpoint_every": 2}
    trained_in(place, base, drop={"at": 2}, trainer=steps)
    own = {"method": "none", "length": 64, "factor": 2.0}
    cells = (
        Cell("DroPE", task=STATEMENTS, scores=(1.0, 0.0, 0.0, 0.0), **own),
        Cell("DroPE", task=PERPLEXITY, last_loss=3.5, **own),
        Cell("RoPE", task=PERPLEXITY, last_loss=4.5, **own),
    )
    environment = {"corpus": "0123456789abcdef"}
    Report("tiny", 32, cells, {}, {}, (), {}, environment).write(place / "report.json")
    return place


@torch.no_grad()
def assert_loads_as(directory, checkpoint, architecture):
    """transformers loads the checkpoint's weights and the tokens of its text."""
    hf = AutoModelForCausalLM.from_pretrained(directory)
    assert type(hf).__name__ == architecture
    state = read_state(checkpoint)
    ids = AutoTokenizer.from_pretrained(directory)("Sentence 7", return_tensors="pt")["input_ids"]
    assert ids[0, 1:].tolist() == Tokenizer.from_str(state["tokenizer"]).encode("Sentence 7").ids
    assert ids[0, 0] == hf.generation_config.bos_token_id == hf.generation_config.eos_token_id
    ours = load_decoder(checkpoint, state)(ids)
    torch.testing.assert_close(hf(ids).logits, ours, rtol=0, atol=1e-4)


def test_a_run_after_its_drop(trained, tmp_path, capsys):
    to = tmp_path / "new" / "out"
    run_command(COMMAND, [f"checkpoint={trained}", f"to={to}", "threads=1"])
    load = f"Load it with: AutoModelForCausalLM.from_pretrained('{to}')"
    assert load in capsys.readouterr().out.replace("\n", "")
    assert_loads_as(to, find_checkpoint(str(trained)), "Qwen3ForCausalLM")
    card = (to / "README.md").read_text()
    for said in (
        "| dropped | after step 2 |",
        "| tokens | 512 |",
        "layers 0 to 1: none (NoPE), QK-norm",
        "0123456789abcdef",
        "| DroPE | 64 | 0.250 | 3.500 |",
        "they differ by",
        "| vLLM | yes |  |",
        "| llama.cpp | no | rotates unless run with --rope-freq-scale 1e-30 |",
    ):
        assert said in card
    assert "RoPE | 64 | 0.500" not in card
    assert not list(to.parent.glob(".*"))


@pytest.mark.parametrize(
    ("drop", "length"), [({"at": None}, 32), ({"at": 0}, 32), ({"at": 0, "layers": [0]}, 24)]
)
def test_a_model_has_the_longest_context_that_it_was_trained_with(
    base, tmp_path, monkeypatch, drop, length
):
    """Engines refuse longer prompts. Where a drop leaves positions, its training length counts."""
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    published, to = tmp_path / "published", tmp_path / "to"
    values = base | {"model": base["model"] | {"qk_norm": {"when": "never"}}}
    short = {"trainer": {"max_steps": 2}, "drop": {"at": None}}
    trained_in(tmp_path / "long", values, **short)
    run_command(COMMAND, [f"checkpoint={tmp_path / 'long'}", f"to={published}", "threads=1"])
    assert json.loads((published / "config.json").read_text())["max_position_embeddings"] == 32
    (published / "README.md").write_text("---\nlicense: apache-2.0\ntags: [a]\n---\n# A model\n")
    start = {"from_pretrained": str(published)}
    again = {"data": {"sequence_length": 24, "needles": {"share": 0.0}}, "model": start}
    trained_in(tmp_path / "short", values, **short | again | {"drop": drop})
    run_command(COMMAND, [f"checkpoint={tmp_path / 'short'}", f"to={to}", "threads=1"])
    assert json.loads((to / "config.json").read_text())["max_position_embeddings"] == length
    settings = json.loads((to / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == length
    card = (to / "README.md").read_text()
    assert "| training length | 24 tokens |" in card
    assert "\nlicense: apache-2.0\n---\n" in card
    said = "apache-2.0: the licence of published, with whose weights the training began."
    assert card.endswith(f"## Licence\n\n{said}\n")
    last, last_to = tmp_path / "last", tmp_path / "last_to"
    changes = {**again, "model": {"from_run": str(tmp_path / "short")}}
    trained_in(last, values, **short | changes | {"drop": {"at": None}})
    run_command(COMMAND, [f"checkpoint={last}", f"to={last_to}", "threads=1"])
    assert json.loads((last_to / "config.json").read_text())["max_position_embeddings"] == length
    assert (last_to / "README.md").read_text().endswith(f"## Licence\n\n{said}\n")
    shutil.rmtree(tmp_path / "short" / "checkpoints")  # as one does to save space
    run_command(COMMAND, [f"checkpoint={last}", f"to={tmp_path / 'again'}", "threads=1"])
    said = "To be chosen by whoever publishes the weights."
    assert (tmp_path / "again" / "README.md").read_text().endswith(f"## Licence\n\n{said}\n")


@pytest.mark.parametrize("layers", [["rope"], ["nope"]])
def test_a_checkpoint_has_no_context_of_phases_after_it(base, tmp_path, monkeypatch, layers):
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    first, then = tmp_path / "first", tmp_path / "then"
    steps = {"trainer": {"max_steps": 2}, "drop": {"at": None}}
    phases = {"short": {"steps": 1, "sequence_length": 24}, "long": {"steps": 1}}
    values = base | {"model": base["model"] | {"qk_norm": {"when": "never"}}}
    start = {"positional": {"layers": layers}, "data": {"needles": {"share": 0.0}}}
    trained_in(first, values, **steps | start | {"phases": phases})
    short = first / "checkpoints" / "step-000001"
    shorter = {"needles": {"share": 0.0}, "sequence_length": 16}
    trained_in(then, values, **steps | {"data": shorter, "model": {"from_run": str(short)}})
    for number, (run, length) in enumerate([(short, 24), (first, 32), (then, 24)]):
        to = tmp_path / str(number)
        run_command(COMMAND, [f"checkpoint={run}", f"to={to}", "threads=1"])
        assert json.loads((to / "config.json").read_text())["max_position_embeddings"] == length


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "default": {"rope_theta": 10_000.0},
    "linear": {"rope_theta": 10_000.0, "factor": 4.0},
    "yarn": {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {"rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64, **LLAMA3},
    "dynamic": {"rope_theta": 10_000.0, "factor": 2.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_published_model_keeps_its_context_and_rope_after_training_on_shorter_sequences(
    base, tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    published, to = tmp_path / "published", tmp_path / "to"
    rope = {"rope_type": kind, **ROPES[kind]}
    shape = {"head_dim": 64, "max_position_embeddings": 512, "rope_parameters": rope}
    instruct_model(published, **shape)
    trained_from(tmp_path / "run", base, published, None, from_pretrained=str(published))
    run_command(COMMAND, [f"checkpoint={tmp_path / 'run'}", f"to={to}", "threads=1"])
    written = json.loads((to / "config.json").read_text())
    assert written["max_position_embeddings"] == 512
    assert rope.items() <= written["rope_parameters"].items()
    assert {*written["rope_parameters"]} - {*rope} <= {"truncate"}
    layouts = [read_pretrained(str(place)).layout for place in (published, to)]
    assert layouts[0] == layouts[1]
    assert "| training length | 32 tokens |" in (to / "README.md").read_text()


def test_an_export_is_written_anew(trained, tmp_path, monkeypatch):
    """In the form that engines read, with the weights and the card that it has."""
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    first, again = tmp_path / "first", tmp_path / "again"
    run_command(COMMAND, [f"checkpoint={trained}", f"to={first}", "threads=1"])
    path = first / "config.json"
    values = json.loads(path.read_text())
    written = values["rope_parameters"]
    zero = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.0}
    path.write_text(json.dumps(values | {"rope_parameters": zero}))
    run_command(COMMAND, [f"checkpoint={first}", f"to={again}", "threads=1"])
    assert json.loads((again / "config.json").read_text())["rope_parameters"] == written
    cards = [(place / "README.md").read_text() for place in (first, again)]
    assert cards[0] == cards[1]
    assert_loads_as(again, find_checkpoint(str(trained)), "Qwen3ForCausalLM")


def test_a_published_model_keeps_its_own_tokens(trained, tmp_path, monkeypatch):
    """It would never stop with the token that begins its texts in the place of the last one."""
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    published, again = tmp_path / "published", tmp_path / "again"
    run_command(COMMAND, [f"checkpoint={trained}", f"to={published}", "threads=1"])
    own = {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6}
    path = published / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (published / "generation_config.json").write_text(json.dumps(own))
    tokens = {"eos_token": "</s>", "chat_template": "{{ messages }}"}
    (published / "tokenizer_config.json").write_text(json.dumps(tokens))
    run_command(COMMAND, [f"checkpoint={published}", f"to={again}", "threads=1"])
    assert own.items() <= json.loads((again / "config.json").read_text()).items()
    assert json.loads((again / "generation_config.json").read_text()) == own
    written = json.loads((again / "tokenizer_config.json").read_text())
    assert written == tokens | {"model_input_names": ["input_ids", "attention_mask"]}
    assert (again / "tokenizer.json").read_text() == (published / "tokenizer.json").read_text()


def test_a_run_before_its_drop(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    before = trained / "checkpoints" / BEFORE_DROP
    run_command(COMMAND, [f"checkpoint={before}", f"to={tmp_path / 'out'}", "threads=1"])
    assert_loads_as(tmp_path / "out", before, "LlamaForCausalLM")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| dropped | never |" in card
    assert "rotation of 16 channels, wavelengths 6.3 to" in card
    assert "were not compared" in card
    assert "| DroPE |" not in card


def test_what_is_asked_of_an_export_is_done(trained, tmp_path, monkeypatch):
    asked = {}

    def exported(model, tokenizer, end, to, **options):
        card = options.pop("card")(make_plan(model.config, model.layout), 0.5)
        asked.update(to=to, end=tokenizer.id_to_token(end), card=card, **options)
        return SimpleNamespace(plan=make_plan(model.config, model.layout))

    monkeypatch.setattr("trainer.workflows.export.export_model", exported)
    words = [f"checkpoint={trained}", f"to={tmp_path / 'out'}", "threads=1"]
    run_command(COMMAND, [*words, "dtype=bfloat16", "tolerance=0.25"])
    assert "they differ by 5.0e-01" in asked.pop("card")
    assert asked == {
        "to": tmp_path / "out", "end": END_OF_TEXT, "tolerance": 0.25, "dtype": "bfloat16",
        "longest": 32, "token_files": {},
    }  # fmt: skip


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ bos_token }}"
)
CHAT = [{"role": "user", "content": "Where is it?"}]


def instruct_model(directory, **changes):
    """Write a tiny Llama with a chat template as transformers does, and return its tokenizer."""
    words = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
    tokenizer = train_tokenizer(["Sentence 1 of a text that is 1 long."], 300, [])
    tokenizer.add_special_tokens(words)
    ids = [tokenizer.token_to_id(word) for word in words]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=words[1], eos_token=words[2], pad_token=words[0],
        chat_template=TEMPLATE, model_max_length=40, add_bos_token=False,
    )  # fmt: skip
    theirs.save_pretrained(directory)
    shape = {"max_position_embeddings": 40, **SMALLEST, **changes}
    tokens = {"bos_token_id": ids[1], "eos_token_id": ids[2], "pad_token_id": ids[0]}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **tokens, **shape))
    ends = {"eos_token_id": [ids[2], ids[0]], "temperature": 0.6, "do_sample": True}
    model.generation_config = GenerationConfig(bos_token_id=ids[1], max_length=40, **ends)
    model.save_pretrained(directory)
    return theirs, ends


def test_a_model_of_the_hub_is_exported_and_continued(tmp_path, monkeypatch):
    """From the hub's cache on this machine, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--somebody--model-1.5"
    snapshot = repository / "snapshots" / ("0" * 40)
    instruct_model(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    to = tmp_path / "out"
    run_command(COMMAND, ["checkpoint=somebody/model-1.5", f"to={to}", "threads=1"])
    assert "# model-1.5" in (to / "README.md").read_text()
    assert (to / "model.safetensors").is_file()
    assert find_candidate("somebody/model-1.5").name == "model-1.5"


def trained_from(directory, base, tokens, drop_at=0, **model):
    """Train two steps from other weights, with the tokens of a published model."""
    tokenizer = {"path": str(tokens / "tokenizer.json")}
    values = {**base, "model": model, "tokenizer": tokenizer, "drop": {"at": drop_at}}
    short = {"max_steps": 2, "checkpoint_every": 2}
    trained_in(directory, values, data={"needles": {"share": 0.0}}, trainer=short)


@pytest.mark.parametrize("then", [False, True], ids=["its run", "a run that goes on from it"])
def test_a_recalibrated_instruct_model_keeps_its_chat_template_and_end_of_turn(
    base, tmp_path, then
):
    published, to, run = tmp_path / "published", tmp_path / "out", tmp_path / "run"
    theirs, ends = instruct_model(published)
    trained_from(run, base, published, from_pretrained=str(published))
    if then:
        trained_from(tmp_path / "then", base, published, drop_at=None, from_run=str(run))
        run = tmp_path / "then"
    shutil.rmtree(published)
    run_command(COMMAND, [f"checkpoint={run}", f"to={to}", "threads=1"])
    ours = AutoTokenizer.from_pretrained(to)
    for options in ({}, {"add_generation_prompt": True}):
        texts = [t.apply_chat_template(CHAT, tokenize=False, **options) for t in (theirs, ours)]
        assert texts[0] == texts[1]
        ids = [t.apply_chat_template(CHAT, **options)["input_ids"] for t in (theirs, ours)]
        assert ids[0] == ids[1]
    assert ours("Sentence")["input_ids"] == [0, *theirs("Sentence")["input_ids"]]  # as trained
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == (
        *("<|im_start|>", "<|im_end|>", END_OF_TEXT),
    )
    assert ours.model_max_length == 40
    written = json.loads((to / "generation_config.json").read_text())
    assert ends.items() <= written.items()
    assert "max_length" not in written
    config = json.loads((to / "config.json").read_text())
    assert config["eos_token_id"] == ends["eos_token_id"][0]


def test_what_an_export_lacks_is_named_when_training_begins_and_at_the_export(
    base, tmp_path, monkeypatch, caplog, capsys
):
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    published, to, run = tmp_path / "published", tmp_path / "out", tmp_path / "run"
    instruct_model(published)
    (published / "generation_config.json").rename(tmp_path / "secret")
    (published / "generation_config.json").symlink_to("../secret")
    trained_from(run, base, published, from_pretrained=str(published))
    (warning,) = [r.getMessage() for r in caplog.records if "secret" in r.getMessage()]
    assert warning.endswith(f"no chat template and no token settings of {published}.")
    run_command(COMMAND, [f"checkpoint={run}", f"to={to}", "threads=1"])
    said = " ".join(capsys.readouterr().err.split())
    assert f"The export has no chat template and no token settings of {published}, with" in said
    assert not (to / "chat_template.jinja").exists()


@pytest.mark.parametrize("has_template", [False, True])
def test_a_lack_of_token_settings_beside_a_config_is_named(
    base, tmp_path, monkeypatch, capsys, has_template
):
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    published, to, run = tmp_path / "published", tmp_path / "out", tmp_path / "run"
    instruct_model(published)
    (published / "tokenizer_config.json").unlink()
    if not has_template:
        (published / "chat_template.jinja").unlink()
    trained_from(run, base, published, from_pretrained=str(published))
    run_command(COMMAND, [f"checkpoint={run}", f"to={to}", "threads=1"])
    said = " ".join(capsys.readouterr().err.split())
    lack = "no tokenizer_config.json" if has_template else "no chat template and no tokenizer_"
    assert f"The export has {lack}" in said


def test_a_run_with_another_tokenizer_exports_its_own_tokens(
    base, tmp_path, monkeypatch, caplog, capsys
):
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    published, other, to, run = (tmp_path / name for name in ("published", "other", "out", "run"))
    instruct_model(published)
    other.mkdir()
    tokenizer = train_tokenizer(["Another text of 2 sentences, by others."], 290, [])
    tokenizer.save(str(other / "tokenizer.json"))
    trained_from(run, base, other, from_pretrained=str(published))
    said = f"no chat template and no token settings of {published}."
    (warning,) = [r.getMessage() for r in caplog.records if said in r.getMessage()]
    assert warning.startswith("The run's tokenizer is not that of its weights.")
    run_command(COMMAND, [f"checkpoint={run}", f"to={to}", "threads=1"])
    assert "If it has the tokenizer of that model" in " ".join(capsys.readouterr().err.split())
    end = tokenizer.token_to_id(END_OF_TEXT)
    config = json.loads((to / "config.json").read_text())
    assert [config.get(f"{kind}_token_id") for kind in ("bos", "eos")] == [end, end]
    assert not (to / "chat_template.jinja").exists()


KEPT = {"per": "sequence", "lengths": [64], "text": "a", "tokens": 9, "coefficient": 0.2}
ROWS = [[0.1, 0.4], [0.3, 0.2]]


@torch.no_grad()
@pytest.mark.parametrize(
    ("heads", "step", "architecture"),
    [
        (None, None, "Qwen3ForCausalLM"),  # the gain of QK-norm takes one factor for all heads
        (ROWS, None, "UnropeForCausalLM"),  # but no factor for each
        (ROWS, BEFORE_DROP, "LlamaForCausalLM"),
    ],
)
def test_a_fitted_temperature_is_exported_as_it_is_at_one_length(
    trained, tmp_path, heads, step, architecture
):
    """At that length the weights give the logits of the temperature, which follows the length."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    path = run / "checkpoints" / step if step else find_checkpoint(str(run))
    keep_temperature(path, KEPT | ({} if heads is None else {"heads": heads}))
    to = tmp_path / "out"
    run_command(COMMAND, [f"checkpoint={path}", f"to={to}", "threads=1", "temperature_at=2"])
    assert json.loads((to / "config.json").read_text())["architectures"] == [architecture]
    assert "is part of it as it is at 64 tokens" in (to / "README.md").read_text()
    own = {"trust_remote_code": True} if architecture.startswith("Unrope") else {}
    theirs = AutoModelForCausalLM.from_pretrained(to, **own)
    ours = load_decoder(path, read_state(path))
    plain = {name: value.clone() for name, value in ours.state_dict().items()}
    ours.layout, _ = with_fitted_temperature(ours.layout, path)
    ids = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-4)
    if step:
        for index, row in enumerate(ROWS):
            name = f"layers.{index}.self_attn.q_proj.weight"
            of_heads = plain[name].unflatten(0, (2, -1))
            for head, c in enumerate(row):
                wanted = of_heads[head] * (1 + c * math.log(2))
                found = theirs.model.get_parameter(name).unflatten(0, (2, -1))[head]
                torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("content", ['{"a":', "[1]"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_damaged_file_of_a_published_model_is_named(
    trained, tmp_path, monkeypatch, name, content
):
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    published, again = tmp_path / "published", tmp_path / "again"
    run_command(COMMAND, [f"checkpoint={trained}", f"to={published}", "threads=1"])
    (published / name).write_text(content)
    with pytest.raises(UserError, match=f"{name}' is damaged"):
        run_command(COMMAND, [f"checkpoint={published}", f"to={again}", "threads=1"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["published"]


def test_a_card_that_is_a_link_out_of_the_model_is_refused(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    published, again = tmp_path / "published", tmp_path / "again"
    run_command(COMMAND, [f"checkpoint={trained}", f"to={published}", "threads=1"])
    (published / "README.md").rename(tmp_path / "secret")
    (published / "README.md").symlink_to("../secret")
    with pytest.raises(UserError, match=r"^checkpoint: .*README\.md' is a link to .*secret'"):
        run_command(COMMAND, [f"checkpoint={published}", f"to={again}", "threads=1"])
    assert not again.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_link_in_the_place_of_a_published_file_is_refused(trained, tmp_path, monkeypatch, name):
    monkeypatch.setattr(export_directory, "transformers_is_here", lambda: False)
    published, again = tmp_path / "published", tmp_path / "again"
    run_command(COMMAND, [f"checkpoint={trained}", f"to={published}", "threads=1"])
    (published / name).rename(tmp_path / "elsewhere.json")
    (published / name).symlink_to("../elsewhere.json")
    with pytest.raises(UserError, match=rf"^checkpoint: .*{name}' is a link to .*elsewhere"):
        run_command(COMMAND, [f"checkpoint={published}", f"to={again}", "threads=1"])
    assert not again.exists()


MISTAKES = {
    "no checkpoint": (["to=out"], "checkpoint: give checkpoint="),
    "no directory": (["checkpoint=RUN"], "to: give to=DIRECTORY"),
    "missing run": (["checkpoint=runs/none", "to=out"], "neither a run directory"),
    "directory in use": (["checkpoint=RUN", "to=used"], "'used' is not empty"),
    "file": (["checkpoint=RUN", "to=used/file"], "'used/file' is a file"),
    "not writable": (["checkpoint=RUN", "to=/proc/x"], "cannot be written"),
    "unknown type": (["checkpoint=RUN", "to=out", "dtype=float3"], "Did you mean 'float32'"),
    "negative tolerance": (["checkpoint=RUN", "to=out", "tolerance=-1"], "expected 0 or more"),
    "no threads": (["checkpoint=RUN", "to=out", "threads=0"], "expected 1 or more"),
    "no temperature": (
        ["checkpoint=RUN", "to=out", "temperature_at=2"],
        "temperature_at: no temperature is kept",
    ),
    "misspelt key": (["checkpoint=RUN", "to=out", "+tolerence=1"], "Did you mean 'tolerance'"),
    "damaged checkpoint": (["checkpoint=hurt", "to=out"], "file.bin is missing"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_gives_one_line_and_leaves_nothing(trained, tmp_path, monkeypatch, mistake):
    words, said = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    for name, content in {"used/file": "", "hurt/manifest.json": '{"file.bin": [3, "0"]}'}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as error:
        run_command(COMMAND, ["threads=1", *(word.replace("RUN", str(trained)) for word in words)])
    assert len(error.value.problems) == 1
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before
