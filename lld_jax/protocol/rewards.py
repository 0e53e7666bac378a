"""Score an answer against its gold answers: exact match and F1, as SQuAD has them."""

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case, without ASCII punctuation, articles and extra white space.

    The order is the one of the SQuAD evaluation (Rajpurkar et al. 2016):
    punctuation is removed, not replaced by a space, before articles are looked for,
    so "A. Lincoln" becomes "lincoln". No Unicode normalisation.
    """
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str | None, golden_answers: Sequence[str]) -> float:
    """1.0 if the prediction equals a gold answer after normalising, else 0.0.

    No prediction, and one of which normalising leaves nothing, scores 0: a gold
    answer such as "The" can't be met by an empty answer.

    Args:
      prediction: content of the last answer the policy wrote; None without one.
      golden_answers: sequence of strings; any of them counts.

    Raises:
      TypeError: `golden_answers` is a lone string (whose letters would each count)
        or holds something else than strings.
    """
    golds = _normalized_golds(golden_answers)
    answer = normalize_answer(prediction or "")
    return float(bool(answer) and answer in golds)


def f1(prediction: str | None, golden_answers: Sequence[str]) -> float:
    """Best harmonic mean of word precision and recall over the gold answers, 0..1.

    Words are counted with repetition; arguments and errors as in `exact_match`.
    """
    golds = _normalized_golds(golden_answers)
    words = Counter(normalize_answer(prediction or "").split())
    best = 0.0
    for gold in golds:
        wanted = Counter(gold.split())
        common = (words & wanted).total()
        if common:
            best = max(best, 2 * common / (words.total() + wanted.total()))
    return best


def _normalized_golds(golden_answers: Sequence[str]) -> list[str]:
    if isinstance(golden_answers, str | bytes) or not isinstance(
        golden_answers, Sequence
    ):
        raise TypeError(
            f"golden_answers must be a sequence of str, not {golden_answers!r}"
        )
    for gold in golden_answers:
        if not isinstance(gold, str):
            raise TypeError(f"golden_answers holds {gold!r}, which is not a str")
    return [normalize_answer(gold) for gold in golden_answers]
