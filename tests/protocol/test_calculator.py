"""The calculator: Python's own values, nothing but arithmetic, and the protocol."""

import math
import operator
import warnings

import pytest
from byte_codec import BYTES, CODEC, END, ask, byte_encode, chat, text_of, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from lld_jax.protocol import calculator, search, trajectory
from lld_jax.protocol.calculator import (
    CLOSING_TAGS,
    ERRORS,
    MAX_BITS,
    MAX_LENGTH,
    CalculatorEnvironment,
    calculate,
)
from lld_jax.protocol.environment import Turn
from lld_jax.protocol.rewards import exact_match
from lld_jax.protocol.stop import stop_table

NO_ARITHMETIC = ERRORS[SyntaxError]
BY_ZERO = ERRORS[ZeroDivisionError]
TOO_LARGE = ERRORS[OverflowError]


def wrap(text):
    return f"\n\n<result>{text}</result>\n\n"


def shown(value):
    """How a value of Python reads; -0.0 without its sign."""
    return str(value) if isinstance(value, int) else f"{value + 0.0:.12g}"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"),
        ("84/1", "84"),
        ("0.1+0.2", "0.3"),
        ("(1 +\n2) * 3", "9"),
        ("-2**2", "-4"),
        ("2**3**2", "512"),
        ("-7//2", "-4"),
        ("-7 % 3", "2"),
        ("2**-1", "0.5"),
        ("3**0.5", "1.73205080757"),
        ("0*-1.5", "0"),
        ("1e5", "100000"),
        ("1/0", BY_ZERO),
        ("1%0.0", BY_ZERO),
        ("0**-1", BY_ZERO),
        ("(-8)**0.5", ERRORS[TypeError]),
    ],
)
def test_values(expression, value):
    assert calculate(expression) == value


NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str), st.floats(0.001, 1e6).map(lambda x: f"{x:.3f}")
)
SYMBOLS = st.sampled_from([" + ", "-", "*", "/", "//", " % ", "*-"])
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, SYMBOLS, inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS.filter(lambda text: len(text) <= MAX_LENGTH))
def test_expressions_have_the_values_of_python(text):
    try:
        expected = shown(eval(text))
    except ZeroDivisionError:
        expected = BY_ZERO
    assert calculate(text) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(-400, 400))
def test_powers_have_the_values_of_python_or_are_too_large(base, exponent):
    try:
        value = base**exponent
        large = isinstance(value, int) and abs(value) >= 2**MAX_BITS
        expected = TOO_LARGE if large else shown(value)
    except ZeroDivisionError:
        expected = BY_ZERO
    assert calculate(f"({base})**({exponent})") == expected


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e200, 1e200), st.floats(-1e200, 1e200), st.sampled_from("+-*/"))
def test_floats_overflow_with_a_word(a, b, symbol):
    names = {"+": "add", "-": "sub", "*": "mul", "/": "truediv"}
    expected = BY_ZERO
    if b or symbol != "/":
        value = getattr(operator, names[symbol])(a, b)
        expected = TOO_LARGE if math.isinf(value) else shown(value)
    assert calculate(f"({a!r}){symbol}({b!r})") == expected


@pytest.mark.parametrize(
    "expression",
    [
        *("__import__('os').system('true')", "().__class__", "1 .real", "(1).e"),
        *("abs(1)", "1(2)", "e", "x", "'1'*9", "[1]*9", "{1}", "1,2", "1;2", "a=1"),
        *("1 if 1 else 2", "1<2", "1j", "True", "lambda: 1", "1 and 2", "~1", "1<<9"),
        *("1_0", "0x10", "010", "1 2", "2 +", "1e", "(1", "1)", "\0", "\uff11", "2^3"),
        *("", " ", "...", "# 1"),
    ],
)
def test_nothing_but_arithmetic_is_run(expression):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calculate(expression) == NO_ARITHMETIC


@pytest.mark.parametrize(
    "expression",
    [
        *("9**9**9", "2**-10**400", "(9**9)**(9**9)", "10.0**400", "1e999", "-1e999"),
        *("2**1000", "2**999*2", "1e308*10", "2.5**1e308", "1" * (MAX_LENGTH + 1)),
        *("0*2**1000", "2**1000 % 7", "0*9**9**9"),  # no step may be
    ],
)
def test_what_is_too_large_is_refused_before_it_is_computed(expression):
    assert calculate(expression) == TOO_LARGE


def test_large_values_that_are_legal():
    assert calculate(f"2**{MAX_BITS - 1}") == str(2 ** (MAX_BITS - 1))
    assert calculate("(0-1)**(2**900) + 0**(2**900)") == "1"
    assert calculate("2**900/2**890") == "1024"
    assert calculate("2**1000.0") == f"{2.0**1000:.12g}"
    # Any depth that the length allows gives a value or a word, never an exception.
    for deep in ("-" * (MAX_LENGTH - 1) + "1", "(" * 149 + "1" + ")" * 149):
        assert calculate(deep) in ("1", "-1", NO_ARITHMETIC, TOO_LARGE)


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789.eE+-*/%() ", max_size=40) | st.text(max_size=20))
def test_any_text_gives_a_number_or_one_of_the_errors(text):
    found = calculate(text)
    assert found in ERRORS.values() or math.isfinite(float(found))


# ----- the environment


def test_replies_and_reasons_are_those_of_search():
    env = CalculatorEnvironment(CODEC)
    texts = ["<calculate> 12*7 </calculate>", "<answer>84</answer>", "none"]
    texts += ["<calculate>1/0</calculate>", "<search>x</search>", "<calculate></"]
    turns = [turn(text, last) for last in (False, True) for text in texts]
    turns += [
        turn(texts[0], room=3),
        turn("none", room=3),
        turn("none", True, cut=True),
    ]
    found = ask(env, turns)
    assert [reply.reason for reply in found] == [
        *(None, "answered", None, None, None, None),
        *("turns", "answered", "invalid", "turns", "invalid", "invalid"),
        *("context", "context", "tokens"),
    ]
    assert [text_of(found[i]) for i in (0, 2, 3, 4)] == [
        wrap("84"),
        calculator.RETRY,
        wrap(BY_ZERO),
        calculator.RETRY,
    ]
    valid, invalid = {"calculations": 1}, {"invalid_actions": 1}
    failed, cut = valid | {"calculations_failed": 1}, invalid | {"actions_cut": 1}
    assert [reply.counters for reply in found] == [
        *(valid, {}, invalid, failed, invalid, invalid),
        *(valid, {}, invalid, valid, invalid, invalid),
        *(valid, invalid, cut),
    ]
    (ended,) = ask(env, [Turn("q?", [*byte_encode("84"), END], 0, True, 99, True)])
    assert ended.reason == "invalid"
    (empty,) = ask(env, [turn("<calculate> </calculate>", True, cut=True)])
    assert empty.reason == "invalid"  # its own closing tag ended it
    assert calculator.RETRY.replace("calculate", "search") == search.RETRY


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.integers(85, 400), st.integers(0, 300))
def test_an_observation_keeps_to_its_budget_and_no_number_is_cut(room, most, digits):
    env = CalculatorEnvironment(CODEC, max_observation=most)
    value = 10**digits + 1
    (reply,) = ask(env, [turn(f"<calculate>10**{digits}+1</calculate>", room=room)])
    budget, empty = min(room, most), len(wrap(""))
    if room < empty:
        assert reply.reason == "context" and reply.ids is None
        return
    assert len(reply.ids) <= budget
    text, failed = text_of(reply), "calculations_failed" in reply.counters
    assert text.startswith(calculator.OPEN) and text.endswith(calculator.CLOSE)
    body = text[len(calculator.OPEN) : -len(calculator.CLOSE)]
    assert failed == (empty + len(str(value)) > budget)
    if failed:
        assert body == TOO_LARGE[: budget - empty].rstrip()
    else:
        assert body == str(value)


def test_budgets_hold_the_prompt_and_every_notice():
    least = max(len(wrap(text)) for text in (*ERRORS.values(), ""))
    CalculatorEnvironment(CODEC, max_observation=least)
    with pytest.raises(ValueError, match=f"max_observation={least - 1}.* {least} "):
        CalculatorEnvironment(CODEC, max_observation=least - 1)
    bare = len(chat(calculator.TEMPLATE.replace("{question}", "")))
    env = CalculatorEnvironment(CODEC, max_prompt=bare + 3)
    asked = calculator.TEMPLATE.replace("{question}", "How")
    assert env.start("How much?") == env.start("How") == chat(asked)
    assert env.fit_question("How much?") == "How"
    with pytest.raises(ValueError, match=f"max_prompt={bare - 1}"):
        CalculatorEnvironment(CODEC, max_prompt=bare - 1)


def test_an_answer_is_read_and_scored():
    """Tags of other tools do not count, neither to stop nor in the answer."""
    table = stop_table(BYTES, CLOSING_TAGS, {END})
    env = CalculatorEnvironment(CODEC)
    traj = trajectory.new_trajectory(0, 0, "6*14?", ("84",), env.start("6*14?"))
    for written in (
        "So <calculate>6*14</calculate>",
        "<search>x</search> <answer> 84 </answer>",
    ):
        state, ids = table.start, []
        for token in byte_encode(written + " and more"):
            if state != table.stop:
                state = table.next_state[state, token]
                ids.append(token)
        assert search.decode(ids, BYTES) == written
        trajectory.append_action(traj, ids, [-1.0] * len(ids))
        (reply,) = ask(env, [Turn(traj.question, ids, 0, False, 500)])
        traj.reason = reply.reason
        if reply.ids:
            trajectory.append_observation(traj, reply.ids)
    answer = trajectory.final_answer(traj, BYTES)
    assert answer == "84" and exact_match(answer, traj.golden_answers) == 1.0
    marked = trajectory.answer_mask(traj.ids, traj.mask, BYTES)
    assert sum(marked) == len("<answer> 84 </answer>")
