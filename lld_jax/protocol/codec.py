"""The tokenizer of a Hugging Face folder, as the search protocol needs it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lld_jax.protocol.search import Codec

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
# What the published Qwen2.5 base models do with a lone user message, for tokenizer
# folders that carry no template of their own.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}{% for turn in messages %}"
    "<|im_start|>{{ turn['role'] }}\n{{ turn['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SENTINEL = "\ue000message\ue001"


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, empty if there is no such file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def end_ids(folder: str | Path, tokenizer_eos: int | None = None) -> frozenset[int]:
    """Every id that ends a sequence: config, generation config and tokenizer united.

    Each of the three may be an int, a list or null; base and instruct models of one
    family differ here, and the two JSON files need not agree.
    """
    found: set[int] = set()
    for value in (
        read_json(Path(folder) / "config.json").get("eos_token_id"),
        read_json(Path(folder) / "generation_config.json").get("eos_token_id"),
        tokenizer_eos,
    ):
        found.update(value if isinstance(value, list) else [value])
    return frozenset(found - {None})


def _byte_of_char() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, inverted."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + i): byte for i, byte in enumerate(hidden)
    }


def _token_bytes(spec: Mapping[str, Any], where: Path) -> tuple[bytes, ...]:
    """Bytes of every id, from a tokenizer's JSON; added tokens: their literal text."""
    decoder = spec.get("decoder") or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if part}
    if spec["model"]["type"] != "BPE" or "ByteLevel" not in kinds:
        raise ValueError(
            f"{where}: tokenizer model {spec['model']['type']!r} with decoder "
            f"{sorted(kinds)}; legal: 'BPE' with 'ByteLevel'"
        )
    byte_of = _byte_of_char()
    added = {token["id"]: token for token in spec["added_tokens"]}
    table = {
        i: bytes(byte_of[char] for char in text)
        for text, i in spec["model"]["vocab"].items()
        if i not in added
    }
    if absent := set(range(256)) - {t[0] for t in table.values() if len(t) == 1}:
        raise ValueError(f"{where}: the tokenizer lacks the bytes {sorted(absent)}")
    table |= {i: token["content"].encode() for i, token in added.items()}
    if set(table) != set(range(len(table))):
        raise ValueError(f"{where}: token ids have holes; legal: 0 to {len(table) - 1}")
    return tuple(table[i] for i in range(len(table)))


def _without_added(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer's JSON in which no text whatever gives an added token."""
    added = {token["id"] for token in spec["added_tokens"]}
    model = dict(spec["model"])
    model["vocab"] = {t: i for t, i in model["vocab"].items() if i not in added}
    # A trained vocabulary may list its added tokens too; merges then must not make one.
    model["merges"] = [
        pair
        for pair in model["merges"]
        if {*pair, "".join(pair)} <= model["vocab"].keys()
    ]
    return {**spec, "added_tokens": [], "post_processor": None, "model": model}


def load_codec(folder: str | Path) -> Codec:
    """The tokenizer and chat template in `folder`, as the search protocol needs them.

    `encode` and the message part of `chat` use a tokenizer without added tokens, so
    untrusted text never gives a control token; only the template's own text does. A
    folder without a template gets `CHATML`. `token_bytes` has one entry for each id the
    tokenizer knows, at most the model's padded vocabulary.

    Raises FileNotFoundError without tokenizer files, and ValueError for a tokenizer
    that is not byte-level BPE, ids beyond `vocab_size`, a template that changes or
    repeats the message, or a model without any end token.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in TOKENIZER_FILES[:2]):
        raise FileNotFoundError(f"{folder}: no {' or '.join(TOKENIZER_FILES[:2])}")
    import tokenizers  # this import and the next take seconds
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    spec = json.loads(backend.to_str())

    ends, pad = _ends_and_pad(folder, tokenizer)
    token_bytes = _token_bytes(spec, folder)
    _check_ids(folder, ends, pad, len(token_bytes))
    plain = tokenizers.Tokenizer.from_str(json.dumps(_without_added(spec)))
    first, left, right, last = _around_message(folder, tokenizer, spec)

    def encode(text: str) -> list[int]:
        return plain.encode(text, add_special_tokens=False).ids

    def chat(message: str) -> list[int]:
        return [*first, *encode(left + message + right), *last]

    return Codec(encode, chat, token_bytes, end_ids=ends, pad_id=pad)


def _ends_and_pad(folder: Path, tokenizer: Any) -> tuple[frozenset[int], int]:
    """The ids that end a sequence, and the one that fills up rows."""
    ends = end_ids(folder, tokenizer.eos_token_id)
    if not ends:
        raise ValueError(
            f"{folder}: eos_token_id is null in config.json, generation_config.json "
            "and the tokenizer; legal: an id in at least one"
        )
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = read_json(folder / "config.json").get("pad_token_id")
    if pad is None:
        pad = min(ends)  # as Qwen2.5 base models do; masks never look at it
    return ends, pad


def _check_ids(folder: Path, ends: frozenset[int], pad: int, known: int) -> None:
    """The model has a row for each of the `known` ids, and special ids are of them."""
    vocab = read_json(folder / "config.json").get("vocab_size", known)
    if known > vocab:
        raise ValueError(
            f"{folder}: vocab_size={vocab}; legal: at least the tokenizer's {known} ids"
        )
    if max(ends | {pad}) >= known:
        raise ValueError(
            f"{folder}: eos_token_id={sorted(ends)}, pad_token_id={pad}; "
            f"legal: below the tokenizer's {known} ids"
        )


def _around_message(
    folder: Path, tokenizer: Any, spec: Mapping[str, Any]
) -> tuple[list[int], str, str, list[int]]:
    """What the chat template puts around a message: ids, text, (message,) text, ids.

    Text between the message and the nearest added token on either side is encoded
    together with the message, since merges run across that seam.
    """
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": _SENTINEL}],
        chat_template=tokenizer.chat_template or CHATML,
        tokenize=False,
        add_generation_prompt=True,
    )
    if rendered.count(_SENTINEL) != 1:
        raise ValueError(
            f"{folder}: the chat template does not render a user message once and "
            "unchanged"
        )
    before, after = rendered.split(_SENTINEL)
    added = {token["id"] for token in spec["added_tokens"]}
    backend = tokenizer.backend_tokenizer
    head = backend.encode(before, add_special_tokens=False)
    tail = backend.encode(after, add_special_tokens=False)
    cut = max((i + 1 for i, t in enumerate(head.ids) if t in added), default=0)
    stop = min((i for i, t in enumerate(tail.ids) if t in added), default=None)
    left = before[head.offsets[cut - 1][1] :] if cut else before
    right = after if stop is None else after[: tail.offsets[stop][0]]
    if not tokenizer.chat_template and not cut:
        raise ValueError(f"{folder}: no chat template, and no <|im_start|> for ChatML")
    return head.ids[:cut], left, right, [] if stop is None else tail.ids[stop:]
