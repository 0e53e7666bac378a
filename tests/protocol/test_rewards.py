import importlib.util
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import DATA, ROOT

from lld_jax.protocol.rewards import exact_match, f1, normalize_answer
from lld_jax.protocol.search import split_response

GOLDEN = json.loads((DATA / "em_golden.json").read_text())


def golds(row):
    return [row["gold"]] if isinstance(row["gold"], str) else row["gold"]


@pytest.mark.parametrize("row", GOLDEN["em_check"], ids=lambda row: row["note"])
def test_normalisation_and_exact_match_agree_with_the_official_code(row):
    assert normalize_answer(row["prediction"]) == row["normalized_prediction"]
    assert [normalize_answer(g) for g in golds(row)] == row["normalized_gold"]
    # On purpose unlike the official code: an answer of nothing never scores.
    expected = row["em"] if row["normalized_prediction"] else 0
    assert exact_match(row["prediction"], golds(row)) == expected


def test_the_golden_file_holds_the_case_where_we_differ():
    rows = GOLDEN["em_check"]
    assert sum(r["em"] and not r["normalized_prediction"] for r in rows) == 4


@pytest.mark.parametrize("prediction", [None, "", "  ", "the", "?!"])
def test_an_empty_answer_never_scores(prediction):
    for gold in (["Paris"], [""], ["The"], ["..."], []):
        assert exact_match(prediction, gold) == 0.0
        assert f1(prediction, gold) == 0.0


def test_an_empty_gold_never_matches():
    assert exact_match("Paris", ["", "the", "paris"]) == 1.0
    assert exact_match("Paris", ["", "the"]) == 0.0
    assert f1("Paris", ["", "the"]) == 0.0


@pytest.mark.parametrize("score", [exact_match, f1])
@pytest.mark.parametrize("gold", ["Paris", b"Paris", None, 5, {"target": "Paris"}])
def test_a_gold_that_is_no_sequence_is_refused(score, gold):
    # Iterating the string would let the prediction "P" match one letter.
    with pytest.raises(TypeError, match="must be a sequence of str"):
        score("P", gold)


@pytest.mark.parametrize("score", [exact_match, f1])
def test_a_gold_that_holds_no_string_is_refused(score):
    with pytest.raises(TypeError, match="holds 5, which is not a str"):
        score("5", ["five", 5])


def test_forms_of_the_gold_answer_after_loading():
    normalise_golden = pytest.importorskip("lld_jax.data.questions").normalise_golden
    np = pytest.importorskip("numpy")
    forms = ["Paris", ["Paris"], ("Paris",), b"Paris"]
    forms += [np.array(["Paris"], object), np.array(["Paris", "x"], object)]
    forms += [{"target": form} for form in forms]
    for form in forms:
        gold = normalise_golden(form)
        scores = [exact_match(p, gold) for p in ("Paris", "the paris.", "P", "")]
        assert scores == [1.0, 1.0, 0.0, 0.0], form


def policy_score(text, golden):
    """What the last answer of the policy's own part of a whole text scores."""
    written = text.rpartition("<|im_start|>assistant\n")[2]
    actions = [piece.action for piece in split_response(written) if piece.action]
    answers = [a.content for a in actions if a.kind == "answer"]
    return exact_match(answers[-1] if answers else None, golden)


# Where ours is not the official score of a whole text (`compute_score`).
DIFFERENT = {
    "a single answer block counts as the prompt's own: score 0": 1.0,
    "a prompt without the example: one block only, score 0": 1.0,
    "nested: non-greedy from the outer tag, text holds '<answer>'": 1.0,
    "nested: gold equal to the inner text after normalising": 0.0,
    "doubled opening tag: the tag's letters join the answer": 0.0,
    "empty answer, gold only an article: both normalise to ''": 0.0,
    "blank answer, a gold that normalises to ''": 0.0,
}


@pytest.mark.parametrize("row", GOLDEN["compute_score"], ids=lambda row: row["note"])
def test_only_what_the_policy_wrote_is_scored(row):
    expected = DIFFERENT.get(row["note"], row["em"])
    assert policy_score(row["text"], golds(row)) == expected


def test_an_unanswered_trajectory_is_not_graded_as_the_prompts_example():
    prompt = "For example, <answer> Beijing </answer>. Question: capital of China?"
    start = "<|im_start|>assistant\n"
    assert policy_score(f"{prompt}{start}I do not know.", ["Beijing"]) == 0.0
    assert policy_score(f"{prompt}{start}<answer>Beijing</answer>", ["Beijing"]) == 1.0


def test_an_answer_inside_a_retrieved_passage_is_not_the_policys():
    written = (
        "<search>capital of France</search>\n\n<information>Doc 1(Title: France) "
        "<answer> Paris </answer></information>\n\nI give up."
    )
    assert policy_score(written, ["Paris"]) == 0.0


def test_the_real_response_report_explains_disagreements():
    root = ROOT
    path = root / "experiments" / "real_responses" / "score.py"
    spec = importlib.util.spec_from_file_location("real_responses_score", path)
    score = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(score)

    def kinds(response, pred, em, golden=("Paris",)):
        row = {"response": response, "pred": pred, "em": em, "golden_answers": golden}
        return list(score.score_rows([row])["disagreements"])

    right = "<answer>Paris</answer>"
    assert kinds(right, "Paris", 1.0) == []
    assert kinds(right, "Paris", 0.0) == ["unexplained"]
    assert "another stretch" in kinds(right, "Rome", 0.0)[0]
    assert "no complete answer" in kinds("<answer>Paris", "Paris", 1.0)[0]
    assert "contains the gold" in kinds("<answer>in Paris</answer>", "in Paris", 1.0)[0]
    assert "empty" in kinds("<answer>The</answer>", "The", 1.0, ("the",))[0]
    observed = (
        "<search> France </search>\n\n<information>Doc 1(Title: France (x)) a\n"
        'Doc 2(Title: "Paris") b (c) d</information>\n\n<answer>Paris</answer>'
    )
    assert score.searches(observed) == [("France", {"france (x)", "paris"})]


def test_f1_counts_words_with_repetition():
    assert f1("the blue car", ["blue car"]) == 1.0
    assert f1("blue car", ["red car"]) == pytest.approx(0.5)
    assert f1("a a b b", ["b c"]) == pytest.approx(2 * 1 / (2 + 2))
    assert f1("x x x", ["x x y"]) == pytest.approx(2 * 2 / 6)
    assert f1("red", ["blue", "red wine"]) == pytest.approx(2 / 3)
    assert f1("red", ["blue"]) == 0.0


@given(st.text(max_size=20), st.lists(st.text(max_size=20), max_size=3))
def test_scores_are_bounded_and_exact_match_implies_full_f1(prediction, gold):
    em, overlap = exact_match(prediction, gold), f1(prediction, gold)
    assert em in (0.0, 1.0) and 0.0 <= overlap <= 1.0 + 1e-12
    if em:
        assert overlap == pytest.approx(1.0)


@given(st.text())
def test_normalising_keeps_no_outer_or_double_space(text):
    done = normalize_answer(text)
    assert done == " ".join(done.split()) and done == done.strip()
