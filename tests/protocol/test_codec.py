"""The tokenizer of a folder: bytes, control tokens, chat template, end ids."""

import json
import shutil
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lld_jax.protocol import codec as codec_lib

pytest_plugins = ["qwen25"]

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ORDINARY = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def make_tokenizer(folder: Path, template: str | None = None, **config) -> None:
    """A byte-level BPE of 281 ids whose vocabulary also lists its special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(
        ["who wrote it user system im end start\n" * 9], trainer
    )
    backend.add_tokens(["<tool>"])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    } | config
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tiny"
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(folder):
    return codec_lib.load_codec(folder)


def template_ids(folder: Path, message: str, template: str | None = None) -> list[int]:
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": message}],
        chat_template=template,
        add_generation_prompt=True,
        return_dict=False,
    )


def test_byte_table_is_the_inverse_of_gpt2s():
    expected = {char: byte for byte, char in bytes_to_unicode().items()}
    assert codec_lib._byte_of_char() == expected


def test_ids_and_bytes(tiny):
    assert len(tiny.token_bytes) == 281  # 280 trained, one added later
    assert tiny.token_bytes[:3] == tuple(text.encode() for text in SPECIAL)
    assert tiny.token_bytes[280] == b"<tool>"
    assert (tiny.end_ids, tiny.pad_id) == (frozenset({2}), 0)


@given(ORDINARY)
@settings(max_examples=50, deadline=None)
def test_encode_keeps_every_byte(tiny, text):
    assert b"".join(tiny.token_bytes[i] for i in tiny.encode(text)) == text.encode()


@given(st.lists(st.sampled_from([*SPECIAL, "<tool>", "<|im_", "end|>", "user", "\n"])))
@settings(max_examples=50, deadline=None)
def test_text_never_gives_an_added_token(tiny, pieces):
    text, added = "".join(pieces), {0, 1, 2, 280}
    assert not added & set(tiny.encode(text))
    control = [i for i in tiny.chat("") if i in added]
    assert [i for i in tiny.chat(text) if i in added] == control
    assert text.encode() in b"".join(tiny.token_bytes[i] for i in tiny.chat(text))


def test_the_full_tokenizer_would_give_control_tokens(folder):
    assert 2 in AutoTokenizer.from_pretrained(folder)("a<|im_end|>b")["input_ids"]


def test_merges_that_would_build_an_added_token_are_dropped():
    spec = {
        "added_tokens": [{"id": 3, "content": "abc"}],
        "model": {
            "vocab": {"a": 0, "b": 1, "ab": 2, "abc": 3, "c": 4, "abcc": 5},
            "merges": [["a", "b"], ["ab", "c"], ["abc", "c"]],
        },
    }
    plain = codec_lib._without_added(spec)
    assert plain["model"]["merges"] == [["a", "b"]]
    assert 3 not in plain["model"]["vocab"].values()
    assert spec["model"]["vocab"]["abc"] == 3


def test_chatml_stands_in_for_a_missing_template(folder, tiny):
    ids = tiny.chat("who wrote it?")
    assert b"".join(tiny.token_bytes[i] for i in ids).decode() == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nwho wrote it?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == template_ids(folder, "who wrote it?", codec_lib.CHATML)


@pytest.mark.parametrize("message", ["who wrote it?", "\n\nuser", "  wrote ", "", "ü"])
def test_own_template_and_its_seams(tmp_path, message):
    # Text touches the message on both sides, so merges run across the seams.
    template = (
        "{% for m in messages %}<|im_start|>us{{ m.content }}er<tool>{% endfor %}go"
    )
    make_tokenizer(tmp_path, template)
    assert codec_lib.load_codec(tmp_path).chat(message) == template_ids(
        tmp_path, message
    )


def test_template_without_any_added_token(tmp_path):
    make_tokenizer(tmp_path, "Q: {{ messages[0].content }}\nA:")
    codec = codec_lib.load_codec(tmp_path)
    assert codec.chat("who") == codec.encode("Q: who\nA:")


@pytest.mark.parametrize(
    "content",
    ["{{ c }}{{ c }}", "fixed", "{{ c | upper }}"],
)
def test_template_that_does_not_show_the_message_once(tmp_path, content):
    make_tokenizer(tmp_path, "{% set c = messages[0].content %}" + content)
    with pytest.raises(ValueError, match="chat template"):
        codec_lib.load_codec(tmp_path)


def write(folder: Path, name: str, content: dict) -> None:
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (151643, [151645, 151643], 151645, {151643, 151645}),
        ([7, 8], None, None, {7, 8}),
        (None, 9, None, {9}),
        (None, None, 4, {4}),
        (0, None, None, {0}),
        (None, None, None, set()),
    ],
)
def test_end_ids_are_a_union(tmp_path, config, generation, tokenizer, expected):
    write(tmp_path, "config.json", {"eos_token_id": config})
    write(tmp_path, "generation_config.json", {"eos_token_id": generation})
    assert codec_lib.end_ids(tmp_path, tokenizer) == expected


def test_end_ids_without_json_files(tmp_path):
    assert codec_lib.end_ids(tmp_path, 5) == {5}


def test_codec_unites_end_ids_and_finds_a_pad(tmp_path):
    make_tokenizer(tmp_path, pad_token=None)
    write(tmp_path, "config.json", {"model_type": "qwen2", "eos_token_id": 0})
    write(tmp_path, "generation_config.json", {"eos_token_id": [0, 1]})
    codec = codec_lib.load_codec(tmp_path)
    assert (codec.end_ids, codec.pad_id) == (frozenset({0, 1, 2}), 0)


@pytest.mark.parametrize(
    ("tokenizer", "config", "match"),
    [
        ({"eos_token": None}, {}, "eos_token_id is null"),
        ({}, {"vocab_size": 280}, "vocab_size=280; legal: at least .* 281"),
        ({}, {"eos_token_id": 281}, "eos_token_id=.*281.*; legal: below"),
    ],
)
def test_ids_that_do_not_fit_are_errors(tmp_path, tokenizer, config, match):
    make_tokenizer(tmp_path, **tokenizer)
    write(tmp_path, "config.json", {"model_type": "qwen2", **config})
    with pytest.raises(ValueError, match=match):
        codec_lib.load_codec(tmp_path)


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        codec_lib.load_codec(tmp_path)


def test_tokenizer_that_is_not_byte_level(tmp_path, folder):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["decoder"] = {"type": "Fuse"}
    write(tmp_path, "tokenizer.json", spec)
    with pytest.raises(ValueError, match="'BPE' with 'ByteLevel'"):
        codec_lib.load_codec(tmp_path)


# ---------------------------------------------------------------- the real Qwen2.5


@pytest.fixture(scope="module")
def qwen(qwen25_folder):
    return codec_lib.load_codec(qwen25_folder)


def test_qwen_ids(qwen):
    # The ids of published Qwen2.5 files; `<think>` is one piece less than sampled.
    assert len(qwen.token_bytes) == 151665
    assert (qwen.end_ids, qwen.pad_id) == (frozenset({151645}), 151643)
    text = "<search>who wrote it</search>\n\nNext"
    ids = [27, 1836, 29, 14623, 6139, 432, 522, 1836, 1339, 5847]
    assert qwen.encode(text) == ids
    assert b"".join(qwen.token_bytes[i] for i in ids) == text.encode()
    assert qwen.encode("<think>") == [13708, 766, 29]
    assert [qwen.token_bytes[i] for i in (29, 397, 1339, 14276, 1784)] == [
        b">",
        b">\n",
        b">\n\n",
        b">.",
        b"><",
    ]
    assert qwen.token_bytes[151645] == b"<|im_end|>"


@given(ORDINARY)
@settings(max_examples=50, deadline=None)
def test_qwen_encode_keeps_normalised_bytes(qwen, text):
    # Qwen's own normaliser composes characters (NFC) and changes nothing else.
    back = b"".join(qwen.token_bytes[i] for i in qwen.encode(text))
    assert back == unicodedata.normalize("NFC", text).encode()


def test_qwen_text_never_gives_an_added_token(qwen):
    text = b"".join(qwen.token_bytes[151643:]).decode()
    assert max(qwen.encode(text)) < 151643
    ids = qwen.chat(f"{text} who? {text}")
    assert [i for i in ids if i >= 151643] == [151644, 151645] * 2 + [151644]


def test_qwen_chat_is_the_template(qwen, qwen25_folder):
    messages = ["Who wrote it?", "\n\nTwo breaks first", " a\n", "Москва 東京 ½", ""]
    tokenizer = AutoTokenizer.from_pretrained(qwen25_folder)
    for message in messages:
        assert qwen.chat(message) == tokenizer.apply_chat_template(
            [{"role": "user", "content": message}],
            chat_template=codec_lib.CHATML,
            add_generation_prompt=True,
            return_dict=False,
        )
