"""An environment with a calculator: the rollout engine serves other tools than search.

It is also the pattern for another environment:

1. Choose the tag of the tool, the wrapper of an observation, the notice that follows
   an invalid action, and a prompt template with `{question}` in it.
2. Stop actions at your tags: `stop_table(token_bytes, CLOSING_TAGS, end_ids)`.
3. `start(question)` gives the prompt: `prompt_ids` with what `fit_question` leaves.
4. `step(turns)` is a generator of `(index, reply)`. `environment.settle` deals with
   answers, invalid actions and ends, and gives back what the tool has to do.
5. Yield what is ready first and call a slow tool once for all turns that need it. No
   state but what locks guard: several calls run at once, and a reader may stop early.
6. `observation_ids` keeps to a budget; text from outside goes through `clean_text`.
7. A tool that fails gives an observation that says so, never an exception.
8. Keep the `<answer>` tag for answers: rewards read what stands in it.
9. Count what happens in `Reply.counters`; the trajectory sums it up.
10. `check_budgets` with your notices finds budgets that are too small at the start.
"""

import ast
import math
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lld_jax.protocol.environment import Reply, Turn, settle
from lld_jax.protocol.search import (
    Codec,
    check_budgets,
    fit_question,
    observation_ids,
    prompt_ids,
)

TOOLS = ("calculate",)
CLOSING_TAGS = (b"</calculate>", b"</answer>")
OPEN = "\n\n<result>"
CLOSE = "</result>\n\n"
RETRY = "\n\nNot a valid action. Use calculate or answer tags.\n\n"
TEMPLATE = """\
<calculate> expression </calculate> or <answer> answer </answer>. An expression has \
numbers, + - * / // % ** and parentheses.
Question: {question}"""
ERRORS = {
    SyntaxError: "Error: not an expression of numbers, + - * / // % ** and ( ).",
    ZeroDivisionError: "Error: division by zero.",
    OverflowError: "Error: too large.",
    TypeError: "Error: not a real number.",
}
MAX_LENGTH = 300  # characters of an expression
MAX_BITS = 1000  # of a whole number; fewer than a float can hold

_ALLOWED = re.compile(r"[0-9.eE+*/%() -]*")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression by Python's rules, or one of `ERRORS`.

    A float is shown with 12 significant digits. No step may give a whole number of more
    than `MAX_BITS` bits, an infinity or a complex number.
    """
    text = " ".join(expression.split())
    try:
        if len(text) > MAX_LENGTH:
            raise OverflowError
        if not _ALLOWED.fullmatch(text):
            raise SyntaxError
        value = _value(ast.parse(text, mode="eval").body)
    except tuple(ERRORS) as error:
        return next(text for kind, text in ERRORS.items() if isinstance(error, kind))
    except (MemoryError, RecursionError):  # some parsers, of many parentheses
        return ERRORS[OverflowError]
    return str(value) if isinstance(value, int) else f"{value:z.12g}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(int() | float()):
            value = node.value
        case ast.UnaryOp(ast.USub()):
            value = -_value(node.operand)
        case ast.BinOp() if type(node.op) in _OPERATORS:
            left, right = _value(node.left), _value(node.right)
            if isinstance(node.op, ast.Pow) and type(left) is type(right) is int:
                # The power has more bits than this: seen before it is computed.
                if (left.bit_length() - 1) * right >= MAX_BITS:
                    raise OverflowError
            value = _OPERATORS[type(node.op)](left, right)
        case _:
            raise SyntaxError
    if isinstance(value, complex):
        raise TypeError
    whole = isinstance(value, int)
    if value.bit_length() > MAX_BITS if whole else math.isinf(value):
        raise OverflowError
    return value


@dataclass(frozen=True)
class CalculatorEnvironment:
    """Arithmetic between `<calculate>` tags, the value in a `<result>`.

    Budgets as in `SearchEnvironment`. Counters: `calculations` (well-formed actions,
    without a reply too), `calculations_failed`, and those that `settle` gives.
    """

    codec: Codec
    max_observation: int = 500
    max_prompt: int = 2048

    def __post_init__(self):
        notices = [(RETRY,), *((OPEN, text, CLOSE) for text in ERRORS.values())]
        budgets = self.max_prompt, self.max_observation
        check_budgets(self.codec, TEMPLATE, *budgets, notices)

    def fit_question(self, question: str) -> str:
        """The question, cut at its end (then: another text) to fit `max_prompt`."""
        return fit_question(self.codec, TEMPLATE, question, self.max_prompt)

    def start(self, question: str) -> list[int]:
        """Prompt ids, at most `max_prompt`; the template is always whole."""
        return prompt_ids(self.codec, TEMPLATE, self.fit_question(question))

    def step(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Reply]]:
        """The replies in the order of the turns."""
        notice = self.codec.encode(RETRY)
        wrapper = len(self.codec.encode(OPEN)) + len(self.codec.encode(CLOSE))
        for i, turn in enumerate(turns):
            settled = settle(
                turn,
                self.codec,
                notice=notice,
                wrapper=wrapper,
                counter="calculations",
                tools=TOOLS,
            )
            if not isinstance(settled, Reply):
                settled = self._reply(calculate(settled.content), turn.room)
            yield i, settled

    def _reply(self, text: str, room: int) -> Reply:
        counters = {"calculations": 1}
        budget = min(self.max_observation, room)
        ids, truncated = self._observe(text, budget)
        if truncated:  # a part of a number would be another number
            text = ERRORS[OverflowError]
            ids, _ = self._observe(text, budget)
        if text in ERRORS.values():
            counters["calculations_failed"] = 1
        return Reply(ids, None, counters)

    def _observe(self, text: str, budget: int) -> tuple[list[int], bool]:
        return observation_ids(self.codec, [text], budget, OPEN, CLOSE)
