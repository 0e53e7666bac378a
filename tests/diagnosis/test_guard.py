"""What is done about an alarm, and that a kill changes nothing of it."""

import json

import pytest

from lld_jax import config as config_lib
from lld_jax.diagnosis import guard
from lld_jax.diagnosis.phases import Thresholds

LIMITS = Thresholds()


def records(steps):
    """A run that learns until step 60 and is dead by step 80."""
    for step in range(steps):
        reward = min(0.8, 0.2 + 0.01 * step)
        if step >= 60:
            reward = max(0.0, 0.8 - 0.04 * (step - 60))
        yield {"step": step, "reward/mean": reward, "grad/norm": 1.0}


def watch_over(action, steps=120, start=None):
    watch, todo = start or guard.Guard(0.2), {}
    for record in records(steps):
        watch, _ = guard.observe(watch, record["step"], record, action, LIMITS)
        if watch.todo != "none":
            todo[record["step"]] = watch.todo
    return watch, todo


def test_a_warning_is_given_once():
    watch, todo = watch_over("warn")
    assert list(todo.values()) == ["warn"]
    (step,) = todo
    assert 60 < step < 78 and watch.healthy == step
    assert (watch.coef, watch.lr_scale) == (0.2, 1.0)
    assert watch_over("none")[1] == {}


def test_the_notice_says_what_and_why():
    watch, _ = watch_over("stop", steps=1 + next(iter(watch_over("stop")[1])))
    assert watch.todo == "stop"
    assert watch.notice.startswith("step 7") and watch.notice.endswith("; stopping")
    assert "the reward is 0." in watch.notice


def test_lambda_is_raised_again_after_each_window():
    watch, todo = watch_over("raise_lambda")
    steps = list(todo)
    assert len(steps) > 2
    assert {b - a for a, b in zip(steps, steps[1:], strict=False)} == {LIMITS.window}
    assert watch.coef == pytest.approx(min(0.2 * 2 ** len(steps), 10.0))
    plain, todo = watch_over("raise_lambda", start=guard.Guard(0.0))
    assert plain.coef == pytest.approx(min(0.1 * 2 ** len(todo), 10.0))


def test_a_rollback_halves_the_learning_rate_and_starts_to_watch_anew():
    watch, todo = watch_over("roll_back", steps=75)
    assert "roll_back" in todo.values()
    back = guard.rolled_back(watch, 75)
    assert (back.lr_scale, back.coef, back.since) == (0.5, 0.2, 75)
    assert back.todo == "none" and back.watch == guard.Guard(0.2).watch
    assert guard.rolled_back(back, 90).lr_scale == 0.25


def test_the_last_healthy_checkpoint_is_gone_back_to():
    watch = guard.Guard(0.2, healthy=62)
    assert guard.target(watch, [20, 40, 60, 80]) == 60
    assert guard.target(watch, [80, 100]) == 80
    with pytest.raises(ValueError, match=r"checkpoint\.every"):
        guard.target(watch, [])


@pytest.mark.parametrize("action", guard.ACTIONS)
@pytest.mark.parametrize("killed", [5, 64, 73, 75, 100])
def test_a_killed_run_decides_the_same(action, killed):
    done = list(records(killed))
    watch = guard.Guard(0.2)
    for record in done:
        watch, _ = guard.observe(watch, record["step"], record, action, LIMITS)
    saved = json.loads(json.dumps(guard.to_json(watch)))
    again = guard.from_json(saved, done, action, LIMITS)
    assert again == watch
    for record in list(records(120))[killed:]:
        step = record["step"]
        watch, a = guard.observe(watch, step, record, action, LIMITS)
        again, b = guard.observe(again, step, record, action, LIMITS)
        assert (watch, a) == (again, b)


def test_a_config_may_name_each_action():
    rule = config_lib.FIELDS["diagnostics.action"]
    assert all(rule.holds(action) for action in guard.ACTIONS)
    assert rule.legal.count("'") == 2 * len(guard.ACTIONS)


def test_what_was_to_be_done_is_dropped_if_the_action_is_another_one():
    saved = guard.to_json(guard.Guard(0.2, todo="stop", acted=64))
    assert guard.from_json(saved, [], "stop", LIMITS).todo == "stop"
    assert guard.from_json(saved, [], "warn", LIMITS).todo == "none"
