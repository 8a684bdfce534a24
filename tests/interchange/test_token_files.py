"""Which tokens end a text and an answer, by the files of published models."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trainer.common.errors import UserError
from trainer.data.tokenizer import end_of_text, end_tokens
from trainer.interchange.token_files import eos_ids, read_token_files, stop_ids

GEMMA = ["<pad>", "<eos>", "<bos>", "</s>", "<end_of_turn>"]
LLAMA_3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
LLAMA_4 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom|>", "<|eot|>"]
GPT_OSS = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|call|>"]
COHERE = ["<BOS_TOKEN>", "<EOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
SMOLLM2 = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer_of(words):
    return Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))


@pytest.mark.parametrize(
    ("words", "eos_token", "config", "generation", "end", "stops"),
    [
        (GEMMA, "<eos>", 1, [1, 4], 1, {1, 4}),
        (LLAMA_3, "<|eot_id|>", [1, 2, 3], None, 1, {1, 2, 3}),
        (LLAMA_3, "<|end_of_text|>", 1, 1, 1, {1}),
        (LLAMA_4, {"content": "<|eot|>"}, [1, 2, 3], [1, 2, 3], 1, {1, 2, 3}),
        (GPT_OSS, "<|return|>", 2, [2, 1, 3], 1, {1, 2, 3}),
        (COHERE, "<|END_OF_TURN_TOKEN|>", 2, None, 2, {2}),
        (DEEPSEEK, None, 1, None, 1, {1}),
        (DEEPSEEK, DEEPSEEK[1], None, None, 1, set()),
        (SMOLLM2, "<|im_end|>", 2, 2, 0, {2}),  # a text does not end like a turn
        (SMOLLM2[1:], "<|im_end|>", 1, None, 1, {1}),
        (SMOLLM2, None, None, [], 0, set()),
        (SMOLLM2, "<none>", 99, [True, "2", -1], 0, set()),
    ],
)
def test_published_settings_tell_where_texts_and_answers_end(
    tmp_path, words, eos_token, config, generation, end, stops
):
    written = {
        "config": {"eos_token_id": config},
        "tokenizer_config": {"eos_token": eos_token},
        "generation_config": {"eos_token_id": generation},
    }
    for name, values in written.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    tokenizer = tokenizer_of(words)
    files = read_token_files(tmp_path, to_publish=False)
    eos = eos_ids(files, tokenizer)
    assert stop_ids(files, tokenizer) == stops
    assert end_of_text(tokenizer, eos) == end
    assert end_of_text(tokenizer, (end,)) == end


@pytest.mark.parametrize(
    ("words", "ends"),
    [(GEMMA, [3, 4]), (LLAMA_3, [1, 2, 3]), (SMOLLM2, [0, 2]), (SMOLLM2[1:], None)],
)
def test_without_settings_names_tell(words, ends):
    tokenizer = tokenizer_of(words)
    assert (eos_ids({}, tokenizer), stop_ids({}, tokenizer)) == ((), frozenset())
    if ends is None:
        with pytest.raises(
            UserError, match=r"expected an end-of-text token such as <\|endoftext\|>"
        ):
            end_tokens(tokenizer)
        assert end_tokens(tokenizer, (1,)) == {1}
    else:
        assert end_of_text(tokenizer) == ends[0]
        assert end_tokens(tokenizer) == {*ends}


def test_a_link_to_a_file_elsewhere_is_read_but_not_published(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "elsewhere.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "model" / "generation_config.json").symlink_to(tmp_path / "elsewhere.json")
    files = read_token_files(tmp_path / "model", to_publish=False)
    assert stop_ids(files, tokenizer_of(SMOLLM2)) == {1}
    with pytest.raises(UserError, match="is a link to"):
        read_token_files(tmp_path / "model")
